"""What a party may be called.

A party's name becomes the name of files and folders, and part of a URI in its certificate. `check_party` is
the only rule for names: configurations, certificates, model folders and commands all use it.
"""

import re

from vafl.errors import ConfigError

SERVER = "server"
"""The party that serves and holds the labels; every other name is a client's."""

PARTY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
# These collide with the authority's files, or look like the server's name.
_RESERVED = {"ca", "ca.pem", "ca.key", SERVER}


def check_party(name: str) -> str:
    """Return `name` if a party may have it.

    Raises:
        ConfigError: The name is not a single safe path component, or it is reserved.
    """
    if not PARTY.fullmatch(name):
        raise ConfigError(
            "a party's name must be 1 to 63 letters, digits, '.', '_' or '-', a letter or digit first. "
            f"Found {name!r}. Choose another name."
        )
    if name.lower() in _RESERVED and name != SERVER:
        raise ConfigError(
            f"a party's name must not be one of {', '.join(sorted(_RESERVED))}, in any case, except the "
            f'server\'s own "{SERVER}". Found {name!r}. Choose another name.'
        )
    return name


def check_client(name: str) -> str:
    """Return `name` if a client may have it: any party's name but the server's.

    Raises:
        ConfigError: See `check_party`; or it is the server's name.
    """
    if check_party(name) == SERVER:
        raise ConfigError(
            f'"{SERVER}" is the name of the party that holds the labels. Found it as the name of a client. '
            "Choose another name."
        )
    return name
