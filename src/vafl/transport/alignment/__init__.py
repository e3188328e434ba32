"""Align the parties' records by private set intersection, over gRPC streams that the clients dial.

- frames.py: the messages, and their checks.
- stream.py: send and receive messages, with a time limit on every wait. vafl.transport.grpc reads and writes.
- compute_pool.py, worker.py: compute in several processes.
- exchange.py: the cryptographic protocol of docs/alignment.md.
- server.py, client.py: the two ends. server.py describes the states of an alignment.
- reasons.py: what each party may learn about a failure.
"""
