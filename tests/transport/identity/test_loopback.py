"""Which addresses plaintext may be sent to."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vafl.errors import ConfigError
from vafl.transport.identity import HttpAddress, require_loopback

STAYS = ["127.0.0.1", "127.5.5.5", "127.255.255.255", "localhost", "LocalHost"]
LEAVES = [
    *("0.0.0.0", "10.0.0.1", "192.168.1.1", "126.255.255.255", "128.0.0.1", "169.254.0.1", "8.8.8.8"),
    *(
        "example.org",
        "localhost.evil.org",
        "127.0.0.1.evil.org",
        "evil.org.localhost",
        "localhost.",
        "xlocalhost",
    ),
    *(
        "127.1",
        "127",
        "0177.0.0.1",
        "0x7f.0.0.1",
        "2130706433",
        "127.0.0.1 ",
        " 127.0.0.1",
        "127.0.0.1\n",
        "*",
        "",
    ),
]


@pytest.mark.parametrize("host", STAYS)
def test_hosts_of_this_machine(host):
    for address in (host, f"{host}:0", f"{host}:50051", f"[{host}]:50051"):
        require_loopback(address)


@pytest.mark.parametrize("address", ["::1", "[::1]", "[::1]:50051", "[0:0:0:0:0:0:0:1]:1"])
def test_ipv6_of_this_machine(address):
    require_loopback(address)


@pytest.mark.parametrize("address", ["unix:/run/vafl", "unix:///run/vafl", "unix:relative"])
def test_sockets_of_this_machine(address):
    require_loopback(address)


@pytest.mark.parametrize("host", LEAVES)
def test_hosts_elsewhere(host):
    for address in (host, f"{host}:50051", f"[{host}]:50051"):
        with pytest.raises(ConfigError, match="VFL-6211"):
            require_loopback(address)


@pytest.mark.parametrize(
    "address",
    [
        *("::", "[::]:50051", "::2", "[::1", "::1]", "[::1]50051", "[[::1]]:1", "::1%eth0", "[::1%1]:5"),
        *("::ffff:10.0.0.1", "[fe80::1]:1", "localhost:evil.org", "localhost:", "localhost:1@evil.org"),
        *("localhost:1/x", "localhost:-1", "localhost:\u0661", "http://localhost", "user@localhost:1"),
        *("dns:///localhost:1", "dns:localhost", "ipv4:127.0.0.1:1,10.0.0.1:2", "127.0.0.1:1,10.0.0.1:2"),
        *("UNIX:/x", "xunix:/x", "vsock:1:2", "unix-abstract:x"),
    ],
)
def test_other_ways_to_write_an_address_are_not_trusted(address):
    with pytest.raises(ConfigError, match="VFL-6211"):
        require_loopback(address)


@given(st.ip_addresses(), st.integers(0, 65535))
def test_every_address_is_judged_by_its_network(address, port):
    allowed = address in ipaddress.ip_network("127.0.0.0/8" if address.version == 4 else "::1/128")
    for written in (str(address), f"[{address}]:{port}"):
        try:
            require_loopback(written)
        except ConfigError:
            assert not allowed
        else:
            assert allowed


@pytest.mark.parametrize("option", ["127.0.0.1:8080", "[::1]:0", "0.0.0.0:65535", "scores.example:1"])
def test_an_http_address_is_read_and_written_alike(option):
    address = HttpAddress.of(option)
    assert str(address) == option
    assert address.url(9, "https") == f"https://{option.rpartition(':')[0]}:9"
    assert address.is_loopback == (option[:2] in ("12", "[:"))


@pytest.mark.parametrize("option", ["8080", ":8080", "host:", "host:65536", "host:x", "host:-1", ""])
def test_an_http_address_has_a_host_and_a_port(option):
    with pytest.raises(ConfigError, match="VFL-6212"):
        HttpAddress.of(option)


def test_a_host_header_must_name_the_server():
    here, there = HttpAddress("127.0.0.1", 8080), HttpAddress("Scores.example", 8443)
    for header in ("127.0.0.1", "localhost:1", "[::1]:8080"):
        assert here.answers_to(header)
        assert there.answers_to(header), "from a tunnel, or a proxy on this machine"
    for header in ("scores.EXAMPLE:8443", "192.0.2.7", "[2001:db8::1]:8443"):
        assert there.answers_to(header)
        assert not here.answers_to(header), "nothing but loopback leads here"
    for header in (
        "",
        "else.example",
        "scores.example.else.example",
        "127.0.0.1.else.example",
        "1.2.3",
        "[x",
    ):
        assert not here.answers_to(header)
        assert not there.answers_to(header)
    assert here.answers_to("Vafl-Server:8080", lambda host: host == "vafl-server")
