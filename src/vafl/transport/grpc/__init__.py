"""The federation over a real network: the protocol's own objects between processes and hosts.

Clients dial out to the server; nothing dials into a client. One bidirectional stream a client carries
the frames of vafl.transport.codec. One worker a process does the protocol's work, and keeps all that takes
long off the event loop.
"""
