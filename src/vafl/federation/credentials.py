"""The certificate that proves who a party is: where it lies, or made anew for processes on one machine."""

from dataclasses import replace
from pathlib import Path

from vafl.config import Config
from vafl.errors import ConfigError
from vafl.runtime.identity import SERVER, Credentials, issue, make_authority


def load_credentials(config: Config, party: str) -> Credentials | None:
    """This party's certificate; None where the run is plaintext on loopback."""
    if config.network.security == "plaintext":
        return None
    if not config.network.certificates:
        raise ConfigError(
            "mutual TLS needs network.certificates, the folder that `vafl certs` made. Found none. "
            "Make one: `vafl certs DIR --party server --party client-1 ...`."
        )
    folder = Path(config.network.certificates)
    own = folder / party
    return Credentials.load(own if own.is_dir() else folder, party)


def certified(config: Config, names: list[str], path: Path) -> Config:
    """The configuration with certificates, made in path/certs if it has none and needs them."""
    if config.network.security == "plaintext" or config.network.certificates:
        return config
    folder = path / "certs"
    make_authority(folder)
    for name in (SERVER, *names):
        issue(folder, name)
    return replace(config, network=replace(config.network, certificates=str(folder.resolve())))
