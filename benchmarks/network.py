"""Updates per second between real processes over mutual TLS, compared with a bare echo and with NVFlare.

The echo moves the same bytes between equally many processes over the same transport and computes nothing.
Both run all the time and work in turns, so other load on the machine slows both. All processes share the
machine's cores, so the clients' arithmetic counts too.
"""

from typing import Any

from benchmarks.federation import Workload, federation
from benchmarks.harness import Figure, benchmark, ratios
from benchmarks.peers.grpc_echo import echo
from benchmarks.peers.nvflare_splitnn.measure import measure_splitnn

ROUNDS, SLICE_SECONDS = 9, 1.5
NVFLARE_ROUNDS, NVFLARE_SECONDS = 5, 4.0
WINDOW = 2  # vafl's default over a network; the echo uses the same


def _document(batch: int, **sections: Any) -> dict[str, Any]:
    """Algorithm 1 as written: a client uploads the rows of its batch and no others."""
    return {"schedule": {"batch_size": batch, "refresh": "none"}, **sections}


LOGISTIC = Workload(4, 16, _document(600))
MNIST = Workload(4, 196, _document(600))
WIDE = Workload(4, 16, _document(256, model={"head": "linear", "width": 512}))
SPLITNN = _document(
    64,
    model={"head": "mlp", "width": 64, "head_hidden": [128]},
    optimiser={"step_size": 0.01, "options": {"momentum": 0.9}},
    network={"encoding": "float16"},
)


@benchmark(target=0.6, better="higher")
def echo_ratio_lr() -> Figure:
    """Logistic regression, uploads of 600 x 10, 4 clients with 16 columns each as in `make demo`.

    The detail has the same with MNIST's 196 columns per client, where arithmetic is most of the work.
    """
    few = beside_echo(LOGISTIC)
    return Figure(few.samples, {**few.detail, "mnist_columns": beside_echo(MNIST).summary()})


@benchmark(target=0.5, better="higher")
def echo_ratio_wide() -> Figure:
    """A linear head on the sum of embeddings 512 wide, uploads of 256 x 512, 4 clients."""
    return beside_echo(WIDE)


@benchmark(target=50.0, better="higher")
def nvflare_ratio() -> Figure:
    """An MLP 784-64 | 128-10, batch 64, float16 on the wire, 4 clients: NVFlare's SplitNN, whose columns lie
    with one client.

    NVFlare passes arrays as its own example does. The detail has NVFlare with arrays packed into bytes by
    hand, and vafl with one client.
    """
    limit = int(NVFLARE_ROUNDS * 300)
    ours, one, documented, packed = [], [], [], []
    with (
        federation(Workload(4, 196, SPLITNN), limit) as four_clients,
        federation(Workload(1, 784, SPLITNN), limit) as one_client,
    ):
        for _ in range(NVFLARE_ROUNDS):
            ours.append(four_clients(SLICE_SECONDS).rate)
            one.append(one_client(SLICE_SECONDS).rate)
            theirs = measure_splitnn(NVFLARE_SECONDS)
            documented.append(theirs.steps_per_second)
            packed.append(theirs.detail["packed_steps_per_second"])
    detail = {
        "steps_per_second": Figure(ours).summary(),
        "steps_per_second_one_client": Figure(one).summary(),
        "nvflare_steps_per_second": Figure(documented).summary(),
        "nvflare_packed_steps_per_second": Figure(packed).summary(),
        "one_client": Figure(ratios(one, documented)).summary(),
        "over_packed": Figure(ratios(ours, packed)).summary(),
        "nvflare": theirs.detail,
    }
    return Figure(ratios(ours, documented), detail)


def beside_echo(workload: Workload) -> Figure:
    """Return the updates per second over the echoes per second of the same bytes, slice by slice."""
    limit = int(3 * ROUNDS * SLICE_SECONDS)
    with federation(workload, limit) as work:
        first = work(SLICE_SECONDS)
        up, down = first.bytes_up // first.updates, first.bytes_down // first.updates
        with echo(up, down, workload.clients, WINDOW, limit) as trips:
            pairs = [(work(SLICE_SECONDS).rate, sum(trips(SLICE_SECONDS))) for _ in range(ROUNDS)]
    ours, theirs = zip(*pairs, strict=True)
    detail = {
        "updates_per_second": Figure(ours).summary(),
        "echoes_per_second": Figure(theirs).summary(),
        "bytes_up": up,
        "bytes_down": down,
        "window": WINDOW,
    }
    return Figure(ratios(ours, theirs), detail)
