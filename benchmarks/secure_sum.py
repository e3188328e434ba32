"""Measure what masks cost a client: its whole step in a secure sum over the same step in plain sync.

A step: choose rows, embed, mask, upload, map the answer back to the parameters, and update them. CPU time of
one thread.
"""

from collections.abc import Callable
from dataclasses import replace
from time import process_time

import torch

from benchmarks.harness import Figure, benchmark, interleave, ratios
from benchmarks.simulator import random_data
from vafl.config import Config
from vafl.privacy.settings import PrivacySettings
from vafl.protocol.messages import Gradient, Keys, MaskedUpload, Offer, Rekey, Upload
from vafl.protocol.schedule import ScheduleSettings
from vafl.protocol.settings import RuleSettings
from vafl.run.assembly import limited_threads, make_client
from vafl.run.plan import make_plan

_STEPS, _BATCH = 40, 600


@benchmark(target=3.0)
def secure_sum_cost_3() -> Figure:
    """A step of one of 3 linear clients with 112 features, 10 outputs, batches of 600."""
    return _cost(3)


@benchmark(target=5.0)
def secure_sum_cost_8() -> Figure:
    """A step of one of 8 such clients."""
    return _cost(8)


@limited_threads(1)
def _cost(clients: int) -> Figure:
    schedule = ScheduleSettings(batch_size=_BATCH, refresh="none")
    plain = Config(rule=RuleSettings(name="sync"), schedule=schedule)
    secure = replace(plain, privacy=PrivacySettings(secure_sum=True))
    with_masks, without = interleave(_steps(secure, clients), _steps(plain, clients), clock=process_time)
    detail = {
        name: round(Figure(seconds).quartiles[1] / _STEPS * 1e6, 1)
        for name, seconds in (("masked_us", with_masks), ("plain_us", without))
    }
    return Figure(ratios(with_masks, without), detail)


def _steps(config: Config, clients: int) -> Callable[[], None]:
    """Return a function that makes some activations of the first client, answered immediately.

    The other clients only contribute their keys.
    """
    plan = make_plan(config, random_data(6_000, [(112,)] * clients))
    parties = [make_client(plan, index) for index in range(clients)]
    own = parties[0]
    if config.privacy.secure_sum:
        said = [message for party in parties for message in party.receive(Rekey(party.index, 0, "begin"))]
        own.receive(Keys(0, 0, tuple(message.offer for message in said if isinstance(message, Offer))))
    answer = torch.randn(_BATCH, 10).div(_BATCH).numpy()

    def step() -> None:
        for _ in range(_STEPS):
            (upload,) = own.wake()
            if not isinstance(upload, Upload | MaskedUpload):
                raise TypeError(f"the client must upload. Found {upload}.")
            own.receive(
                Gradient(0, upload.activation, upload.activation, answer, (own.activation,) * clients)
            )

    return step
