"""Run a federation over a real network: the protocol's objects in several processes, connected by gRPC.

Clients dial the server; nothing dials a client. Each client has one bidirectional stream, which carries the
frames of vafl.transport.codec. Each process has one worker, which runs the protocol outside the event loop.

server.py, client.py and connection.py describe the states of a connection.
"""
