"""A party's certificate: read from its folder, or made for processes on one machine."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vafl.config import Config
from vafl.errors import ConfigError
from vafl.transport.identity import SERVER, Credentials, Https, is_loopback, issue, make_authority

log = logging.getLogger("vafl.server")


def load_credentials(config: Config, party: str) -> Credentials | None:
    """Return this party's certificate and key; None where the run is plaintext on loopback."""
    if config.network.security == "plaintext":
        return None
    return Credentials.load(_folder(config, party), party)


def load_https(config: Config, party: str) -> Https:
    """Return what the party serves HTTPS with: the certificate that it has for the federation."""
    folder = _folder(config, party)
    Credentials.load(folder, party)  # checks that the files belong together
    return Https.load(folder / f"{party}.pem", folder / f"{party}.key")


def _folder(config: Config, party: str) -> Path:
    """Return the folder with this party's files: its own in the authority's, or the one it was given."""
    if not config.network.certificates:
        raise ConfigError(
            "VFL-7061",
            "TLS needs network.certificates, the folder that `vafl certs` made. Found none. "
            "Make one: `vafl certs DIR --party server --party client-1 ...`.",
        )
    folder = Path(config.network.certificates)
    own = folder / party
    try:
        return own if own.is_dir() else folder
    except OSError:  # this user may not look into the folder: reading the files reports that as a ConfigError
        return own


def check_certificates(config: Config, clients: Sequence[str]) -> None:
    """Check the certificates of every party, for a federation on one machine.

    Raises:
        ConfigError: a party's files are missing or cannot be used.
    """
    if config.network.security != "plaintext" and not _lacks_certificates(config):
        for party in (SERVER, *clients):
            load_credentials(config, party)


def _lacks_certificates(config: Config) -> bool:
    """Whether there are none yet; those of a federation of many machines must be there."""
    folder = config.network.certificates
    try:
        return not folder or (is_loopback(config.network.address) and not Path(folder).exists())
    except OSError:  # it is there, and this user may not look into it: reading the files reports that
        return False


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
