"""An authority with its parties' files, and certificates that `issue` would never make."""

from functools import partial

import pytest
from cryptography import x509

from tests import forgery
from tests.forgery import SERVING
from vafl.transport.identity import Credentials, issue, make_authority


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """An authority that has issued for the server and two clients. Read only."""
    path = tmp_path_factory.mktemp("authority") / "certs"
    make_authority(path)
    for party in ("server", "client-1", "client-2"):
        issue(path, party)
    return path


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory):
    """Another authority, with parties of the same names. Read only."""
    path = tmp_path_factory.mktemp("other") / "certs"
    make_authority(path)
    for party in ("server", "client-1"):
        issue(path, party)
    return path


@pytest.fixture
def load(folder):
    return lambda party: Credentials.load(folder / party, party)


@pytest.fixture(scope="session")
def forge(folder):
    """Sign any certificate with the authority's real key, without checks."""
    return partial(forgery.forge, folder)


@pytest.fixture(scope="session")
def forge_server(forge):
    def make(*, name="vafl-server", usage=SERVING, **dates):
        names = [x509.UniformResourceIdentifier("vafl:party/server"), x509.DNSName(name)]
        return forge("server", names=names, usage=(usage,), **dates)

    return make
