"""A federation of real processes: the server's part, a client's part, and both on one machine."""
