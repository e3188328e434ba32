"""`vafl` with a server that records what it does: `python -m tests.chaos.traced server CONFIG ...`.

The trace is a file of JSON lines that every process of the server appends to (VAFL_TRACE names it). A line is
written before any message about its content is sent, so a killed server has sent nothing that is not in its
trace.
"""

import hashlib
import json
import os
import sys
import time

import numpy as np

from vafl import cli
from vafl.protocol.server import Server
from vafl.protocol.table import FOREVER
from vafl.run.server_state import ServerState
from vafl.transport.grpc.handler import Handler


class Trace:
    """Appends lines with one write each, so that a kill leaves only whole lines."""

    def __init__(self, path):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, what, **facts):
        line = json.dumps({"what": what, "at": time.time(), **facts}) + "\n"
        os.write(self._file, line.encode())


def digest_of(server: Server) -> str:
    """Return a digest of the state that training depends on, without connections and requests."""
    table = server.table
    digest = hashlib.blake2b(digest_size=16)
    for array in (table.cells, table.stored_at):
        digest.update(array.tobytes())
    for tensor in server.head.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    waiting = [(turn.client, turn.activation, turn.rows.tolist()) for turn in server._waiting]
    answers = [[answer.activation for answer in kept] for kept in server._answers.kept]
    facts = (server.iteration, server.activations, server.durable, waiting, answers)
    digest.update(json.dumps(facts).encode())
    digest.update(repr(server.descent.state()).encode())
    return digest.hexdigest()


def trace_server(trace: Trace) -> None:
    """Wrap the methods that change the server's history."""
    began, step, made_durable = ServerState.__init__, Server._step, Server.made_durable
    take_join, skipped = Server._take_join, Server._skipped

    def begin(state, *arguments, **options):
        began(state, *arguments, **options)
        trace.write("life", iteration=state.server.iteration, activations=state.server.activations)

    def traced_step(server, group):
        rows = np.concatenate([turn.rows for turn in group])
        delays = server.table.delays(rows, server.iteration)
        uploads = [(turn.client, turn.activation) for turn in group if turn.steps]
        if uploads:
            known = int(delays[delays < FOREVER].max(initial=0))
            unknown = int((delays >= FOREVER).sum())
            trace.write("step", iteration=server.iteration, uploads=uploads, delay=known, unknown=unknown)
        return step(server, group)

    def traced_durable(server, activations):
        trace.write("durable", told=list(activations))
        return made_durable(server, activations)

    def traced_join(server, join):
        """Record the uploads that a join gives up: no step used them, and they are not sent again."""
        client = join.client
        known, waiting = server.activations[client], _waiting(server, client)
        replies = take_join(server, join)
        adopted = range(known, server.activations[client])
        trace.write("join", client=client, given_up=[*adopted, *sorted(waiting - _waiting(server, client))])
        return replies

    def traced_skip(server, turn, reason):
        trace.write("skipped", client=turn.client, activation=turn.activation, reason=reason)
        return skipped(server, turn, reason)

    ServerState.__init__, Server._step, Server.made_durable = begin, traced_step, traced_durable
    Server._take_join, Server._skipped = traced_join, traced_skip


def _waiting(server, client):
    return {turn.activation for turn in server._waiting if turn.client == client and turn.steps}


def trace_digests(trace: Trace) -> None:
    """Write a line whenever the state that training depends on has changed; check a few times a second."""
    attend, last = Handler.attend, [""]

    def traced_attend(handler):
        handled = attend(handler)
        digest = digest_of(handler._server)
        if digest != last[0]:
            last[0] = digest
            trace.write("state", digest=digest, iteration=handler._server.iteration)
        return handled

    Handler.attend = traced_attend


def main():
    trace = Trace(os.environ["VAFL_TRACE"])
    trace_server(trace)
    if os.environ.get("VAFL_TRACE_STATE"):
        trace_digests(trace)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
