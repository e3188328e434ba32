"""The federation over a real network: the protocol's own objects between processes and hosts.

Clients dial out to the server; nothing dials into a client. One bidirectional stream a client carries
the frames of vafl.runtime.codec. Torch runs in one worker thread a process, never on the event loop.
"""
