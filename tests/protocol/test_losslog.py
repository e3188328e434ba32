import math

import pytest

from vafl.errors import Diverged
from vafl.protocol.losslog import LossLog


def test_the_mean_is_taken_since_the_last_look():
    log = LossLog()
    assert log.take_mean() is None
    log.note(1.0)
    log.note(4.0)
    assert log.take_mean() == 2.5
    assert log.take_mean() is None
    log.note(7.0)
    assert log.take_mean() == 7.0


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_raises_the_alarm(loss):
    LossLog.check(1e30, 3)
    with pytest.raises(Diverged, match=rf"VFL-4011.*{loss} at iteration 3.*optimiser.step_size"):
        LossLog.check(loss, 3)
