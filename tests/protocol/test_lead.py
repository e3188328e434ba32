"""`rule.lead`: how far fast clients may run ahead of slow ones."""

import numpy as np
import pytest

from tests.federation import Exchange, run_of, vertical_data
from vafl.errors import ConfigError
from vafl.protocol.lead import Lead
from vafl.protocol.rules import Turn
from vafl.protocol.settings import RuleSettings

EPOCH = 5


def turn(client, activation):
    return Turn(client, activation, np.array([0]), True, True)


def exchange(**rule):
    """Return a federation of three clients with five batches per epoch."""
    data = vertical_data(rows=4 * EPOCH, clients=3)
    return Exchange(run_of(data, rule={"lead": 2.0, **rule}, stop={"updates": 1000}))


def alternate(run, *clients, rounds=20):
    """Let clients take turns while the server answers them."""
    for _ in range(rounds):
        for client in clients:
            if not run.clients[client].waiting:
                run.turn(client)
        run.deliver()


def test_a_client_may_make_twice_as_many_uploads_as_the_slowest_and_one_epoch_more():
    lead = Lead(2.0, EPOCH, 2)
    for slow, most in [(0, 5), (1, 7), (4, 13)]:
        made = [turn(0, most - 1), turn(0, most)]
        assert lead.within(made, (most + 1, slow), set()) == made[:1]


@pytest.mark.parametrize("away", [{1}, {0, 1}])
def test_clients_that_are_away_do_not_count(away):
    waiting = [turn(0, 100)]
    assert Lead(2.0, EPOCH, 2).within(waiting, (101, 0), away) == waiting


def test_after_a_join_the_counts_start_again():
    lead = Lead(2.0, EPOCH, 2)
    lead.restart((100, 3))
    made = [turn(0, 104), turn(0, 105)]
    assert lead.within(made, (106, 3), set()) == made[:1]


def test_fast_clients_wait_for_the_slow_one_and_go_on_with_it():
    run = exchange()
    alternate(run, 0, 1)
    assert run.server.activations == [EPOCH + 1, EPOCH + 1, 0]
    assert run.server.iteration == 2 * EPOCH, "each has one upload that waits"
    assert "slower" in run.server.waiting_for()
    run.turn(2)
    run.deliver()
    assert run.server.iteration == 2 * EPOCH + 3


def test_nobody_waits_for_a_client_that_has_left():
    run = exchange()
    alternate(run, 0, 1)
    run.leave(2)
    run.deliver()
    alternate(run, 0, 1)
    assert run.server.iteration >= 2 * EPOCH + 40


def test_a_step_of_two_clients_is_made_once_the_slow_one_uploads():
    run = exchange(name="t-sync", t=2)
    alternate(run, 0, 1)
    made = run.server.iteration
    assert made == EPOCH
    run.turn(2)
    assert run.server.iteration > made


def test_without_a_limit_fast_clients_go_on():
    run = exchange(lead=0.0)
    for _ in range(20):
        run.turn(0)
    assert run.server.iteration == 20


def test_a_lead_below_one_is_refused():
    with pytest.raises(ConfigError, match=r"VFL-4204.*0\.5"):
        RuleSettings(lead=0.5)
