"""Where traffic may go unencrypted: to this machine and no further."""

import ipaddress
import logging
import re
from typing import NamedTuple

from vafl.errors import ConfigError

log = logging.getLogger("vafl.http")

LOOPBACK_OPTIONS = (("grpc.enable_http_proxy", 0),)
"""For every plaintext channel: gRPC would send even 127.0.0.1 through a proxy named in http_proxy."""

_NETWORKS = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))
_LARGEST_PORT = 65_535
_BRACKETED = re.compile(r"\[(?P<host>[^\[\]]*)\](:(?P<port>.*))?", re.DOTALL)


def require_loopback(address: str) -> None:
    """Raises ConfigError unless plaintext sent to `address` stays on this machine.

    Args:
        address: HOST, HOST:PORT, [IPV6]:PORT or unix:PATH. No name but localhost is looked up or believed.
    """
    if address.startswith("unix:") or is_loopback(address):
        return
    raise ConfigError(
        "without certificates the parties must be on one machine: a loopback address (127.0.0.0/8, ::1, "
        f"localhost) or unix:PATH, for anyone on the way could read and change the traffic. "
        f"Found {address!r}. Use certificates (`vafl certs`) or a loopback address."
    )


def is_loopback(address: str) -> bool:
    """Whether what is sent to HOST, HOST:PORT or [IPV6]:PORT stays on this machine."""
    return _is_loopback(*_split(address))


class HttpAddress(NamedTuple):
    """Where HTTP is served: without identities, and unencrypted."""

    host: str
    port: int

    @classmethod
    def of(cls, option: str, allowed: str) -> "HttpAddress":
        """What --http says.

        Args:
            allowed: what whoever can reach it may do; said loudly if that is not this machine alone.
        """
        host, _, port = option.rpartition(":")
        if not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > _LARGEST_PORT:
            raise ConfigError(f'--http must be host:port. Found "{option}".')
        if not is_loopback(option):
            log.warning(
                "EVERYONE who can reach %s may %s, unencrypted: HTTP here has no identities. "
                "Put a proxy with TLS and authentication before it, or bind to 127.0.0.1.",
                option,
                allowed,
            )
        return cls(host.strip("[]"), int(port))

    def url(self, bound: int) -> str:
        """What to type into a browser; `bound` is the port, were it any."""
        return f"http://[{self.host}]:{bound}" if ":" in self.host else f"http://{self.host}:{bound}"


def _split(address: str) -> tuple[str, str]:
    """Host and port; the port is "0" where there is none."""
    bracketed = _BRACKETED.fullmatch(address)
    if bracketed:
        return bracketed["host"], "0" if bracketed["port"] is None else bracketed["port"]
    if address.count(":") > 1:  # an IPv6 address as it stands
        return address, "0"
    host, colon, port = address.partition(":")
    return host, port if colon else "0"


def _is_loopback(host: str, port: str) -> bool:
    # gRPC reads "localhost:text" as a URI of the scheme "localhost": a port must be digits.
    # An IPv6 address with a zone ("::1%eth0") is somebody's, if not this machine's.
    if not re.fullmatch("[0-9]{1,5}", port) or "%" in host:
        return False
    if host.lower() == "localhost":
        return True
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return False
    return any(found in network for network in _NETWORKS)
