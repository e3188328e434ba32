"""Identities over real connections: grpc.aio servers and channels on loopback, with an echo method."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from vafl.errors import Unauthenticated
from vafl.transport.identity import (
    LOOPBACK_OPTIONS,
    SERVER_NAME,
    Credentials,
    issue,
    make_authority,
    party_of,
    refusal,
)

DEADLINE = 20
"""Seconds. A refusal must arrive as UNAVAILABLE long before this deadline."""


class Echo:
    """Echo messages and record their senders."""

    def __init__(self):
        self.seen = []

    async def answer(self, request, context):
        try:
            self.seen.append(party_of(context.auth_context()))
        except Unauthenticated as error:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        return request


@asynccontextmanager
async def serving(credentials):
    """Serve on a free port, in plaintext without credentials; yield the echo and the address."""
    echo, server = Echo(), grpc.aio.server()
    methods = {"Echo": grpc.unary_unary_rpc_method_handler(echo.answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", methods),))
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield echo, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def send(address, message, credentials, options=()):
    if credentials is None:
        channel = grpc.aio.insecure_channel(address, options=options)
    else:
        channel = grpc.aio.secure_channel(address, credentials, options=options)
    async with channel:
        return await channel.unary_unary("/test.Test/Echo")(message, timeout=DEADLINE)


def listening(credentials):
    """Return server credentials for any party, as an attacker would use them."""
    pairs = [(credentials.key, credentials.certificate)]
    return grpc.ssl_server_credentials(pairs, credentials.authority, require_client_auth=True)


def dialling(credentials, authority):
    """Return channel credentials for any party, which trust a server of another authority."""
    return grpc.ssl_channel_credentials(authority, credentials.key, credentials.certificate)


def refused(server, client, options):
    """Connect, expect a refusal, and return the details that the client receives."""

    async def attempt():
        async with serving(server) as (echo, address):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await send(address, b"hello", client, options)
            assert echo.seen == []
            return caught.value

    error = asyncio.run(attempt())
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    return error.details()


def test_the_server_sees_each_party_by_its_certificate_whatever_it_says(load):
    async def talk():
        async with serving(load("server").server_credentials()) as (echo, address):
            for party in ("client-1", "client-2"):
                mine = load(party)
                answer = await send(
                    address, b"I am client-2", mine.channel_credentials(), mine.channel_options()
                )
                assert answer == b"I am client-2"
            return echo.seen

    assert asyncio.run(talk()) == ["client-1", "client-2"]


def test_another_host_name_in_the_certificate_does_not_disturb(tmp_path):
    make_authority(tmp_path / "certs")
    hosts = ("10.1.2.3", "fd00::7", "Fed.Example.org", SERVER_NAME)
    server = Credentials.load(issue(tmp_path / "certs", "server", hosts=hosts), "server")
    client = Credentials.load(issue(tmp_path / "certs", "client-1"), "client-1")

    async def talk(name):
        async with serving(server.server_credentials()) as (_, address):
            options = (("grpc.ssl_target_name_override", name),)
            return await send(address, b"hello", client.channel_credentials(), options)

    assert client.channel_options() == (("grpc.ssl_target_name_override", SERVER_NAME),)
    for name in (SERVER_NAME, "10.1.2.3", "fd00::7", "fed.example.org"):
        assert asyncio.run(talk(name)) == b"hello"


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("none", "PEER_DID_NOT_RETURN_A_CERTIFICATE"),
        ("plaintext", "WRONG_VERSION_NUMBER"),
        ("another authority's", "unable to get local issuer certificate"),
        ("expired", "certificate has expired"),
        ("not yet valid", "certificate is not yet valid"),
        ("the server's", "unsupported certificate purpose"),
    ],
)
def test_a_client_with_the_wrong_certificate_is_refused(case, reason, load, forge, other_folder, capfd):
    mine, authority = load("client-1"), load("client-1").authority
    shown = {
        "none": lambda: grpc.ssl_channel_credentials(authority),
        "plaintext": lambda: None,
        "another authority's": lambda: dialling(
            Credentials.load(other_folder / "client-1", "client-1"), authority
        ),
        "expired": lambda: dialling(forge(begin=-2, end=-1), authority),
        "not yet valid": lambda: dialling(forge(begin=1, end=2), authority),
        "the server's": lambda: dialling(load("server"), authority),
    }[case]()
    details = refused(
        load("server").server_credentials(), shown, mine.channel_options() if shown else LOOPBACK_OPTIONS
    )
    assert "accept this party's certificate" in str(refusal(details))
    assert reason in capfd.readouterr().err  # the server's side


@pytest.mark.parametrize(
    ("case", "meaning"),
    [
        ("another authority's", "signed by the authority in this party's ca.pem"),
        ("expired", "Found an expired one"),
        ("not yet valid", "Found one that is not valid yet"),
        ("another name", 'the name "vafl-server"'),
        ("a client's", "a client poses as the server"),
        ("a client's with the server's name", "a client poses as the server"),
        ("none", "must use TLS"),
    ],
)
def test_a_server_with_the_wrong_certificate_is_refused(case, meaning, load, forge_server, other_folder):
    client = load("client-1")
    shown = {
        "another authority's": lambda: replace(
            Credentials.load(other_folder / "server", "server"), authority=client.authority
        ),
        "expired": lambda: forge_server(begin=-2, end=-1),
        "not yet valid": lambda: forge_server(begin=1, end=2),
        "another name": lambda: forge_server(name="localhost"),
        "a client's": lambda: load("client-2"),
        "a client's with the server's name": lambda: forge_server(usage=ExtendedKeyUsageOID.CLIENT_AUTH),
        "none": lambda: None,
    }[case]()
    server = shown and listening(shown)
    details = refused(server, client.channel_credentials(), client.channel_options())
    error = refusal(details)
    assert isinstance(error, Unauthenticated)
    assert meaning in str(error)


def test_a_certificate_of_the_authority_that_names_no_party_is_not_believed(load, forge):
    names = {
        "host": [x509.DNSName("vafl:party/client-1")],
        "none": [],
        "two": [x509.UniformResourceIdentifier(f"vafl:party/client-{number}") for number in (1, 2)],
        "other": [x509.UniformResourceIdentifier("https://example.org/vafl:party/client-1")],
        "bad": [x509.UniformResourceIdentifier("vafl:party/../client-1")],
    }

    async def attempt(nameless):
        async with serving(load("server").server_credentials()) as (echo, address):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await send(address, b"hello", nameless.channel_credentials(), nameless.channel_options())
            assert echo.seen == []
            return caught.value

    for entries in names.values():
        error = asyncio.run(attempt(forge(names=entries)))
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "must name one party" in error.details()


def test_nobody_has_a_name_without_tls():
    async def attempt():
        async with serving(None) as (_, address):
            await send(address, b"hello", None, LOOPBACK_OPTIONS)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        asyncio.run(attempt())
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "must show its certificate" in caught.value.details()
    assert "insecure" in caught.value.details()


def test_a_plaintext_channel_with_the_loopback_options_stays_clear_of_proxies(monkeypatch):
    """The first attempt proves the danger: gRPC uses the proxy even for 127.0.0.1."""
    for name in ("grpc_proxy", "https_proxy", "no_proxy", "no_grpc_proxy", "HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    asked = []

    async def proxy(reader, writer):
        asked.append(await reader.readline())
        writer.close()

    async def attempt():
        async with (
            await asyncio.start_server(proxy, "127.0.0.1", 0) as listener,
            serving(None) as (_, address),
        ):
            monkeypatch.setenv("http_proxy", "http://{}:{}".format(*listener.sockets[0].getsockname()))
            codes = []
            for options in ((), LOOPBACK_OPTIONS):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await send(address, b"hello", None, options)
                codes.append(caught.value.code())
            return address, codes

    address, codes = asyncio.run(attempt())
    assert set(asked) == {f"CONNECT {address} HTTP/1.1\r\n".encode()}
    # The second reached the server, which tells a peer without certificate that it does not know it.
    assert codes == [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED]


@pytest.mark.parametrize("details", ["", "Connection refused", "Socket closed", "Deadline Exceeded"])
def test_other_failures_are_not_blamed_on_certificates(details):
    assert refusal(details) is None


def test_a_forwarder_whose_server_is_not_there_is_not_blamed_on_certificates(load):
    """A proxy accepts connections and closes them, some sooner than others."""

    async def close(reader, writer):
        await reader.read(1)
        writer.close()

    async def attempt():
        async with await asyncio.start_server(close, "127.0.0.1", 0) as forwarder:
            address = "{}:{}".format(*forwarder.sockets[0].getsockname())
            await send(
                address, b"hello", load("client-1").channel_credentials(), load("client-1").channel_options()
            )

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        asyncio.run(attempt())
    assert refusal(caught.value.details()) is None


def test_a_server_that_is_not_there_is_not_blamed_on_certificates(load):
    async def attempt():
        async with serving(load("server").server_credentials()) as (_, address):
            pass
        await send(
            address, b"hello", load("client-1").channel_credentials(), load("client-1").channel_options()
        )

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        asyncio.run(attempt())
    assert refusal(caught.value.details()) is None
