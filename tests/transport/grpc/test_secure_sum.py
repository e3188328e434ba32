"""Secure sum over real sockets: what the server receives, and what happens when a client is lost."""

import asyncio

import numpy as np
import pytest
import torch

from tests.transport.grpc.parties import Federation, complete, configuration, run_all
from vafl.errors import RemoteFault
from vafl.protocol.messages import Join, Leave, MaskedRefresh, MaskedUpload, Offer
from vafl.protocol.prediction_client import embed
from vafl.protocol.secure_sum.fixed_point import decode
from vafl.run.assembly import build, make_server, make_table
from vafl.transport.grpc.client import FederationClient
from vafl.transport.grpc.server import FederationServer


def secure(**sections):
    return configuration(
        partition={"clients": 3},
        rule={"name": "sync"},
        schedule={"batch_size": 16, "refresh": "none"},
        privacy={"secure_sum": True},
        **sections,
    )


class SecureFederation(Federation):
    """Record what the server has received."""

    def __init__(self, config):
        super().__init__(config)
        self.server = make_server(self.plan, make_table(self.plan, self.plan.data.parts.total))
        self.received = []
        receive = self.server.receive

        def remember(message):
            self.received.append(message)
            return receive(message)

        self.server.receive = remember
        self.end = FederationServer(self.server, self.names, self.terms, config.network, None, self.driver)


def test_it_ends_in_the_parameters_of_plain_sync_and_no_embedding_was_sent():
    config = secure()
    simulated = build(config)
    points = simulated.train()
    federation = SecureFederation(config)
    _, reasons = complete(run_all(federation))
    assert reasons == ["60 updates were made"] * 3
    for mine, theirs in zip(simulated.models, federation.plan.models, strict=True):
        torch.testing.assert_close(mine.state_dict(), theirs.state_dict())
    torch.testing.assert_close(simulated.head.state_dict(), federation.plan.head.state_dict())
    assert federation.points[-1].metric == pytest.approx(points[-1].metric)
    received = {type(message) for message in federation.received} - {Leave}
    assert received == {Join, Offer, MaskedUpload, MaskedRefresh}


def test_the_last_evaluation_was_a_sum_of_all_and_of_nobody_alone():
    federation = SecureFederation(secure())
    complete(run_all(federation))
    held_out = federation.driver.held_out
    features = [party.features for party in federation.plan.data.parties]
    own = [
        embed(model, table, held_out).numpy()
        for model, table in zip(federation.plan.models, features, strict=True)
    ]
    np.testing.assert_allclose(federation.server.table.read(held_out), sum(own), rtol=1.3e-6, atol=1e-5)
    answers = [message for message in federation.received if isinstance(message, MaskedRefresh)]
    for answer in answers:
        assert all(np.median(np.abs(decode(answer.words) - part)) > 1e6 for part in own)


def test_a_client_that_is_cut_off_begins_an_epoch_and_the_run_goes_on():
    async def story():
        federation = SecureFederation(secure(stop={"updates": 200}))
        serving = asyncio.create_task(federation.serve())
        await federation.listening.wait()
        clients = [federation.client(index) for index in range(3)]
        running = [asyncio.create_task(client.run()) for client in clients]
        while federation.server.iteration < 20:
            await asyncio.sleep(0.01)
        epoch = federation.server.sums.key_epochs.number
        running[1].cancel()
        await asyncio.gather(running[1], return_exceptions=True)
        while 1 not in federation.server.absent:
            await asyncio.sleep(0.01)
        stopped_at = federation.server.iteration
        await asyncio.sleep(0.3)
        assert federation.server.iteration == stopped_at, "no step is made without it"
        assert "keys of clients [1]" in federation.server.waiting_for()
        clients[1] = _again(federation, clients[1])
        reasons = await asyncio.gather(running[0], clients[1].run(), running[2])
        await serving
        return federation, epoch, reasons

    federation, epoch, reasons = complete(story())
    assert reasons == ["200 updates were made"] * 3
    assert federation.server.sums.key_epochs.number > epoch
    assert federation.points[-1].metric > 0.7


def _again(federation, before):
    """Connect the same client again, as after a network failure."""
    network = configuration(network={"address": federation.address}).network
    return FederationClient(before.client, before.party, federation.terms, network, None, takes_over=True)


def test_parties_must_agree_whether_to_mask():
    async def story():
        federation = SecureFederation(secure(network={"join_timeout": 2.0}))
        serving = asyncio.create_task(federation.serve())
        await federation.listening.wait()
        plain = Federation(
            configuration(
                partition={"clients": 3},
                rule={"name": "sync"},
                schedule={"batch_size": 16, "refresh": "none"},
            )
        )
        plain.address = federation.address
        with pytest.raises(RemoteFault, match="VFL-6111"):
            await plain.client(0).run()
        serving.cancel()

    complete(story())
