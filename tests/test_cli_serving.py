"""`statekit serve` and `statekit fetch`, in processes of their own. Oracle: a dict."""

import datetime as dt
import ipaddress
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import statekit as sk
from statekit.cli import serving
from statekit.cli.app import app
from statekit.errors import StorageError
from statekit.live.checkpointer import Checkpointer
from statekit.migration.strategies import STRATEGIES

EXPECTED = {f"user-{number}": number for number in range(5000)}
TOKEN = "a-token-of-some-length"
WAIT_S = 60


def command(*args: str | Path) -> list[str]:
    return [sys.executable, "-m", "statekit.cli", *map(str, args)]


@contextmanager
def started(*args: str | Path) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        command(*args), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    return line.rstrip("\n")


@contextmanager
def served(*args: str | Path) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A process that serves, and its address."""
    with started("serve", *args) as process:
        yield process, line_of(process).rpartition(" at ")[2]


def end(process: "subprocess.Popen[str]", number: int = signal.SIGTERM) -> tuple[str, str, int]:
    process.send_signal(number)
    out, err = process.communicate(timeout=WAIT_S)
    assert "Traceback" not in err
    return out, err, process.returncode


def run(*args: str | Path, code: int = 0) -> tuple[str, str]:
    """stdout and stderr of a command that ends with this code."""
    result = CliRunner().invoke(app, [str(arg) for arg in args], prog_name="statekit")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.stdout, result.stderr


def contents(*places: Path | str) -> dict[str, int]:
    with sk.restore([str(place) for place in places], lazy=False) as kv:
        return dict(kv.value("visits", int).items())


def part(groups: range) -> dict[str, int]:
    with sk.open("memory:") as kv:
        return {key: value for key, value in EXPECTED.items() if kv.key_group_of(key) in groups}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    with filled() as kv:
        kv.checkpoint(tmp_path / "ck")
    return tmp_path / "ck"


def filled(url: str = "memory:") -> sk.KVProvider:
    kv = sk.open(url)
    kv.value("visits", int).put_many(list(EXPECTED), list(EXPECTED.values()))
    return kv


# ---- The way it goes


def test_half_is_fetched_into_a_checkpoint_and_the_rest_stays(place: Path, tmp_path: Path) -> None:
    with served(place) as (server, address):
        assert line_of(server) == "key-groups 0-127 of 128, 1 state: visits"
        assert line_of(server) == f"to take them over: statekit fetch {address} --into DIR"
        out, err = run("fetch", address, "--key-groups", "0-63", "--into", tmp_path / "half")
        assert out.startswith("fetched key-groups 0-63: 1,024 leaves")
        assert f"written: checkpoint 1 of {tmp_path / 'half'}" in out
        assert 1 <= len(err.splitlines()) <= 10
        run("fetch", address, "--into", tmp_path / "rest")
        out, err, code = end(server, signal.SIGINT)
    assert (err, code) == ("", 0)
    assert "takes key-groups 0-63" in out
    assert "left here: none" in out
    assert contents(tmp_path / "half") == part(range(64))
    assert contents(tmp_path / "half", tmp_path / "rest") == EXPECTED
    assert contents(place) == EXPECTED, "a checkpoint that is served stays as it is"


def test_json_is_one_object_a_line_of_serve_and_one_of_fetch(place: Path, tmp_path: Path) -> None:
    with started("serve", f"{place}@1", "--once", "--json", "--key-groups", "0-31") as server:
        serving = json.loads(line_of(server))
        assert (serving["event"], serving["key_groups"]) == ("serving", [[0, 32]])
        assert (serving["states"], serving["key_group_count"]) == (["visits"], 128)
        out, _ = run("fetch", serving["address"], "--into", tmp_path / "new", "--json")
        (
            out_there,
            err,
        ) = server.communicate(timeout=WAIT_S)  # it ends by itself
    assert (server.returncode, err) == (0, "")
    fetched = json.loads(out)
    there = json.loads(out_there)
    assert (there["event"], there["leaves"], there["left"]) == ("handed_over", 512, [])
    assert fetched["key_groups"] == there["key_groups"] == [[0, 32]]
    assert (fetched["leaves"], fetched["number"], fetched["strategy"]) == (512, 1, "prioritised")
    assert contents(tmp_path / "new") == part(range(32))


def test_a_home_that_is_served_does_not_have_what_was_fetched(tmp_path: Path) -> None:
    home = f"rocksdb:{tmp_path / 'home'}"
    filled(home).close()
    with served(home) as (server, address):
        run("fetch", address, "--key-groups", "0-9,100-127", "--into", tmp_path / "some")
        assert end(server)[2] == 0
    gone = part(range(10)) | part(range(100, 128))
    assert contents(tmp_path / "some") == gone
    with sk.open(home) as kv:
        assert dict(kv.value("visits", int).items()) == {
            key: value for key, value in EXPECTED.items() if key not in gone
        }


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_brings_everything(tmp_path: Path, strategy: str) -> None:
    with filled() as kv:
        address = kv.serve().address
        options = ["--strategy", strategy, "--into", tmp_path / "new", "--json"]
        found = json.loads(run("fetch", address, *options)[0])
    assert found["leaves"] == 2048
    assert (found["on_demand"] == 2048) == (strategy == "on_demand")
    assert contents(tmp_path / "new") == EXPECTED


def test_discarded_state_is_gone_on_both_sides() -> None:
    with filled() as kv:
        out, _ = run("fetch", kv.serve().address, "--discard")
        assert out.startswith("fetched key-groups 0-127")
        assert kv.key_groups == ()


# ---- Ends that were not planned


@contextmanager
def held_up(monkeypatch: pytest.MonkeyPatch, leaves: int) -> Iterator[threading.Event]:
    """Departures stand still after `leaves` leaves, until the event is set."""
    go = threading.Event()
    read = sk.Departure.read

    def slow(self: sk.Departure, leaf: int, *args: Any) -> Any:
        if leaf >= leaves:
            go.wait(WAIT_S)
        return read(self, leaf, *args)

    monkeypatch.setattr(sk.Departure, "read", slow)
    try:
        yield go
    finally:
        go.set()


def fetching(address: str, into: Path) -> "subprocess.Popen[str]":
    """A fetch of which a tenth has come."""
    process = subprocess.Popen(
        command("fetch", address, "--timeout", "3", "--strategy", "gradual", "--into", into),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert "of 2,048 leaves" in process.stderr.readline()
    return process


def test_ctrl_c_gives_back_what_has_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with filled() as kv, held_up(monkeypatch, 400) as go:
        process = fetching(kv.serve().address, tmp_path / "part")
        with process:
            process.send_signal(signal.SIGINT)
            while not kv.key_groups:  # given back
                assert process.poll() is None
            go.set()
            out, err = process.communicate(timeout=WAIT_S)
        assert process.returncode == 1
        assert "interrupted: key-groups" in err
        assert "were given back" in err
        assert "written: checkpoint 1" in out
        here = dict(kv.value("visits", int).items())
    there = contents(tmp_path / "part")
    assert not here.keys() & there.keys()
    assert here | there == EXPECTED


def test_what_is_complete_is_written_when_the_peer_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with filled() as kv, held_up(monkeypatch, 400) as go:
        server = kv.serve()
        with fetching(server.address, tmp_path / "part") as process:
            server.close()
            go.set()
            out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert "are not here as a whole" in err
    assert "Traceback" not in err
    assert "written: checkpoint 1" in out
    found = contents(tmp_path / "part")
    assert found.items() <= EXPECTED.items()
    assert found.keys() >= part(range(12)).keys()  # at least 192 leaves, 16 for each key-group


def test_what_cannot_be_written_there_is_written_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Checkpointer.take

    def full(self: Checkpointer, url: Any, *args: Any, **options: Any) -> sk.Checkpoint:
        if str(url).startswith(str(tmp_path / "full")):
            raise StorageError("the disk is full.")
        return take(self, url, *args, **options)

    monkeypatch.setattr(Checkpointer, "take", full)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with filled() as kv:
        _, err = run("fetch", kv.serve().address, "--into", tmp_path / "full", code=1)
    assert "the disk is full. What was fetched is in" in err
    (rescued,) = tmp_path.glob("statekit-fetched-*")
    assert contents(rescued) == EXPECTED


def test_each_signal_counts_however_late_it_is_noticed() -> None:
    """Even in the middle of take(): the handler takes no lock."""
    ending = serving._Ending()
    assert not ending.wait(0)
    before = signal.signal(signal.SIGALRM, lambda *_: ending.ask())
    try:
        for _ in range(2):
            signal.raise_signal(signal.SIGALRM)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert [ending.wait(0), ending.take(), ending.take()] == [True, True, False]


def test_a_server_that_ends_too_early_says_so(place: Path) -> None:
    with served(place) as (server, address), sk.open("memory:", owned=()) as kv:
        kv.fetch_from(address, strategy="on_demand")
        while "takes" not in line_of(server):
            pass
        server.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):  # it waits for leaves that are on their way
            server.wait(0.3)
        _, err, code = end(server)
    assert code == 1
    assert err.startswith("statekit: ended while ")
    assert "had 0 of 2048 leaves" in err


# ---- Who may


def test_a_token_is_asked_for(place: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    (tmp_path / "wrong").write_text("another-token-of-that-length")
    with served(place, "--token-file", tmp_path / "token") as (_, address):
        for options in ([], ["--token-file", tmp_path / "wrong"]):
            _, err = run("fetch", address, "--discard", *options, code=1)
            assert err.startswith("statekit: ")
            assert "token" in err
            assert len(err.splitlines()) == 1
        run("fetch", address, "--discard", "--token-file", tmp_path / "token")


def test_tls_with_certificates_of_both_sides(place: Path, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    options = ["--tls-cert", cert, "--tls-key", key, "--tls-ca", cert]
    with served(place, *options) as (_, address):
        for others in ([], ["--tls-ca", cert]):
            _, err = run("fetch", address, "--discard", "--timeout", "1", *others, code=1)
            assert err.startswith("statekit: ")
        run("fetch", address, "--into", tmp_path / "new", *options)
    assert contents(tmp_path / "new") == EXPECTED


def certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "worker")])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return folder / "cert.pem", folder / "key.pem"


# ---- Mistakes


ERRORS = [
    ("fetch {address}", 2, "--into DIR, or --discard"),
    ("fetch {address} --into {tmp}/o --discard", 2, "one of them"),
    ("fetch {address} --into {ck}", 1, "is not empty. Name a directory that is new"),
    ("fetch {address} --discard --strategy fast", 2, "'fast' is not one of"),
    ("fetch {address} --discard --key-groups 0-x", 1, "Write 0-63"),
    ("fetch {address} --discard --key-groups 0-200", 1, "key-group 128"),
    ("fetch {address} --discard --tls-cert {ck}", 2, "go together"),
    ("fetch {address} --discard --token-file {tmp}/none", 1, "No such file"),
    ("fetch {address} --discard --token-file {tmp}/short", 1, "the token has 5 characters"),
    ("fetch nowhere --discard", 1, "'nowhere' is no address"),
    ("fetch 127.0.0.1:1 --discard --timeout 0.3", 1, "nobody listens at 127.0.0.1:1"),
    ("serve {tmp}/nowhere", 1, "there is no checkpoint"),
    ("serve {ck}@7", 1, "7"),
    ("serve {ck} --address nowhere", 1, "'nowhere' is no address"),
    ("serve {ck} --address 0.0.0.0:0", 1, "Give --tls-cert and --tls-key"),
    ("serve {ck} --key-groups 64-200", 1, "key-group 128"),
    ("serve {ck} --token-file {tmp}/binary", 1, "is no text"),
    ("serve memory:", 1, "has nothing in it"),
    ("serve rocksdb:{tmp}/none", 1, "there is no directory"),
]


@pytest.mark.parametrize(("line", "code", "message"), ERRORS, ids=[line for line, _, _ in ERRORS])
def test_errors_are_one_message_and_nothing_is_taken(
    place: Path, tmp_path: Path, line: str, code: int, message: str
) -> None:
    (tmp_path / "short").write_text("short")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with filled() as kv:
        names = {"address": kv.serve().address, "tmp": tmp_path, "ck": place}
        out, err = run(*(word.format(**names) for word in line.split()), code=code)
        assert kv.key_groups == (range(128),)
    assert message in err
    assert out == ""


def test_nothing_is_left_to_fetch() -> None:
    with filled() as kv:
        address = kv.serve().address
        run("fetch", address, "--discard", "--key-groups", "0-126")
        _, err = run("fetch", address, "--discard", "--key-groups", "0-127", code=1)
        assert "does not have key-groups 0-126. It has 127 of 128." in err
        run("fetch", address, "--discard")
        _, err = run("fetch", address, "--discard", code=1)
        assert "has no key-groups, or none any more" in err


# ---- Terminals


def test_a_terminal_gets_a_map(tmp_path: Path) -> None:
    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "24"}
    with filled() as kv:
        args = command("fetch", kv.serve().address, "--key-groups", "64-127", "--discard")
        with subprocess.Popen(args, stdout=child, stderr=child, env=environment) as process:
            os.close(child)
            shown = b""
            while True:
                try:
                    data = os.read(parent, 65536)
                except OSError:  # the other end is closed
                    break
                if not data:
                    break
                shown += data
        os.close(parent)
    assert process.returncode == 0
    text = shown.decode()
    assert "·" * 64 in text
    assert "█" * 64 in text
    assert "1,024 streamed" in text
    assert "fetched key-groups 64-127" in text
