"""What each client has sent and received."""

from dataclasses import dataclass


@dataclass
class Traffic:
    """What one client has sent and received."""

    bytes_up: int = 0
    bytes_down: int = 0
    messages_up: int = 0
