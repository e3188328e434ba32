"""A switch that delays and loses packets, for kernels without netem.

python -m tests.chaos.forwarder SECONDS SHARE INTERFACE INTERFACE ...
"""

import random
import select
import signal
import socket
import sys
import time
from collections import deque

_ANY = 3  # ETH_P_ALL
_PACKET, _IGNORE_OUTGOING, _OFFLOADS = 263, 23, 15  # SOL_PACKET, PACKET_IGNORE_OUTGOING, PACKET_VNET_HDR
_HEADER = 10  # bytes of struct virtio_net_hdr: what is left to do for checksums travels with each packet
_LONGEST = 1 << 17


def wire(interface: str) -> socket.socket:
    """Return a socket that receives every packet of this interface and can send on it."""
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ANY))
    opened.setsockopt(_PACKET, _OFFLOADS, 1)
    opened.setsockopt(_PACKET, _IGNORE_OUTGOING, 1)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    opened.bind((interface, 0))
    return opened


def forward(delay: float, loss: float, wires: list[socket.socket], chance: random.Random) -> None:
    """Forward packets forever: to the interface where the address was seen last, or to all others."""
    seen: dict[bytes, socket.socket] = {}
    under_way: deque[tuple[float, bytes, socket.socket]] = deque()
    while True:
        timeout = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for origin in select.select(wires, [], [], timeout)[0]:
            packet = origin.recv(_LONGEST)
            target, source = packet[_HEADER : _HEADER + 6], packet[_HEADER + 6 : _HEADER + 12]
            seen[source] = origin
            if chance.random() >= loss:
                under_way += [
                    (time.monotonic() + delay, packet, exit_)
                    for exit_ in ([seen[target]] if target in seen else wires)
                    if exit_ is not origin
                ]
        while under_way and under_way[0][0] <= time.monotonic():
            _, packet, exit_ = under_way.popleft()
            exit_.send(packet)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    seconds, share, *interfaces = sys.argv[1:]
    forward(float(seconds), float(share), [wire(name) for name in interfaces], random.Random(0))
