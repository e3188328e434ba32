"""Rules for the names of parties.

A party's name becomes the name of files and folders, and part of a URI in its certificate. `check_party` is
the only rule for names: configurations, certificates, model folders and commands all use it.
"""

import re

from vafl.errors import ConfigError

SERVER = "server"
"""The party that serves and holds the labels; every other name is a client's."""

LOCAL_CLIENT = "label-holder"
"""The client of the label holder's own features, inside the server's process. It has no certificate."""

PARTY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
# These collide with the authority's files, or look like a name of the label holder.
_RESERVED = {"ca", "ca.pem", "ca.key", SERVER, LOCAL_CLIENT}


def check_party(name: str) -> str:
    """Return `name` if a party may have it.

    Raises:
        ConfigError: The name is not a single safe path component, or it is reserved.
    """
    if not PARTY.fullmatch(name):
        raise ConfigError(
            "VFL-1051",
            "a party's name must be 1 to 63 letters, digits, '.', '_' or '-', a letter or digit first. "
            f"Found {name!r}. Choose another name.",
        )
    if name.lower() in _RESERVED and name not in (SERVER, LOCAL_CLIENT):
        raise ConfigError(
            "VFL-1052",
            f"a party's name must not be one of {', '.join(sorted(_RESERVED))}, in any case, except the "
            f"label holder's own names. Found {name!r}. Choose another name.",
        )
    return name


def check_client(name: str) -> str:
    """Return `name` if a client that connects over the network may have it.

    Raises:
        ConfigError: See `check_party`; or the name is the label holder's.
    """
    if check_party(name) in (SERVER, LOCAL_CLIENT):
        raise ConfigError(
            "VFL-1053",
            f'only the label holder may be called "{SERVER}" or "{LOCAL_CLIENT}". Its own features take part '
            f'inside `vafl server`. Found "{name}" as the name of another client. Choose another name.',
        )
    return name


def table_owner(party: str) -> str:
    """Return the party whose section [parties.NAME] describes the data of `party`.

    The label holder's labels and features are columns of one table.
    """
    return SERVER if party == LOCAL_CLIENT else party
