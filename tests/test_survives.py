"""docs/survives.md, cell by cell: programs that end in each way, and what is found afterwards.

survivor.py is the program. tests/faults tests what a loss of power leaves.
"""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from servers import HOST, RedisServer, redis_server
from survivor import POSITION, contents, contents_of, prepare, url_of

import statekit as sk

ROOT = Path(__file__).resolve().parent.parent
SECONDS_MAX = 300.0  # a program must have ended by then; a busy machine takes its time


class End(NamedTuple):
    """How a program ends: what it does, whether in a with statement, the signal, its exit code."""

    way: str
    is_with: bool = False
    signal: int = 0
    code: int = 0


ENDS = {
    "close": End("close"),
    "with": End("end", is_with=True),
    "end": End("end"),
    "sys.exit": End("exit", code=3),
    "sys.exit in with": End("exit", is_with=True, code=3),
    "exception": End("exception", code=1),
    "exception in with": End("exception", is_with=True, code=1),
    "ctrl-c": End("signal", signal=signal.SIGINT, code=-signal.SIGINT),
    "ctrl-c in with": End("signal", is_with=True, signal=signal.SIGINT, code=-signal.SIGINT),
    "del": End("del", code=-signal.SIGKILL),
    "kill": End("signal", signal=signal.SIGTERM, code=-signal.SIGTERM),
    "kill -9": End("signal", signal=signal.SIGKILL, code=-signal.SIGKILL),
}
CLOSED = ("close", "with")
KILLED = ("kill", "kill -9")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as one:
        yield one


class Ended(NamedTuple):
    """A program that has ended, and where its providers were."""

    name: str
    folder: str
    redis: str
    said: str  # to stderr


@pytest.fixture(scope="module", params=ENDS)
def ended(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, server: RedisServer
) -> Ended:
    end = ENDS[request.param]
    folder = tmp_path_factory.mktemp("survivor")
    redis = f"redis://{HOST}:{server.port}/0"
    with server.client() as client:
        client.flushdb()
    program = [sys.executable, "-W", "always::ResourceWarning", str(ROOT / "tests" / "survivor.py")]
    arguments = [str(folder), redis, end.way, *(["with"] if end.is_with else [])]
    with (
        open(folder / "said", "w") as said,
        subprocess.Popen([*program, *arguments], stdout=subprocess.PIPE, stderr=said) as child,
    ):
        assert child.stdout is not None
        if end.signal and child.stdout.readline() == b"ready\n":
            child.send_signal(end.signal)
        child.stdout.read()
        code = child.wait(SECONDS_MAX)
    text = (folder / "said").read_text()
    assert code == end.code, text
    return Ended(request.param, str(folder), redis, text)


def found(ended: Ended, place: str) -> tuple[dict[str, object], object]:
    """What is there now, and the position that it belongs to."""
    if place in ("checkpoint", "async"):
        path = f"{ended.folder}/{place}"
        with sk.restore(path) as kv:
            return contents(kv), sk.checkpoints(path)[-1].metadata
    with sk.open(url_of(place, ended.folder, ended.redis)) as kv:
        return contents(kv), None if place == "memory" else kv.committed


def warning(ended: Ended, place: str) -> str:
    """What was said of a provider that was left without close()."""
    shown = re.escape(url_of(place, ended.folder, ended.redis))
    lines = re.findall(rf"ResourceWarning: <KVProvider '{shown}'.* was left without .*", ended.said)
    assert len(lines) <= 1
    return lines[0] if lines else ""


def test_memory_is_gone(ended: Ended) -> None:
    assert found(ended, "memory") == ({"counts": {}, "texts": {}, "timers": {}}, None)
    assert not warning(ended, "memory")


@pytest.mark.parametrize("place", ["rocksdb", "redis"])
def test_without_positions_only_a_kill_loses_what_was_not_committed(
    ended: Ended, place: str
) -> None:
    version = 1 if ended.name in KILLED else 2
    assert found(ended, place) == (contents_of(version), None)
    is_left = ended.name not in (*CLOSED, *KILLED) and "with" not in ended.name
    assert ("It was flushed now." in warning(ended, place)) == is_left


@pytest.mark.parametrize("place", ["rocksdb-at", "redis-at"])
def test_with_positions_only_close_commits_what_was_not_committed(ended: Ended, place: str) -> None:
    version = 2 if ended.name in CLOSED else 1
    assert found(ended, place) == (contents_of(version), POSITION)
    is_left = ended.name not in (*CLOSED, *KILLED) and "with" not in ended.name
    assert ("Changes since the last commit(), if any, are lost" in warning(ended, place)) == is_left


def test_a_checkpoint_that_was_taken_is_there(ended: Ended) -> None:
    assert found(ended, "checkpoint") == (contents_of(1), POSITION)


def test_a_checkpoint_that_was_not_waited_for_is_finished_unless_killed(ended: Ended) -> None:
    held, metadata = found(ended, "async")
    version = metadata["version"]
    assert held == contents_of(version)  # never half of it
    assert version in ((1, 2) if ended.name in (*KILLED, "del") else (2,))


@pytest.mark.parametrize(
    ("settings", "version"),
    [(("--appendonly", "yes", "--appendfsync", "always"), 1), ((), None)],
    ids=["append-only file", "nothing saved"],
)
def test_what_a_redis_server_has_after_a_kill_is_for_its_settings_to_say(
    settings: tuple[str, ...], version: int | None, tmp_path: Path
) -> None:
    with redis_server(tmp_path / "redis", *settings) as one:
        redis = f"redis://{HOST}:{one.port}/0"
        kv = prepare("redis-at", str(tmp_path), redis)  # version 1, and 2 that is not committed
        one.kill()
        with redis_server(tmp_path / "redis", *settings, port=one.port):
            kv._close(is_kept=False)  # as happens when a program ends
            with sk.open(url_of("redis-at", "", redis)) as kv:
                held = contents(kv), kv.committed
    if version is None:
        assert held == ({"counts": {}, "texts": {}, "timers": {}}, None)
    else:
        assert held == (contents_of(version), POSITION)


def test_every_provider_is_left_though_warnings_are_errors_and_one_home_fails(
    tmp_path: Path,
) -> None:
    code = """
import sys
import statekit as sk
from statekit.errors import HomeError

def fail(*_, **__):
    raise HomeError("as the test wants")

kept = [sk.open(f"rocksdb:{sys.argv[1]}/{at}?sync=0", key_groups=4) for at in range(6)]
for kv in kept:
    kv.value("n", int)["a"] = 1
for bad in kept[1:5:3]:  # the one fails to write, and to say whether it did
    home = bad._residence.home
    home.write_rows = home.get = home.get_one = fail
    try:
        bad.flush()
    except HomeError:
        pass
"""
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    found = []
    for at in range(6):
        with sk.open(f"rocksdb:{tmp_path}/{at}") as kv:
            found.append(dict(kv.value("n", int).items()))
    assert found == [{} if at in (1, 4) else {"a": 1} for at in range(6)], done.stderr
    assert "as the test wants" in done.stderr
