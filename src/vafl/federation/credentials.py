"""The certificate that proves who a party is: where it lies, or made anew for processes on one machine."""

import logging
from dataclasses import replace
from pathlib import Path

from vafl.config import Config
from vafl.errors import ConfigError
from vafl.runtime.identity import SERVER, Credentials, is_loopback, issue, make_authority

log = logging.getLogger("vafl.server")


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


def check_certificates(config: Config) -> None:
    """Raises ConfigError where processes on one machine could not use the certificates configured."""
    if config.network.security != "plaintext" and not _lacks_certificates(config):
        load_credentials(config, SERVER)


def _lacks_certificates(config: Config) -> bool:
    """Whether there are none yet; those of a federation of many machines must be there."""
    folder = config.network.certificates
    return not folder or (is_loopback(config.network.address) and not Path(folder).exists())


def certified(config: Config, names: list[str], path: Path) -> Config:
    """The configuration with certificates, made in path/certs if it has none and needs them."""
    if config.network.security == "plaintext" or not _lacks_certificates(config):
        return config
    if config.network.certificates:
        log.info("%s is not there: certificates for this machine alone are made", config.network.certificates)
    folder = path / "certs"
    make_authority(folder)
    for name in (SERVER, *names):
        issue(folder, name)
    return replace(config, network=replace(config.network, certificates=str(folder.resolve())))
