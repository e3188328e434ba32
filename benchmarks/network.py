"""Updates per second between real processes over mutual TLS, beside a bare echo and beside NVFlare.

The echo moves the same bytes between as many processes over the same transport and computes nothing. Both
are up all the time and work in turns, so that whatever else the machine does slows both.
"""

from collections.abc import Mapping
from typing import Any

from benchmarks.federation import Workload, federation
from benchmarks.harness import Figure, benchmark
from benchmarks.peers.grpc_echo import echo

CLIENTS = 4
ROUNDS, SLICE_SECONDS = 9, 1.5


def _document(batch: int, **sections: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "schedule": {"batch_size": batch, "refresh": "none"},
        "optimiser": {"step_size": 0.01},
        "stop": {"updates": 10**9},
        **sections,
    }


LOGISTIC = Workload(CLIENTS, 16, _document(600))
MNIST = Workload(CLIENTS, 196, _document(600))
WIDE = Workload(CLIENTS, 196, _document(256, model={"head": "linear", "width": 512}))
SPLITNN = Workload(
    1,
    784,
    _document(
        64,
        model={"head": "mlp", "width": 64, "head_hidden": [128]},
        optimiser={"step_size": 0.01, "options": {"momentum": 0.9}},
        network={"encoding": "float16"},
    ),
)
SPLITNN4 = Workload(4, 196, SPLITNN.document)


@benchmark(target=0.6, better="higher")
def echo_ratio_lr() -> Figure:
    """Logistic regression on MNIST's 784 columns, uploads of 600 x 10."""
    return beside_echo(LOGISTIC)


@benchmark(target=0.5, better="higher")
def echo_ratio_wide() -> Figure:
    """A linear head on the sum of embeddings 512 wide, uploads of 256 x 512."""
    return beside_echo(WIDE)


def beside_echo(workload: Workload) -> Figure:
    limit = int(3 * ROUNDS * SLICE_SECONDS)
    with federation(workload, limit) as work:
        first = work(SLICE_SECONDS)
        up, down = first.bytes_up // first.updates, first.bytes_down // first.updates
        with echo(up, down, workload.clients, 2, limit) as trips:
            pairs = [(work(SLICE_SECONDS).rate, sum(trips(SLICE_SECONDS))) for _ in range(ROUNDS)]
    ours, theirs = (Figure(rates).summary() for rates in zip(*pairs, strict=True))
    detail = {"updates_per_second": ours, "echoes_per_second": theirs, "bytes_up": up, "bytes_down": down}
    return Figure([own / bare for own, bare in pairs], detail)
