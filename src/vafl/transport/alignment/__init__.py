"""Alignment between processes: the private set intersection on gRPC streams that the clients dial.

frames.py says what travels and checks it, line.py moves it with a time-out on every wait, crew.py computes,
exchange.py is the protocol of docs/alignment.md, server.py and client.py are its two ends.
"""
