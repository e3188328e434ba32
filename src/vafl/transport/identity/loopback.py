"""Recognise loopback addresses. Unencrypted traffic must not leave this machine."""

import ipaddress
import re
from collections.abc import Callable
from typing import NamedTuple

from vafl.errors import ConfigError

LOOPBACK_OPTIONS = (("grpc.enable_http_proxy", 0),)
"""Options of every plaintext channel. Otherwise gRPC sends even 127.0.0.1 through the proxy in http_proxy."""

_NETWORKS = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))
_LARGEST_PORT = 65_535
_BRACKETED = re.compile(r"\[(?P<host>[^\[\]]*)\](:(?P<port>.*))?", re.DOTALL)


def require_loopback(address: str) -> None:
    """Raise ConfigError unless plaintext sent to `address` stays on this machine.

    Args:
        address: HOST, HOST:PORT, [IPV6]:PORT or unix:PATH. The only accepted name is localhost; no name is
            looked up.
    """
    if address.startswith("unix:") or is_loopback(address):
        return
    raise ConfigError(
        "VFL-6211",
        "without certificates, the address must be loopback (127.0.0.0/8, ::1, localhost) or unix:PATH, "
        "because others could read and change traffic that leaves this machine. "
        f"Found {address!r}. Use certificates (`vafl certs`) or a loopback address.",
    )


def is_loopback(address: str) -> bool:
    """Return whether traffic to HOST, HOST:PORT or [IPV6]:PORT stays on this machine."""
    return _is_loopback(*_split(address))


class HttpAddress(NamedTuple):
    """The host and port of an HTTP server."""

    host: str
    port: int

    @classmethod
    def of(cls, option: str) -> "HttpAddress":
        """Parse the option --http, HOST:PORT."""
        host, _, port = option.rpartition(":")
        if not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > _LARGEST_PORT:
            raise ConfigError(
                "VFL-6212", f'--http must be host:port, such as 127.0.0.1:8080. Found "{option}".'
            )
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can reach the address."""
        return is_loopback(self.host)

    def url(self, bound: int, scheme: str = "http") -> str:
        """Return the server's URL. `bound` is the actual port, which the system chooses for port 0."""
        return f"{scheme}://{HttpAddress(self.host, bound)}"

    def answers_to(self, header: str, covers: Callable[[str], bool] = lambda host: False) -> bool:
        """Return whether a Host header names this server.

        A malicious site can make its own name resolve to this address (DNS rebinding). A browser then lets
        that site's pages read our responses. Such requests have the site's name as Host. A Host that is an IP
        address is safe, because addresses cannot be rebound.

        Args:
            covers: Whether the server's certificate names a host.
        """
        if is_loopback(header):
            return True
        host, _ = _split(header.lower())
        if covers(host):
            return True
        return not self.is_loopback and (host == self.host.lower() or _is_address(host))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _split(address: str) -> tuple[str, str]:
    """Return host and port; the port is "0" if there is none."""
    bracketed = _BRACKETED.fullmatch(address)
    if bracketed:
        return bracketed["host"], "0" if bracketed["port"] is None else bracketed["port"]
    if address.count(":") > 1:  # an IPv6 address without brackets and port
        return address, "0"
    host, colon, port = address.partition(":")
    return host, port if colon else "0"


def _is_loopback(host: str, port: str) -> bool:
    # gRPC reads "localhost:text" as a URI with the scheme "localhost", so a port must be digits.
    # An IPv6 address with a zone ("::1%eth0") may belong to another machine.
    if not re.fullmatch("[0-9]{1,5}", port) or "%" in host:
        return False
    if host.lower() == "localhost":
        return True
    try:
        ip_address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return any(ip_address in network for network in _NETWORKS)
