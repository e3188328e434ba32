"""Large contents are sent in several messages, or the error names the setting that is too small."""

import asyncio

import pytest

from tests.transport.grpc.parties import Federation, complete, configuration, run_all
from vafl.errors import ConfigError
from vafl.run.agreement import rows_at_once

SMALL = {"largest_message": 500}  # 16 rows of a batch fit, the table's 112 and the 38 held out do not


class Tight(Federation):
    overrides = SMALL

    @property
    def refresh_rows(self):
        return rows_at_once(self.config, max(self.terms.widths))


def federation(**sections):
    made = Tight(configuration(network=SMALL, **sections))
    made.driver.most_rows = made.server.recall_rows = rows_at_once(made.config, max(made.terms.widths))
    return made


@pytest.mark.parametrize("refresh", ["all", "none"])
def test_refreshes_and_evaluations_come_in_messages_that_fit(refresh):
    made = federation(rule={"start": "upload"}, schedule={"batch_size": 16, "refresh": refresh})
    clients, reasons = complete(run_all(made))
    assert reasons == ["60 updates were made"] * 2
    assert [client.reconnects for client in clients] == [0, 0]
    assert made.points[-1].metric > 0.7
    assert made.end.violations == {}


def test_a_batch_that_does_not_fit_ends_its_client_with_the_setting_and_is_no_result():
    """Reconnecting would not help. A server without clients makes no evaluation."""

    async def story():
        made = federation(schedule={"batch_size": 40}, stop={"updates": 60, "seconds": 1.0})
        serving = asyncio.create_task(made.serve())
        await made.listening.wait()
        clients = [made.client(index) for index in range(2)]
        failures = await asyncio.gather(*(client.run() for client in clients), return_exceptions=True)
        await serving
        return made, clients, failures

    made, clients, failures = complete(story())
    for client, failure in zip(clients, failures, strict=True):
        assert isinstance(failure, ConfigError)
        assert "network.largest_message, 500 bytes" in str(failure)
        assert client.reconnects == 0
    assert made.points == []
