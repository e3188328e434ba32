"""Checks on callers of `vafl serve`: the Host and Origin headers, and API keys."""

from collections.abc import Mapping
from dataclasses import dataclass

from vafl.errors import ConfigError
from vafl.run.refusal import Refusal
from vafl.transport.identity import Callers, HttpAddress, Https

_KEYS = "API keys (make one: vafl keys add keys.toml NAME; then add --keys keys.toml)"
_TLS = "TLS (add --tls for the server's own certificate, or --tls-certificate FILE --tls-key FILE)"


@dataclass(frozen=True)
class Access:
    """The address of a served model, and the callers that the server accepts.

    Attributes:
        address: The address to listen on.
        callers: The accepted keys; None accepts every caller that can connect.
        tls: The certificate; None serves plain HTTP.

    Raises:
        ConfigError: Other machines could connect, and keys or TLS are missing.
    """

    address: HttpAddress
    callers: Callers | None = None
    tls: Https | None = None

    def __post_init__(self) -> None:
        if self.address.is_loopback:
            return
        missing = [text for text, found in ((_KEYS, self.callers), (_TLS, self.tls)) if found is None]
        if missing:
            raise ConfigError(
                "VFL-7021",
                f"--http {self.address} can be reached by other machines, so it needs API keys and TLS. "
                f"Missing: {'; '.join(missing)}. Or bind to this machine alone: --http "
                f"127.0.0.1:{self.address.port}.",
            )

    @property
    def scheme(self) -> str:
        """The scheme of this server's URLs."""
        return "https" if self.tls else "http"

    def admit(self, headers: Mapping[str, str]) -> str:
        """Check a request's headers and return the name of the caller's key, or "" if there are no keys.

        Raises:
            Refusal: The request is for another host or from another site, or has no valid key.
        """
        host = headers.get("Host", "")
        if not self.address.answers_to(host, self.tls.covers if self.tls else lambda host: False):
            raise Refusal(
                421,
                "wrong_host",
                "the Host header must name this server: use the address or name that it was started with",
                hangs_up=True,
            )
        origin = headers.get("Origin")
        if origin is not None and origin.lower() != f"{self.scheme}://{host}".lower():
            raise Refusal(403, "cross_origin", "the Origin header must be this server's", hangs_up=True)
        if self.callers is None:
            return ""
        scheme, _, key = headers.get("Authorization", "").partition(" ")
        caller = self.callers.name_of(key) if scheme.lower() == "bearer" else None
        if caller is None:
            raise Refusal(
                401,
                "unauthorized",
                "a request needs the header Authorization: Bearer KEY, with an API key of this server",
                hangs_up=True,
                headers={"WWW-Authenticate": "Bearer"},
            )
        return caller
