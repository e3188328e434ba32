"""Count what each client sends and receives."""

from dataclasses import dataclass


@dataclass
class Traffic:
    """What one client has sent (up) and received (down)."""

    bytes_up: int = 0
    bytes_down: int = 0
    messages_up: int = 0
