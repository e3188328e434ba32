"""Statements that the server relays between clients are signed, so that it cannot change them."""

import numpy as np
import pytest

from vafl.errors import Unauthenticated
from vafl.protocol.secure_sum.masks import KeyAgreement
from vafl.transport.identity import CertificateWitness, Credentials

SAID = b"my key is 7"


@pytest.fixture(scope="module")
def witnesses(folder):
    return {
        party: CertificateWitness(Credentials.load(folder / party, party))
        for party in ("client-1", "client-2")
    }


def test_a_signed_statement_is_believed(witnesses):
    witnesses["client-2"].check("client-1", SAID, witnesses["client-1"].vouch(SAID))
    witnesses["client-1"].check("client-1", SAID, witnesses["client-1"].vouch(SAID))


def test_another_statement_or_another_party_is_not(witnesses):
    proof = witnesses["client-1"].vouch(SAID)
    with pytest.raises(Unauthenticated, match=r"VFL-6202.*client\-1"):
        witnesses["client-2"].check("client-1", b"my key is 8", proof)
    with pytest.raises(Unauthenticated, match=r"VFL-6202.*client\-2"):
        witnesses["client-2"].check("client-2", SAID, proof)


def test_the_server_cannot_pose_as_a_client(folder, witnesses):
    server = CertificateWitness(Credentials.load(folder / "server", "server"))
    with pytest.raises(Unauthenticated, match="VFL-6202"):
        witnesses["client-2"].check("client-1", SAID, server.vouch(SAID))


def test_another_authority_is_worth_nothing(other_folder, witnesses):
    stranger = CertificateWitness(Credentials.load(other_folder / "client-1", "client-1"))
    with pytest.raises(Unauthenticated, match="VFL-6202"):
        witnesses["client-2"].check("client-1", SAID, stranger.vouch(SAID))


def test_a_certificate_must_be_in_date(forge, witnesses):
    old = CertificateWitness(forge(begin=-4.0, end=-2.0))
    with pytest.raises(Unauthenticated, match="VFL-6202"):
        witnesses["client-2"].check("client-1", SAID, old.vouch(SAID))


@pytest.mark.parametrize("proof", [b"", b"\x01", b"\xff\xff", b"\x02\x00abjunk", bytes(400)])
def test_junk_is_refused(witnesses, proof):
    with pytest.raises(Unauthenticated):
        witnesses["client-2"].check("client-1", SAID, proof)


def test_a_server_that_replaces_a_key_is_found_out(folder, witnesses):
    """A man in the middle: the server offers its own key in the name of client-1."""
    names = ["client-1", "client-2", "client-1"]  # two parties play three: certificates are what matters
    honest = [KeyAgreement("run", names, index, witnesses[name]) for index, name in enumerate(names)]
    offers = [party.offer(0) for party in honest]
    forged = KeyAgreement("run", names, 0, witnesses["client-2"]).offer(0)
    with pytest.raises(Unauthenticated, match=r"VFL-6202.*client\-1"):
        honest[1].agree(0, [forged, *offers[1:]])
    offers[1] = honest[1].offer(0)
    swapped = forged[:32] + offers[0][32:]  # its key under the true one's signature
    with pytest.raises(Unauthenticated, match=r"VFL-6202.*client\-1"):
        honest[1].agree(0, [swapped, *offers[1:]])
    offers[1] = honest[1].offer(0)
    rows, ones = np.arange(1), np.ones((1, 1), np.float32)
    assert honest[1].agree(0, offers).hide("batch", 0, rows, ones).shape == (1, 1)


def test_a_key_of_another_epoch_or_run_is_refused(witnesses):
    names = ["client-1", "client-2"]
    one = KeyAgreement("run", names, 0, witnesses["client-1"])
    two = KeyAgreement("run", names, 1, witnesses["client-2"])
    for old in (one.offer(3), KeyAgreement("other", names, 0, witnesses["client-1"]).offer(4)):
        with pytest.raises(Unauthenticated, match=r"VFL-6202.*client\-1"):
            two.agree(4, [old, two.offer(4)])
