"""Which addresses plaintext may be sent to."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vafl.errors import ConfigError
from vafl.runtime.identity import require_loopback

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
        with pytest.raises(ConfigError, match=r"must be on one machine.*Found.*vafl certs"):
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
    with pytest.raises(ConfigError, match="must be on one machine"):
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
