"""Measure what privacy costs a client: its whole step under dp_train over the same step without privacy.

A step is everything that a client does for one activation: choose rows, charge, embed, clip, add noise,
upload, map the answer back to the parameters, and update them. CPU time of one thread.
"""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import process_time

import torch

from benchmarks.harness import Figure, benchmark, interleave, ratios
from benchmarks.simulator import random_data
from vafl.config import Config
from vafl.data.partition import VerticalData
from vafl.models.settings import EmbeddingSettings
from vafl.privacy.settings import PrivacySettings
from vafl.protocol.messages import Gradient, Upload
from vafl.protocol.schedule import ScheduleSettings
from vafl.protocol.settings import OptimiserSettings
from vafl.run.assembly import limited_threads, make_client, make_privacy
from vafl.run.plan import make_plan

_TRAINED = PrivacySettings(clip=1.0, noise=1.0, gradient_clip=1.0, gradient_noise=1.0, mu_max="unlimited")
_STEPS = 40


@benchmark(target=3.0)
def dp_train_cost_linear() -> Figure:
    """A linear client with 112 features, 10 outputs, batches of 600: MNIST over 7 clients."""
    return _cost(EmbeddingSettings())


@benchmark(target=4.0)
def dp_train_cost_mlp() -> Figure:
    """The same as `dp_train_cost_linear`, with a hidden layer of 64 units."""
    return _cost(EmbeddingSettings("mlp", hidden=(64,)))


@limited_threads(1)
def _cost(embedding: EmbeddingSettings) -> Figure:
    schedule = ScheduleSettings(batch_size=600, refresh="none")
    plain = Config(embedding=embedding, schedule=schedule, optimiser=OptimiserSettings(step_size=1e-4))
    private = replace(plain, privacy=_TRAINED)
    data = random_data(60_000, [(112,)])
    with tempfile.TemporaryDirectory() as folder:
        actions = [_steps(plain, data), _steps(private, data), _steps(private, data, Path(folder))]
        without, with_privacy, durable = interleave(*actions, clock=process_time)
    detail = {
        "plain_us": round(Figure(without).quartiles[1] / _STEPS * 1e6, 1),
        "private_us": round(Figure(with_privacy).quartiles[1] / _STEPS * 1e6, 1),
        "with_a_ledger_on_disk": Figure(ratios(durable, without)).summary(),
    }
    return Figure(ratios(with_privacy, without), detail)


def _steps(config: Config, data: VerticalData, ledgers: Path | None = None) -> Callable[[], None]:
    """Return a function that makes some activations of one client, answered immediately."""
    plan = make_plan(config, data)
    client = make_client(plan, 0, privacy=make_privacy(plan, 0, ledgers))
    answer = torch.randn(config.schedule.batch_size, 10).div(config.schedule.batch_size).numpy()

    def step() -> None:
        for _ in range(_STEPS):
            upload, *_ = client.wake()  # sometimes a mark of the ledger follows
            if not isinstance(upload, Upload):
                raise TypeError(f"the client must upload. Found {upload}.")
            client.receive(Gradient(0, upload.activation, upload.activation, answer, (client.activation,)))

    return step
