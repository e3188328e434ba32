"""Read a party's certificate from its folder, or create certificates for processes on one machine."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vafl.config import Config
from vafl.errors import ConfigError
from vafl.transport.identity import SERVER, Credentials, Https, is_loopback, issue, make_authority

log = logging.getLogger("vafl.server")


def load_credentials(config: Config, party: str) -> Credentials | None:
    """Return this party's certificate and key; None if network.security is "plaintext"."""
    if config.network.security == "plaintext":
        return None
    return Credentials.load(_folder(config, party), party)


def load_https(config: Config, party: str) -> Https:
    """Return the party's federation certificate and key for use with HTTPS."""
    folder = _folder(config, party)
    Credentials.load(folder, party)  # check that the files belong together
    return Https.load(folder / f"{party}.pem", folder / f"{party}.key")


def _folder(config: Config, party: str) -> Path:
    """Return the folder with this party's files: its subfolder of network.certificates, or that folder."""
    if not config.network.certificates:
        raise ConfigError(
            "VFL-7061",
            "TLS needs network.certificates, the folder that `vafl certs` made. Found none. "
            "Make one: `vafl certs DIR --party server --party client-1 ...`.",
        )
    folder = Path(config.network.certificates)
    subfolder = folder / party
    try:
        return subfolder if subfolder.is_dir() else folder
    except OSError:  # no permission to list the folder: reading its files raises a ConfigError that says so
        return subfolder


def check_certificates(config: Config, clients: Sequence[str]) -> None:
    """Check the certificates of every party, for a federation on one machine.

    Raises:
        ConfigError: a party's files are missing or cannot be used.
    """
    if config.network.security != "plaintext" and not _lacks_certificates(config):
        for party in (SERVER, *clients):
            load_credentials(config, party)


def _lacks_certificates(config: Config) -> bool:
    """Return whether certificates must be created.

    They are created only for loopback addresses. A federation of several machines must bring its own.
    """
    folder = config.network.certificates
    try:
        return not folder or (is_loopback(config.network.address) and not Path(folder).exists())
    except OSError:
        # The folder exists, and this user may not look into it. Reading its files raises a clear ConfigError.
        return False


def certified(config: Config, names: list[str], path: Path) -> Config:
    """Return the configuration with certificates; create them in path/certs if needed and missing."""
    if config.network.security == "plaintext" or not _lacks_certificates(config):
        return config
    if config.network.certificates:
        log.info(
            "%s does not exist; creating certificates for this machine only", config.network.certificates
        )
    folder = path / "certs"
    make_authority(folder)
    for name in (SERVER, *names):
        issue(folder, name)
    return replace(config, network=replace(config.network, certificates=str(folder.resolve())))
