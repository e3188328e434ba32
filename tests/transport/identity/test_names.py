"""Names of parties as gRPC reports them from certificates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vafl.errors import RemoteFault, Unauthenticated
from vafl.transport.identity import party_of


def shown(*uris, security=b"ssl"):
    return {"transport_security_type": [security], "peer_uri": list(uris)}


def test_the_name_in_the_certificate():
    assert party_of(shown(b"vafl:party/client-1")) == "client-1"


@pytest.mark.parametrize(
    "context", [{}, {"transport_security_type": []}, shown(b"vafl:party/a", security=b"insecure")]
)
def test_no_tls_no_name(context):
    with pytest.raises(Unauthenticated, match="VFL-6221"):
        party_of(context)


@pytest.mark.parametrize(
    "uris",
    [
        *([], [b"vafl:party/"], [b"client-1"], [b"vafl:party/a", b"vafl:party/a"]),
        *([b"vafl:party/a", b"https://b"], [b"vafl:party/a/b"], [b"vafl:party/a\n"]),
        *([b"VAFL:party/a"], [b"vafl:party/\xff"]),
    ],
)
def test_not_exactly_one_name(uris):
    with pytest.raises(Unauthenticated, match="VFL-6222"):
        party_of(shown(*uris))


def test_names_among_hosts_do_not_count():
    context = {"transport_security_type": [b"ssl"], "x509_subject_alternative_name": [b"vafl:party/a"]}
    with pytest.raises(Unauthenticated, match=r"VFL-6222.*no URI"):
        party_of(context)


def test_an_unknown_peer_is_the_peers_fault():
    assert issubclass(Unauthenticated, RemoteFault)


@given(
    st.lists(
        st.binary(max_size=80).map(lambda tail: b"vafl:party/" + tail) | st.binary(max_size=80), max_size=3
    )
)
def test_whatever_a_certificate_says_the_result_is_a_good_name_or_a_refusal(uris):
    try:
        name = party_of(shown(*uris))
    except Unauthenticated:
        return
    assert uris == [b"vafl:party/" + name.encode()]
    assert name.isascii()
    assert "/" not in name
