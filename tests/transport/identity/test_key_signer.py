"""Statements that the server relays between clients are signed, so that it cannot change them."""

import numpy as np
import pytest

from vafl.errors import Unauthenticated
from vafl.protocol.secure_sum.masks import KeyAgreement
from vafl.transport.identity import CertificateSigner, Credentials

SAID = b"my key is 7"


@pytest.fixture(scope="module")
def signers(folder):
    return {
        party: CertificateSigner(Credentials.load(folder / party, party))
        for party in ("client-1", "client-2")
    }


def test_a_signed_statement_is_believed(signers):
    signers["client-2"].check("client-1", SAID, signers["client-1"].sign(SAID))
    signers["client-1"].check("client-1", SAID, signers["client-1"].sign(SAID))


def test_another_statement_or_another_party_is_not(signers):
    proof = signers["client-1"].sign(SAID)
    with pytest.raises(Unauthenticated, match=r"VFL-6202.*client\-1"):
        signers["client-2"].check("client-1", b"my key is 8", proof)
    with pytest.raises(Unauthenticated, match=r"VFL-6202.*client\-2"):
        signers["client-2"].check("client-2", SAID, proof)


def test_the_server_cannot_pose_as_a_client(folder, signers):
    server = CertificateSigner(Credentials.load(folder / "server", "server"))
    with pytest.raises(Unauthenticated, match="VFL-6202"):
        signers["client-2"].check("client-1", SAID, server.sign(SAID))


def test_another_authority_is_worth_nothing(other_folder, signers):
    stranger = CertificateSigner(Credentials.load(other_folder / "client-1", "client-1"))
    with pytest.raises(Unauthenticated, match="VFL-6202"):
        signers["client-2"].check("client-1", SAID, stranger.sign(SAID))


def test_a_certificate_must_be_in_date(forge, signers):
    old = CertificateSigner(forge(begin=-4.0, end=-2.0))
    with pytest.raises(Unauthenticated, match="VFL-6202"):
        signers["client-2"].check("client-1", SAID, old.sign(SAID))


@pytest.mark.parametrize("proof", [b"", b"\x01", b"\xff\xff", b"\x02\x00abjunk", bytes(400)])
def test_junk_is_refused(signers, proof):
    with pytest.raises(Unauthenticated):
        signers["client-2"].check("client-1", SAID, proof)


def test_a_server_that_replaces_a_key_is_found_out(folder, signers):
    """A man in the middle: the server offers its own key in the name of client-1."""
    names = ["client-1", "client-2", "client-1"]  # two parties play three: certificates are what matters
    honest = [KeyAgreement("run", names, index, signers[name]) for index, name in enumerate(names)]
    offers = [party.offer(0) for party in honest]
    forged = KeyAgreement("run", names, 0, signers["client-2"]).offer(0)
    with pytest.raises(Unauthenticated, match=r"VFL-6202.*client\-1"):
        honest[1].agree(0, [forged, *offers[1:]])
    offers[1] = honest[1].offer(0)
    swapped = forged[:32] + offers[0][32:]  # its key under the true one's signature
    with pytest.raises(Unauthenticated, match=r"VFL-6202.*client\-1"):
        honest[1].agree(0, [swapped, *offers[1:]])
    offers[1] = honest[1].offer(0)
    rows, ones = np.arange(1), np.ones((1, 1), np.float32)
    assert honest[1].agree(0, offers).hide("batch", 0, rows, ones).shape == (1, 1)


def test_a_key_of_another_epoch_or_run_is_refused(signers):
    names = ["client-1", "client-2"]
    one = KeyAgreement("run", names, 0, signers["client-1"])
    two = KeyAgreement("run", names, 1, signers["client-2"])
    for old in (one.offer(3), KeyAgreement("other", names, 0, signers["client-1"]).offer(4)):
        with pytest.raises(Unauthenticated, match=r"VFL-6202.*client\-1"):
            two.agree(4, [old, two.offer(4)])
