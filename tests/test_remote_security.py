"""Who is let in, who is not, and that refusing somebody harms nobody else."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from remote_util import LONG_S, TOKEN, Authority, ServerProcess, Service

from statekit.errors import ArgumentError, PeerError, PeerLostError, PeerRefusedError
from statekit.remote.channel import PeerChannel
from statekit.remote.security import TLS, Address, check_token, parse_address
from statekit.remote.server import PeerServer

CA, OTHER_CA = Authority(), Authority("strangers")
SERVER, CLIENT = CA.sign(), CA.sign("worker-1")
MUTUAL = TLS(SERVER.cert, SERVER.key, CA.cert)


@contextmanager
def serving(tls: TLS | None = None, token: str | None = None) -> Iterator[PeerServer]:
    with PeerServer(Service(), tls=tls, token=token) as server:
        yield server
        # Whatever was refused in between, a client with the right credentials is let in.
        own = None if tls is None else TLS(CLIENT.cert, CLIENT.key, CA.cert)
        with PeerChannel(server.address, tls=own, token=token) as channel:
            assert channel.hello().name == "alpha"


def refused(server: PeerServer, **given: Any) -> str:
    with (
        PeerChannel(server.address, timeout_s=LONG_S, **given) as channel,
        pytest.raises(PeerRefusedError) as raised,
    ):
        channel.hello()
    assert server._service.asked == []  # type: ignore[attr-defined]
    return str(raised.value)


# ---- Addresses


@pytest.mark.parametrize(
    ("text", "address", "is_local"),
    [
        ("127.0.0.1:0", Address("127.0.0.1", 0), True),
        ("127.8.9.1:80", Address("127.8.9.1", 80), True),
        ("localhost:7000", Address("localhost", 7000), True),
        ("LOCALHOST:7000", Address("localhost", 7000), True),
        ("[::1]:7000", Address("::1", 7000), True),
        ("[0:0::1]:7000", Address("::1", 7000), True),
        ("unix:/tmp/a b", Address("/tmp/a b", None), True),
        ("0.0.0.0:7000", Address("0.0.0.0", 7000), False),
        ("[::]:7000", Address("::", 7000), False),
        ("10.0.0.1:65535", Address("10.0.0.1", 65535), False),
        ("node-1.example.org:1", Address("node-1.example.org", 1), False),
        ("localhost.example.org:1", Address("localhost.example.org", 1), False),
        ("127.0.0.1.example.org:1", Address("127.0.0.1.example.org", 1), False),
    ],
)
def test_addresses_are_understood(text: str, address: Address, is_local: bool) -> None:
    assert parse_address(text) == address
    assert address.is_local is is_local
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        "", "localhost", ":1", "host:", "host:x", "host:65536", "host:-1", "::1:80", "[::1]",
        "[nonsense]:1", "a b:1", "unix:", "unix:\0", f"unix:/{'x' * 200}", "dns:///host:1",
        "http://host:1", "host:1/x", "ipv4:1.2.3.4:5", "unix-abstract:x", "host:٣", None, 7,
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused(text: Any) -> None:
    with pytest.raises(ArgumentError, match="no address"):
        parse_address(text)


# ---- Rules


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0", "example.org:0"])
@pytest.mark.parametrize(
    ("tls", "token"),
    [(None, None), (None, TOKEN), (TLS(SERVER.cert, SERVER.key), None)],
    ids=["nothing", "token", "tls"],
)
def test_a_server_that_strangers_reach_needs_tls_and_asks_who_they_are(
    address: str, tls: TLS | None, token: str | None
) -> None:
    with pytest.raises(ArgumentError, match="insecure=True"):
        PeerServer(Service(), address, tls=tls, token=token)


@pytest.mark.parametrize(
    "given",
    [
        {"insecure": True},
        {"tls": TLS(SERVER.cert, SERVER.key), "token": TOKEN},
        {"tls": MUTUAL},
    ],
    ids=["insecure", "tls and token", "mutual tls"],
)
def test_a_server_may_be_opened_to_others(given: Any) -> None:
    with PeerServer(Service(), "0.0.0.0:0", **given) as server:
        assert server.address.startswith("0.0.0.0:")


def test_a_server_with_tls_needs_its_certificate() -> None:
    with pytest.raises(ArgumentError, match="needs its certificate"):
        PeerServer(Service(), tls=TLS(ca=CA.cert))


def test_a_token_does_not_go_out_in_the_clear() -> None:
    with pytest.raises(ArgumentError, match="in the clear"):
        PeerChannel("192.0.2.1:7000", token=TOKEN)
    PeerChannel("192.0.2.1:7000", token=TOKEN, insecure=True).close()
    PeerChannel("192.0.2.1:7000", token=TOKEN, tls=TLS(ca=CA.cert)).close()
    PeerChannel("192.0.2.1:7000").close()
    with pytest.raises(ArgumentError, match="no port"):
        PeerChannel("127.0.0.1:0")


@pytest.mark.parametrize(
    "token", ["", "short", "x" * 15, "x" * 1025, "has a space in it ...", "ключ" * 8, b"x" * 20]
)
def test_tokens_that_are_none_are_refused_without_being_shown(token: Any) -> None:
    with pytest.raises(ArgumentError, match="token") as raised:
        check_token(token)
    assert not token or str(token) not in str(raised.value)


# ---- Tokens


def test_only_the_right_token_is_let_in() -> None:
    with serving(token=TOKEN) as server:
        for token in (None, TOKEN + "x", TOKEN[:-1], TOKEN.upper(), "x" * 1000):
            assert "token" in refused(server, token=token)
        assert server.figures()["refused"] == 5


def test_a_server_without_a_token_takes_any() -> None:
    with serving() as server, PeerChannel(server.address, token=TOKEN) as channel:
        assert channel.hello().name == "alpha"


def test_a_call_without_the_token_is_refused_before_it_is_read() -> None:
    with serving(token=TOKEN) as server, PeerChannel(server.address) as channel:
        stream = channel._quick.stream_stream("/statekit.v1.Peer/Query")
        never: Iterator[bytes] = iter(lambda: server._pool.submit(lambda: b"").result(), None)
        with pytest.raises(Exception, match="UNAUTHENTICATED"):
            next(stream(never))
        assert "Query" not in server.figures()


def test_secrets_are_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    tls = TLS(SERVER.cert, SERVER.key, CA.cert)
    with serving(tls, TOKEN) as server:
        own = TLS(CLIENT.cert, CLIENT.key, CA.cert)
        with PeerChannel(server.address, tls=own, token=TOKEN) as channel:
            channel.hello()
            shown = " ".join(map(repr, (server, channel, tls, own, tls.read())))
    assert TOKEN not in shown + caplog.text
    assert "PRIVATE" not in shown + caplog.text
    assert SERVER.key.decode()[40:80] not in shown


# ---- TLS


def test_tls_from_files_and_from_bytes(tmp_path: Path) -> None:
    for name, data in (("cert", SERVER.cert), ("key", SERVER.key), ("ca", CA.cert)):
        (tmp_path / name).write_bytes(data)
    tls = TLS(tmp_path / "cert", str(tmp_path / "key"))
    with (
        PeerServer(Service(), tls=tls, token=TOKEN) as server,
        PeerChannel(server.address, tls=TLS(ca=tmp_path / "ca"), token=TOKEN) as channel,
    ):
        assert channel.hello().name == "alpha"
    assert repr(tls) == f"TLS(cert='{tmp_path}/cert')"


def test_certificates_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="both cert and key"):
        TLS(SERVER.cert)
    for tls in (
        TLS(tmp_path / "no", tmp_path / "no"),
        TLS(b"nonsense", SERVER.key),
        TLS(SERVER.cert, SERVER.cert),
        TLS("a\0b", SERVER.key),
    ):
        with pytest.raises(ArgumentError, match=r"TLS\."):
            PeerServer(Service(), tls=tls)
    with pytest.raises(ArgumentError, match="can listen"):
        PeerServer(Service(), tls=TLS(SERVER.cert, CLIENT.key))  # the key of another certificate


def test_a_server_of_strangers_is_refused() -> None:
    with serving(TLS(SERVER.cert, SERVER.key), TOKEN) as server:
        text = refused(server, tls=TLS(ca=OTHER_CA.cert), token=TOKEN)
        assert "Check ca" in text


def test_a_server_under_another_name_is_refused() -> None:
    elsewhere = CA.sign("other.example.org")
    with PeerServer(Service(), tls=TLS(elsewhere.cert, elsewhere.key)) as server:
        refused(server, tls=TLS(ca=CA.cert))
        tls = TLS(ca=CA.cert, server_name="other.example.org")
        with PeerChannel(server.address, tls=tls) as channel:
            assert channel.hello().name == "alpha"


def test_an_expired_server_is_refused() -> None:
    expired = CA.sign(expired=True)
    with PeerServer(Service(), tls=TLS(expired.cert, expired.key)) as server:
        refused(server, tls=TLS(ca=CA.cert))


@pytest.mark.parametrize(
    "own",
    [None, OTHER_CA.sign("worker-1"), CA.sign("worker-1", expired=True)],
    ids=["none", "of strangers", "expired"],
)
def test_mutual_tls_lets_nobody_in_without_a_right_certificate(own: Any) -> None:
    given = TLS(ca=CA.cert) if own is None else TLS(own.cert, own.key, CA.cert)
    with serving(MUTUAL) as server:
        refused(server, tls=given)


def test_mutual_tls_and_a_token_need_both() -> None:
    with serving(MUTUAL, TOKEN) as server:
        refused(server, tls=TLS(CLIENT.cert, CLIENT.key, CA.cert))
        refused(server, tls=TLS(ca=CA.cert), token=TOKEN)


def test_plain_and_tls_do_not_understand_each_other() -> None:
    with (
        serving(TLS(SERVER.cert, SERVER.key)) as server,
        PeerChannel(server.address, timeout_s=0.5) as plain,
        pytest.raises(PeerLostError, match="both or neither use TLS"),
    ):
        plain.hello()
    with serving() as server:
        refused(server, tls=TLS(ca=CA.cert))


def test_the_environment_names_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:1")
    with serving(token=TOKEN):
        pass


# ---- Packages


def test_what_needs_grpc_says_so_where_it_is_missing() -> None:
    code = (
        "import sys; sys.modules['grpc'] = None\n"
        "import statekit.protocol.calls, statekit.remote.security, statekit.remote.query as query\n"
        "from statekit.errors import PeerError\n"
        "for ask in (lambda: query.connect('127.0.0.1:1'),\n"
        "            lambda: __import__('statekit.remote.server')):\n"
        "    try: ask()\n"
        "    except PeerError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("pip install statekit[remote]") == 2


def test_a_server_process_refuses_strangers_and_goes_on() -> None:
    with ServerProcess(token=TOKEN) as server:
        for _ in range(20):
            with (
                PeerChannel(server.address, token="x" * 20) as stranger,
                pytest.raises(PeerRefusedError),
            ):
                stranger.hello()
        with PeerChannel(server.address, token=TOKEN) as channel:
            assert channel.hello().name == "alpha"
            assert isinstance(PeerRefusedError("x"), PeerError)
