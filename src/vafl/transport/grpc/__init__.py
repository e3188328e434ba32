"""Run a federation over a real network: the protocol's objects in several processes, connected by gRPC.

Clients dial the server; nothing dials a client. Each client has one bidirectional stream, which carries the
frames of vafl.transport.codec. Each process has one worker, which runs the protocol outside the event loop.

- stream.py, flow_control.py: one end of a stream. Alignments use these and the next three items, too.
- admission.py: the server's side of setting up a stream: listen, identify a client, compare terms.
- reconnect.py: the client's side: dial, and dial again.
- terms.py, wire.py: what both ends must agree on; names and gRPC options.
- server.py, connection.py, client.py, session.py: the two ends of a run. They describe the states of a
  connection.
- worker.py, pace.py, local.py: run the protocol; limit answers; a connection inside the server's process.
"""
