"""Homes: every home passes the conformance suite, and every failure says what and where."""

import importlib
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
import rocksdict
from servers import HOST, RedisServer, free_port, need_redis_tls, redis_cluster, redis_server
from test_docs import python_blocks

import statekit as sk
from statekit.errors import ArgumentError, HomeError, StateKitError
from statekit.homes import (
    Home,
    HomeSnapshot,
    HomeUrl,
    open_home,
    parse_bytes,
    register_home,
)
from statekit.homes import home as home_module
from statekit.homes import redis as redis_module
from statekit.homes import rocksdb as rocksdb_module
from statekit.homes.home import Change, Named, Row
from statekit.homes.redis import open_redis
from statekit.homes.rocksdb import open_rocksdb
from statekit.testing import HomeConformance

ROOT = Path(__file__).resolve().parent.parent
MIB = 2**20
PASSWORD = "s3/cr@t:é"
QUOTED = "s3%2Fcr%40t%3A%C3%A9"
A = (0, 0, b"a")


def rocksdb(path: Path, options: str = "") -> Home:
    return open_rocksdb(HomeUrl.parse(f"rocksdb:{path}{options}"), 16 * MIB)


def redis_home(server: RedisServer, options: str = "", user: str = "") -> Home:
    return open_redis(HomeUrl.parse(f"redis://{user}{HOST}:{server.port}/0{options}"), 0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as one:
        yield one


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RedisServer]]:
    with redis_cluster(tmp_path_factory.mktemp("cluster")) as servers:
        yield servers


def doc_example() -> type[HomeConformance]:
    """The test class at the end of docs/homes.md, for the home that is shown there."""
    scope: dict[str, object] = {}
    for block in python_blocks(ROOT / "docs" / "homes.md"):
        if "print(" not in block:
            exec(compile(block, "docs/homes.md", "exec"), scope)
    found = scope["TestSqliteHome"]
    assert isinstance(found, type)
    assert issubclass(found, HomeConformance)
    return found


# -- conformance ---------------------------------------------------------------------------


class TestRocksdbHome(HomeConformance):
    def open_home(self, tmp_path: Path) -> Home:
        return rocksdb(tmp_path / "db")


class TestRedisHome(HomeConformance):
    @pytest.fixture(autouse=True)
    def _server(self, server: RedisServer) -> None:
        self.server = server

    def open_home(self, tmp_path: Path) -> Home:
        return redis_home(self.server, f"?prefix={tmp_path.name}")


class TestRedisClusterHome(HomeConformance):
    @pytest.fixture(autouse=True)
    def _servers(self, cluster: list[RedisServer]) -> None:
        self.servers = cluster

    def open_home(self, tmp_path: Path) -> Home:
        return redis_home(self.servers[1], f"?cluster=1&prefix={tmp_path.name}")


TestDocumentedHome = doc_example()


class DictHome(Home):
    """The smallest home: for the suite's own tests, and the one that forgets."""

    def __init__(self) -> None:
        self.rows: dict[Row, bytes] = {}
        self.meta: bytes | None = None
        self.lock = threading.Lock()
        self.is_open = True

    def check(self) -> None:
        if not self.is_open:
            raise HomeError("it is closed. Open another.")

    def get(self, rows: Sequence[Row]) -> list[bytes | None]:
        self.check()
        return [self.rows.get(row) for row in rows]

    def load(self, leaf: int, state: int) -> list[tuple[bytes, bytes]]:
        self.check()
        with self.lock:
            rows = list(self.rows.items())
        return [(row[2], value) for row, value in rows if row[:2] == (leaf, state)]

    def write(self, changes: Sequence[Change]) -> None:
        self.check()
        with self.lock:
            for row, value in changes:
                if value is None:
                    self.rows.pop(row, None)
                else:
                    self.rows[row] = value

    def read_meta(self) -> bytes | None:
        self.check()
        return self.meta

    def write_meta(self, meta: bytes, expected: bytes | None) -> bool:
        self.check()
        with self.lock:
            if self.meta != expected:
                return False
            self.meta = meta
            return True

    def close(self) -> None:
        self.is_open = False


class TestDictHome(HomeConformance):
    persistent = False

    def open_home(self, tmp_path: Path) -> Home:
        return DictHome()


class LosesEmpty(DictHome):
    def get(self, rows: Sequence[Row]) -> list[bytes | None]:
        return [value or None for value in super().get(rows)]


class MixesStates(DictHome):
    def load(self, leaf: int, state: int) -> list[tuple[bytes, bytes]]:
        return [(key, value) for (of, _, key), value in self.rows.items() if of == leaf]


class ForgetsToCompare(DictHome):
    def write_meta(self, meta: bytes, expected: bytes | None) -> bool:
        self.meta = meta
        return True


class Unordered(DictHome):
    def get(self, rows: Sequence[Row]) -> list[bytes | None]:
        found = {row: self.rows.get(row) for row in rows}
        return list(found.values())


class NeverCloses(DictHome):
    def close(self) -> None:
        pass


class ClearsTooMuch(DictHome):
    def clear(self, leaf: int, state: int) -> None:
        self.rows = {row: value for row, value in self.rows.items() if row[0] != leaf}


class ClearsOneLeaf(DictHome):
    def clear_leaves(self, leaves: range, states: int) -> None:
        super().clear_leaves(leaves[:1], states)


class FirstCounts(DictHome):
    def write_rows(
        self, rows: Named, cleared: Iterable[tuple[int, int]] = (), durable: bool = False
    ) -> None:
        pairs = [*zip(rows[::2], rows[1::2], strict=True)][::-1]
        super().write_rows([part for pair in pairs for part in pair], cleared, durable)


class ClearsLast(DictHome):
    def write_rows(
        self, rows: Named, cleared: Iterable[tuple[int, int]] = (), durable: bool = False
    ) -> None:
        super().write_rows(rows, (), durable)
        for leaf, state in cleared:
            self.clear(leaf, state)


class SignedLeaves(DictHome):
    """Its leaves are ints of 32 bits, with a sign that is lost."""

    def write(self, changes: Sequence[Change]) -> None:
        super().write([((row[0] & (2**31 - 1), *row[1:]), value) for row, value in changes])


class SeesTheFuture(DictHome):
    """Its snapshots are no copies."""

    def snapshot(self) -> HomeSnapshot:
        home = self

        class Snapshot(HomeSnapshot):
            def load(self, leaf: int, state: int) -> list[tuple[bytes, bytes]]:
                return home.load(leaf, state)

            def close(self) -> None:
                pass

        return Snapshot()


class RowsTwice(DictHome):
    def load(self, leaf: int, state: int) -> list[tuple[bytes, bytes]]:
        return super().load(leaf, state) * 2


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (LosesEmpty, "test_values_may_be_empty_and_large"),
        (MixesStates, "test_leaves_and_states_are_kept_apart"),
        (ForgetsToCompare, "test_meta_is_replaced_only_by_those_who_know_it"),
        (ForgetsToCompare, "test_one_of_several_threads_replaces_the_meta"),
        (Unordered, "test_get_answers_in_order_with_misses_and_repeats"),
        (NeverCloses, "test_closed_home_raises_home_error"),
        (ClearsTooMuch, "test_clear_deletes_the_rows_of_one_leaf_and_state_only"),
        (ClearsOneLeaf, "test_clear_leaves_deletes_the_rows_of_a_range_of_leaves_only"),
        (FirstCounts, "test_write_rows_clears_first_and_the_last_of_a_row_counts"),
        (ClearsLast, "test_write_rows_clears_first_and_the_last_of_a_row_counts"),
        (SignedLeaves, "test_leaves_and_states_are_kept_apart"),
        (SignedLeaves, "test_write_rows_takes_any_key_and_many_rows"),
        (SeesTheFuture, "test_snapshot_is_of_one_moment"),
        (RowsTwice, "test_row_is_put_replaced_and_deleted"),
        (MixesStates, "test_random_operations_agree_with_a_dict"),
        (DictHome, "test_what_was_flushed_is_there_after_reopening"),
    ],
)
def test_suite_finds_a_broken_home(broken: type[Home], test: str, tmp_path: Path) -> None:
    class Suite(HomeConformance):
        def open_home(self, tmp_path: Path) -> Home:
            return broken()

    with pytest.raises(AssertionError):
        getattr(Suite(), test)(tmp_path)


def test_suite_says_what_a_subclass_must_define(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match=r"open_home\(self, tmp_path\)"):
        HomeConformance().test_new_home_is_empty(tmp_path)


def test_suite_can_be_imported_without_pytest_and_hypothesis() -> None:
    code = "import sys; sys.modules['pytest'] = sys.modules['hypothesis'] = None\n"
    done = run_python(code + "import statekit.testing")
    assert done.returncode == 0, done.stderr


# -- RocksDB -------------------------------------------------------------------------------


def fails(use: Callable[[], object], *parts: str) -> str:
    """Asserts that a call raises HomeError with all these parts in its message. Returns that."""
    with pytest.raises(HomeError) as caught:
        use()
    message = str(caught.value)
    for part in parts:
        assert part in message, message
    assert isinstance(caught.value, OSError)
    return message


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


IMPORT = """
import os, pickle, resource, rocksdict, sys
from statekit.errors import HomeError
from statekit.homes import HomeUrl
from statekit.homes.rocksdb import open_rocksdb
"""
OPEN = """
home = open_rocksdb(HomeUrl.parse("rocksdb:" + sys.argv[1]), 0)
"""


def test_rocksdb_directory_has_one_opener_in_this_process(tmp_path: Path) -> None:
    path = tmp_path / "db"
    home = rocksdb(path)
    fails(lambda: rocksdb(path), repr(str(path)), "open already", "Close that one first")
    home.write([(A, b"1")])
    home.close()
    for _ in range(3):  # at once, without waiting for the garbage collector
        again = rocksdb(path)
        assert again.get([A]) == [b"1"]
        again.close()


def test_rocksdb_directory_has_one_opener_among_processes(tmp_path: Path) -> None:
    path = tmp_path / "db"
    home = rocksdb(path)
    done = run_python(IMPORT + OPEN, str(path))
    assert done.returncode == 1
    assert re.search(f"HomeLockedError: .*{path}.*open already", done.stderr)
    home.close()
    assert run_python(IMPORT + OPEN, str(path)).returncode == 0


def test_rocksdb_rows_survive_kill_9(tmp_path: Path) -> None:
    code = IMPORT + OPEN + "home.write([((1, 2, b'k'), b'v')]); os.kill(os.getpid(), 9)"
    assert run_python(code, str(tmp_path / "db")).returncode == -9
    home = rocksdb(tmp_path / "db")
    assert home.get([(1, 2, b"k")]) == [b"v"]
    home.close()


@pytest.mark.parametrize("below", ["", "/db"])
def test_rocksdb_path_that_is_a_file(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    path = f"{tmp_path / 'file'}{below}"
    fails(lambda: rocksdb(Path(path)), repr(path), "directory")


def test_rocksdb_path_without_permission(tmp_path: Path) -> None:
    parent = tmp_path / "closed"
    parent.mkdir(mode=0o500)
    # Root may do anything. So it becomes nobody, once it has imported all that it needs.
    code = IMPORT + "if os.getuid() == 0: os.setuid(65534)" + OPEN
    done = run_python(code, str(parent / "db"))
    assert re.search(f"HomeError: .*{parent}.*Permission denied.*Make .*writable", done.stderr)


def test_rocksdb_on_a_full_disk(tmp_path: Path) -> None:
    # With a limit on the size of files, the disk is full for this process only.
    path = tmp_path / "db"
    done = run_python(IMPORT + OPEN + FILL_DISK, str(path))
    assert done.returncode == 0, done.stderr
    (failed,) = done.stdout.splitlines()
    assert repr(str(path)) in failed
    assert "The disk is full. Free some space" in failed
    home = rocksdb(path)
    assert home.get([(0, 0, b"first"), (0, 2, b"")]) == [b"1", b"2"]
    home.close()


FILL_DISK = """
home.write([((0, 0, b'first'), b'1')])
home.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
try:
    for at in range(100): home.write([((0, 1, b'%d' % at), os.urandom(2**16))])
    home.flush()
except HomeError as error: print(error)
assert home.get([(0, 0, b'first')]) == [b'1']  # it can be read meanwhile
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
home.write([((0, 2, b''), b'2')])
home.flush()
assert home.get([(0, 0, b'first'), (0, 2, b'')]) == [b'1', b'2']
home.close()
"""


def damage(path: Path) -> None:
    """Spoils every block of a database's files, but not what is needed to open them."""
    files = list(path.glob("*.sst"))
    assert files
    for file in files:
        content = bytearray(file.read_bytes())
        for at in range(0, len(content) - 2000, 50):
            content[at] ^= 0xFF
        file.write_bytes(content)


def test_rocksdb_damage_is_reported_by_every_read(tmp_path: Path) -> None:
    path = tmp_path / "db"
    rng = random.Random(3)
    home = rocksdb(path)
    home.write([((0, 0, b"%d" % at), rng.randbytes(100)) for at in range(1000)])
    home._db.flush()  # type: ignore[attr-defined]
    home.close()
    damage(path)
    home = rocksdb(path)
    uses = [
        lambda: home.get([(0, 0, b"1")]),
        lambda: home.get([(0, 0, b"1"), (0, 0, b"2")]),
        lambda: list(home.load(0, 0)),  # raises, instead of giving the rows before the damage
    ]
    for use in uses:
        fails(use, repr(str(path)), "damaged", "checkpoint")
    home.close()
    (path / "CURRENT").write_text("x")
    fails(lambda: rocksdb(path), repr(str(path)), "damaged")


def test_rocksdb_closed_says_so(tmp_path: Path) -> None:
    home = rocksdb(tmp_path / "db")
    home.close()
    fails(home.flush, str(tmp_path), "closed", "Open it again")
    fails(home.metrics, str(tmp_path), "closed")
    assert "closed" in repr(home)


def test_rocksdb_interrupt_is_not_turned_into_an_error(tmp_path: Path) -> None:
    home = rocksdb(tmp_path / "db")
    with pytest.raises(KeyboardInterrupt):
        home._failed("read", KeyboardInterrupt())  # type: ignore[attr-defined]
    panic = type("PanicException", (BaseException,), {})("called unwrap() on None")
    assert isinstance(home._failed("read", panic), HomeError)  # type: ignore[attr-defined]
    home.close()


def test_rocksdb_metrics_and_memory_stay_near_the_cache_size(tmp_path: Path) -> None:
    home = open_rocksdb(HomeUrl.parse(f"rocksdb:{tmp_path / 'db'}"), 8 * MIB)
    rng = random.Random(4)
    for turn in range(40):
        home.write([((turn, 0, b"%d" % at), rng.randbytes(1000)) for at in range(1000)])
    rows = [(rng.randrange(40), 0, b"%d" % rng.randrange(1000)) for _ in range(5000)]
    assert None not in home.get(rows)
    figures = home.metrics()
    assert figures["rocksdb_keys"] == pytest.approx(40_000, rel=0.2)
    assert figures["rocksdb_file_bytes"] > 20 * MIB
    # Memtables are charged to the cache, so they are in this figure.
    assert figures["rocksdb_cache_bytes"] < 10 * MIB
    home.close()


def test_rocksdb_leaves_few_log_files(tmp_path: Path) -> None:
    for _ in range(5):
        rocksdb(tmp_path / "db").close()
    assert len(list((tmp_path / "db").glob("LOG*"))) <= 2


def test_rocksdb_load_of_large_rows_goes_page_by_page(tmp_path: Path) -> None:
    home = rocksdb(tmp_path / "db")
    changes: list[Change] = [((5, 5, b"%d" % at), bytes(300_000)) for at in range(20)]
    home.write(changes)
    assert sorted(key for key, _ in home.load(5, 5)) == sorted(row[2] for row, _ in changes)
    home.close()


def held_up(home: Home) -> Any:
    """Has RocksDB hold up all writes: its tables are too many, and it does nothing about it."""
    home.write([((1, 1, b"key"), b"old")])
    db: Any = home._db  # type: ignore[attr-defined]
    db.flush()
    db.set_options(
        {
            "level0_file_num_compaction_trigger": "1000",
            "level0_slowdown_writes_trigger": "1",
            "level0_stop_writes_trigger": "1",
        }
    )
    return db


def test_a_write_that_rocksdb_holds_up_goes_on_when_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(rocksdb(tmp_path / "db")) as home:
        db = held_up(home)
        is_waiting = threading.Event()

        def sleep(seconds: float) -> None:
            is_waiting.set()
            time.sleep(seconds)

        monkeypatch.setattr(rocksdb_module, "sleep", sleep)
        writer = threading.Thread(target=home.write, args=([((1, 1, b"key"), b"new")],))
        writer.start()
        assert is_waiting.wait(60)
        assert home.get([(1, 1, b"key")]) == [b"old"]  # nobody else waits meanwhile
        db.set_options({"level0_slowdown_writes_trigger": "20", "level0_stop_writes_trigger": "36"})
        writer.join(60)
        assert home.get([(1, 1, b"key")]) == [b"new"]


def test_a_write_that_rocksdb_would_hold_up_for_ever_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it was on a disk that was nearly full: no error, and nothing that would end it."""
    monkeypatch.setattr(rocksdb_module, "_STALL_SECONDS_MAX", 0.0)
    with closing(rocksdb(tmp_path / "db")) as home:
        held_up(home)
        with pytest.raises(HomeError, match=r"takes no writes, and does nothing .* the file LOG"):
            home.write([((1, 1, b"key"), b"new")])
        assert home.get([(1, 1, b"key")]) == [b"old"]
        home.write([((1, 1, b"key"), b"newer")])  # this one opens it again
        assert home.get([(1, 1, b"key")]) == [b"newer"]


def test_rocksdb_path_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    home = open_rocksdb(HomeUrl.parse("rocksdb:some/where?sync=0"), 0)
    monkeypatch.chdir("/")  # it stays where it was opened
    home.write([(A, b"1")])
    home.flush()
    home.close()
    assert (tmp_path / "some" / "where" / "CURRENT").exists()
    assert str(tmp_path / "some" / "where") in repr(home)


@pytest.mark.parametrize(
    "url", ["rocksdb:", "rocksdb://a/b", "rocksdb:/a%00b", "rocksdb:/a?sync=2", "rocksdb:/a?b=1"]
)
def test_rocksdb_url_that_is_wrong(url: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(repr(url))):
        open_rocksdb(HomeUrl.parse(url), 0)


# -- directories that are, or are not, a home ------------------------------------------------


def tree(path: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """Everything below a path and the path itself: mode, inode, time of change and content."""
    found = {}
    for one in (path, *sorted(path.rglob("*"))):
        status = one.lstat()
        data = one.read_bytes() if one.is_file() else b""
        found[str(one)] = (status.st_mode, status.st_ino, status.st_mtime_ns, data)
    return found


def foreign_raw(path: Path) -> None:
    with_keys(path, rocksdict.Options(raw_mode=True), [(b"%d" % at, b"v") for at in range(1000)])


def foreign_typed(path: Path) -> None:
    with_keys(path, rocksdict.Options(), [(f"key-{at}", {"n": at}) for at in range(1000)])


def foreign_empty(path: Path) -> None:
    with_keys(path, rocksdict.Options(), [])


def with_keys(path: Path, options: rocksdict.Options, pairs: list[tuple[object, object]]) -> None:
    db = rocksdict.Rdict(str(path), options)
    for at, (key, value) in enumerate(pairs):
        db[key] = value
        if at == len(pairs) // 2:
            db.flush()  # half of it in a file, half in the log
    db.close()


def other_files(path: Path) -> None:
    (path / "sub").mkdir(parents=True)
    (path / "sub" / "notes.txt").write_text("mine")
    (path / "hidden").symlink_to("nowhere")


def a_file(path: Path) -> None:
    path.write_text("mine")


def a_link_to_nothing(path: Path) -> None:
    path.symlink_to("nowhere")


def checkpoints(path: Path) -> None:
    with sk.open("memory:") as kv:
        kv.value("v", str)["k"] = "1"
        kv.checkpoint(path)


def a_home(path: Path) -> None:
    with sk.open(f"rocksdb:{path}") as kv:
        kv.value("v", str)["k"] = "1"


@pytest.mark.parametrize(
    ("make", "below", "why"),
    [
        (foreign_raw, "", "a RocksDB of another program"),
        (foreign_typed, "", "a RocksDB of another program"),
        (foreign_empty, "", "a RocksDB of another program"),
        (other_files, "", "has other files and is no home"),
        (a_file, "", "it is no directory"),
        (a_link_to_nothing, "", "it is no directory"),
        (checkpoints, "", "has other files and is no home"),
        (checkpoints, "below", "it lies inside the checkpoints at"),
        (checkpoints, "below/and/below", "it lies inside the checkpoints at"),
        (a_home, "below", "it lies inside the home at"),
        (a_home, "below/and/below", "it lies inside the home at"),
    ],
)
def test_rocksdb_refuses_what_is_no_home_and_leaves_it_as_it_was(
    make: Callable[[Path], None], below: str, why: str, tmp_path: Path
) -> None:
    make(tmp_path / "place")
    path = tmp_path / "place" / below
    before = tree(tmp_path)
    for use in (lambda: rocksdb(path), lambda: sk.open(f"rocksdb:{path}")):
        fails(use, repr(str(path)), why, "Nothing was changed", "Name a home, an empty directory")
        assert tree(tmp_path) == before


@pytest.mark.parametrize("make", [a_home, checkpoints])
def test_rocksdb_refuses_a_link_that_leads_into_a_home_or_checkpoints(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path / "place")
    (tmp_path / "place" / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "place" / "empty")
    before = tree(tmp_path)
    for path in (tmp_path / "link", tmp_path / "link" / "below"):
        fails(partial(rocksdb, path), "it lies inside the", "Nothing was changed")
    assert tree(tmp_path) == before


def test_rocksdb_of_another_program_that_was_refused_is_still_its_own(tmp_path: Path) -> None:
    foreign_typed(tmp_path / "db")
    fails(lambda: rocksdb(tmp_path / "db"), "another program")
    db = rocksdict.Rdict(str(tmp_path / "db"))
    assert {key: db[key] for key in db.keys()} == {f"key-{at}": {"n": at} for at in range(1000)}  # noqa: SIM118
    db.close()


def test_rocksdb_of_another_program_that_is_in_use_is_refused(tmp_path: Path) -> None:
    db = rocksdict.Rdict(str(tmp_path / "db"))
    db["a"] = 1
    fails(lambda: rocksdb(tmp_path / "db"), "another program")
    db["b"] = 2
    assert (db["a"], db["b"]) == (1, 2)
    db.close()


@pytest.mark.parametrize("is_made", [True, False])
def test_rocksdb_home_is_made_in_an_empty_directory_and_marked(
    is_made: bool, tmp_path: Path
) -> None:
    path = tmp_path / "a" / "home"
    if is_made:
        path.mkdir(parents=True)
    a_home(path)
    assert "home of statekit" in (path / "STATEKIT").read_text()
    with sk.open(f"rocksdb:{path}") as kv:
        assert dict(kv.value("v", str).items()) == {"k": "1"}


def test_rocksdb_home_of_the_version_before_opens_and_gets_its_mark(tmp_path: Path) -> None:
    path = tmp_path / "home"
    a_home(path)
    mark = (path / "STATEKIT").read_text()
    (path / "STATEKIT").unlink()
    with sk.open(f"rocksdb:{path}") as kv:
        assert dict(kv.value("v", str).items()) == {"k": "1"}
        assert (path / "STATEKIT").read_text() == mark


# -- Redis ---------------------------------------------------------------------------------


def test_redis_that_is_not_there() -> None:
    where = f"redis://{HOST}:1/0"
    for options in ("", "?cluster=1"):
        fails(
            partial(open_redis, HomeUrl.parse(where + options), 0),
            where,
            "refused",
            "Check that the server runs",
        )


def test_redis_password_is_needed_and_never_shown(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--requirepass", PASSWORD) as one:
        for user in ("", ":wrong-one@", "bob:wrong-one@"):
            for options in ("", "?cluster=1"):
                message = fails(
                    partial(redis_home, one, options, user),
                    f"{HOST}:{one.port}",
                    "Check user and password",
                )
                assert "wrong-one" not in message
        home = redis_home(one, user=f":{QUOTED}@")
        home.write([(A, b"1")])
        one.kill()
        message = fails(lambda: home.get([A]), f"{HOST}:{one.port}")
        home.close()
        shown = message + repr(home) + fails(lambda: home.get([A]), "Open it again")
        for text in (PASSWORD, QUOTED, "s3"):
            assert text not in shown


def test_redis_url_with_a_mistake_never_shows_the_password() -> None:
    for rest in (
        "@host:x/0",
        "@host/db",
        "@/0",
        "@host/0?nope=1",
        "@host/0?prefix=",
        "@host/3?cluster=1",
    ):
        with pytest.raises(ArgumentError) as caught:
            open_redis(HomeUrl.parse(f"redis://me:hunter2{rest}"), 0)
        assert "hunter2" not in str(caught.value)
    url = HomeUrl.parse("redis://me:hunter2@host/0?memory=much&x=1")
    for use in (url.refuse_rest, lambda: url.take_bytes("memory", 0)):
        with pytest.raises(ArgumentError) as caught:
            use()
        assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(url)


def test_redis_with_tls_checks_the_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_redis_tls()
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed, so there is no certificate")
    key, certificate = str(tmp_path / "key"), str(tmp_path / "certificate")
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=test"]
    make += ["-addext", f"subjectAltName=IP:{HOST}", "-keyout", key, "-out", certificate]
    subprocess.run(make, check=True, capture_output=True, timeout=60)
    tls_port = free_port()
    settings = ["--tls-port", str(tls_port), "--tls-cert-file", certificate]
    settings += ["--tls-key-file", key, "--tls-ca-cert-file", certificate]
    settings += ["--tls-auth-clients", "no"]
    with redis_server(tmp_path, *settings):
        url = f"rediss://{HOST}:{tls_port}/0"
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        fails(lambda: open_redis(HomeUrl.parse(url), 0), url, "Set SSL_CERT_FILE")
        monkeypatch.setenv("SSL_CERT_FILE", certificate)
        home = open_redis(HomeUrl.parse(url), 0)
        home.write([(A, b"1")])
        assert home.get([A]) == [b"1"]
        home.close()


def test_redis_replica_takes_no_writes(tmp_path: Path, server: RedisServer) -> None:
    with redis_server(tmp_path, "--replicaof", HOST, str(server.port)) as replica:
        home = redis_home(replica)
        uses: list[Callable[[], object]] = [
            lambda: home.write([(A, b"1")]),
            lambda: home.clear(0, 0),
            lambda: home.write_meta(b"x", None),
        ]
        for use in uses:
            fails(use, f"{HOST}:{replica.port}", "replica", "Connect to the primary")
        home.close()


def test_redis_that_is_full_refuses_writes_and_keeps_rows(tmp_path: Path) -> None:
    with redis_server(tmp_path) as one, one.client() as admin:
        home = redis_home(one)
        home.write([(A, b"1")])
        admin.config_set("maxmemory", "1")  # less than it has
        fails(lambda: home.write([(A, b"2")]), f"{HOST}:{one.port}", "Raise maxmemory")
        assert home.get([A]) == [b"1"]
        admin.config_set("maxmemory-policy", "allkeys-lru")
        fails(lambda: redis_home(one), f"{HOST}:{one.port}", "noeviction")
        admin.config_set("maxmemory-policy", "volatile-lru")  # ours never expire
        redis_home(one).close()
        home.close()


def test_redis_keys_of_somebody_else(server: RedisServer) -> None:
    with server.client() as admin:
        admin.set("taken:{0}:0", "text")
    home = redis_home(server, "?prefix=taken")
    uses: list[Callable[[], object]] = [
        lambda: home.get([A]),
        lambda: home.get([A, A]),
        lambda: home.write([(A, b"1")]),
        lambda: list(home.load(0, 0)),
    ]
    for use in uses:
        fails(use, f"{HOST}:{server.port}", "other data", "prefix=")
    home.close()


def test_redis_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_module, "_ANSWER_SECONDS_MAX", 0.2)
    with redis_server(tmp_path) as one:
        home = redis_home(one)
        os.kill(one.process.pid, 19)  # SIGSTOP
        try:
            fails(lambda: home.get([A]), f"{HOST}:{one.port}", "does not answer in time")
        finally:
            os.kill(one.process.pid, 18)  # SIGCONT
        home.write([(A, b"1")])  # the same home works again
        assert home.get([A]) == [b"1"]
        home.close()


def test_redis_killed_during_writes_and_back_again(tmp_path: Path) -> None:
    with redis_server(tmp_path / "1") as one:
        home = redis_home(one)
        changes: list[Change] = [((at % 8, 0, b"%d" % at), b"v" * 50) for at in range(2000)]
        home.write(changes)
        is_writing = threading.Event()
        failures: list[BaseException] = []

        def write() -> None:
            try:
                while True:
                    home.write(changes)
                    is_writing.set()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=write, daemon=True)
        thread.start()
        assert is_writing.wait(120)
        one.kill()
        thread.join(120)
        assert not thread.is_alive()
        assert type(failures[0]) is HomeError, failures
        assert f"{HOST}:{one.port}" in str(failures[0])
        fails(lambda: home.get([A]), "Check that the server runs")
        with redis_server(tmp_path / "2", port=one.port):
            home.write(changes)
            assert home.get([changes[0][0]]) == [b"v" * 50]
        home.close()


class Flaky:
    """A client whose connection is lost at the next calls."""

    def __init__(self, client: object, losses: int) -> None:
        self.client, self.losses, self.calls = client, losses, 0

    def __getattr__(self, name: str) -> object:
        if name in ("hget", "pipeline", "hscan", "unlink", "get", "eval"):
            self.calls += 1
            if self.losses:
                self.losses -= 1
                raise redis.ConnectionError("Connection closed by server")
        return getattr(self.client, name)


def test_redis_lost_connection_is_tried_again_once(server: RedisServer) -> None:
    home = redis_home(server, "?prefix=flaky")
    client = home._client  # type: ignore[attr-defined]
    uses: list[Callable[[], object]] = [
        lambda: home.write([(A, b"1")]),
        lambda: home.get([A]),
        lambda: home.get([A, A]),
        lambda: list(home.load(0, 0)),
        lambda: home.clear(0, 0),
        home.read_meta,
    ]
    for use in uses:
        home._client = flaky = Flaky(client, 1)  # type: ignore[attr-defined]
        use()
        assert flaky.calls == 2
        home._client = flaky = Flaky(client, 2)  # type: ignore[attr-defined]
        fails(use, "Connection closed")
        assert flaky.calls == 2
    # The write may have happened, and a second try could not tell.
    home._client = flaky = Flaky(client, 1)  # type: ignore[attr-defined]
    fails(lambda: home.write_meta(b"x", None), "Connection closed")
    assert flaky.calls == 1
    home._client = client  # type: ignore[attr-defined]
    assert home.metrics()["redis_lost_connections"] > 0
    home.close()


def test_redis_rows_and_meta_lie_where_the_docs_say(server: RedisServer) -> None:
    home = redis_home(server, "?prefix=layout")
    home.write([((7, 3, b"\0k"), b"v"), ((7, 3, b"l"), b"w")])
    home.write_meta(b"m", None)
    with server.client() as admin:
        assert set(admin.scan_iter("layout:*")) == {b"layout:{7}:3", b"layout:meta"}
        assert admin.hgetall("layout:{7}:3") == {b"\0k": b"v", b"l": b"w"}
        home.clear(7, 3)
        assert not admin.exists("layout:{7}:3")
    home.close()


def test_redis_prefixes_keep_homes_apart(server: RedisServer) -> None:
    one, other = redis_home(server, "?prefix=p"), redis_home(server, "?prefix=p:1")
    one.write([(A, b"1")])
    assert one.write_meta(b"1", None)
    assert other.get([A]) == [None]
    assert other.read_meta() is None
    other.clear(0, 0)
    assert one.get([A]) == [b"1"]
    one.close()
    other.close()


def test_redis_load_gives_each_row_once_though_the_hash_is_resized(server: RedisServer) -> None:
    home = redis_home(server, "?prefix=resized")
    rows: list[Change] = [((0, 0, b"%d" % at), b"v") for at in range(5000)]
    home.write(rows)
    loaded = iter(home.load(0, 0))
    keys = [next(loaded)[0] for _ in range(50)]
    # Shrinking and growing in the middle of the scan is what makes HSCAN repeat rows.
    with server.client() as admin:
        for _ in range(3):
            admin.hset("resized:{0}:0", mapping={f"more-{at}": "x" for at in range(40_000)})
            admin.hdel("resized:{0}:0", *(f"more-{at}" for at in range(40_000)))
    keys += [key for key, _ in loaded if not key.startswith(b"more")]
    assert sorted(keys) == sorted(row[2] for row, _ in rows)
    home.close()


def test_redis_writes_large_values_in_chunks(server: RedisServer) -> None:
    home = redis_home(server, "?prefix=chunks")
    changes: list[Change] = [((at, 0, b"k"), bytes(3 * MIB)) for at in range(5)]
    chunks = list(home._chunks(changes))  # type: ignore[attr-defined]
    assert [len(puts) for puts, _ in chunks] == [3, 2]
    home.write(changes)
    assert home.get([row for row, _ in changes]) == [value for _, value in changes]
    home.close()


def test_redis_cluster_without_the_option_and_the_other_way_round(
    cluster: list[RedisServer], server: RedisServer
) -> None:
    changes: list[Change] = [((leaf, 0, b"k"), b"v") for leaf in range(50)]
    home = redis_home(cluster[0])
    fails(lambda: home.write(changes), f"{HOST}:{cluster[0].port}", "Add cluster=1")
    home.close()
    fails(lambda: redis_home(server, "?cluster=1"), f"{HOST}:{server.port}", "Remove cluster=1")


def test_redis_cluster_spreads_leaves_and_adds_up_metrics(cluster: list[RedisServer]) -> None:
    home = redis_home(cluster[0], "?cluster=1&prefix=spread")
    home.write([((leaf, state, b"k"), b"v") for leaf in range(60) for state in range(3)])
    leaves = []
    for node in cluster:
        with node.client() as admin:
            names = [name.decode() for name in admin.keys("spread:*")]
        leaves.append({int(re.findall(r"{(\d+)}", name)[0]) for name in names})
        assert len(names) == 3 * len(leaves[-1])  # all states of a leaf are together
    assert all(leaves)
    assert home.metrics()["redis_used_bytes"] > 3 * MIB
    home.close()


def test_redis_cluster_that_loses_a_node(tmp_path: Path) -> None:
    with redis_cluster(tmp_path) as nodes:
        home = redis_home(nodes[0], "?cluster=1")
        changes: list[Change] = [((leaf, 0, b"k"), b"v") for leaf in range(50)]
        home.write(changes)
        nodes[2].kill()
        fails(lambda: home.write(changes), f"{HOST}:{nodes[0].port}")
        fails(lambda: home.get([row for row, _ in changes]), f"{HOST}:{nodes[0].port}")
        home.close()


@pytest.mark.parametrize(
    "url",
    [
        "redis:",
        "redis://",
        "redis://host:port/0",
        "redis://host/zero",
        "redis://host/-1",
        "redis://host/0#1",
        "redis://host/0?prefix=",
        "redis://host/0?prefix={x}",
        "redis://host/0?cluster=yes",
        "redis://host/1?cluster=1",
        "redis://host/0?other=1",
    ],
)
def test_redis_url_that_is_wrong(url: str) -> None:
    with pytest.raises(ArgumentError, match=r"Use|Remove"):
        open_redis(HomeUrl.parse(url), 0)


def test_redis_url_is_taken_apart() -> None:
    url = HomeUrl.parse(f"rediss://me:{QUOTED}@[::1]:7000/3?prefix=job")
    found = redis_module._server_of(url)
    assert found == ("rediss://[::1]:7000/3", "::1", 7000, 3, "me", PASSWORD, True, False, "job")
    plain = redis_module._server_of(HomeUrl.parse("redis://host"))
    assert plain[1:] == ("host", 6379, 0, None, None, False, False, "statekit")


# -- URLs, sizes, registration -------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "package"), [(rocksdb_module, "rocksdict"), (redis_module, "redis")]
)
def test_missing_package_is_named(
    module: object, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    scheme = module.__name__.rpartition(".")[2]  # type: ignore[attr-defined]
    with pytest.raises(HomeError, match=rf"pip install statekit\[{scheme}\]"):
        getattr(module, f"open_{scheme}")(
            HomeUrl.parse(f"{scheme}://{'/' * (scheme != 'redis')}x"), 0
        )


def test_url_is_taken_apart() -> None:
    url = HomeUrl.parse("RocksDB:/var/my%20state?memory=2GiB&empty=&sync=0")
    assert (url.scheme, url.place) == ("rocksdb", "/var/my state")
    assert url.options == {"memory": "2GiB", "empty": "", "sync": "0"}
    assert url.take_bytes("memory", 5) == 2 * 2**30
    assert url.take_bytes("memory", 5) == 5
    assert HomeUrl.parse("memory:") == HomeUrl("memory:", "memory", "", {})
    with pytest.raises(ArgumentError, match="empty, sync"):
        url.refuse_rest()


@pytest.mark.parametrize("text", ["", "nothing", ":x", "/a/path", None, 5, b"rocksdb:/x"])
def test_url_that_is_none(text: object) -> None:
    with pytest.raises(ArgumentError, match="is no URL of a home"):
        HomeUrl.parse(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("1B", 1),
        ("1KiB", 1024),
        ("1KB", 1000),
        (" 1.5 GiB ", 3 * 2**29),
        ("0.5MiB", 2**19),
        ("2TiB", 2**41),
        ("3TB", 3 * 10**12),
    ],
)
def test_size_is_a_number_of_bytes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "1 2", "-1", "1e3", "nan", "inf", ".", "1.2.3MiB", None, "9" * 400]
)
def test_size_that_is_none(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"is no size \(memory\)"):
        parse_bytes(text, "memory")


@pytest.fixture
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home_module, "_registered", {})


@pytest.mark.usefixtures("_registered")
def test_registered_home_is_opened_with_its_url_and_cache_size() -> None:
    seen: list[tuple[HomeUrl, int]] = []

    def factory(url: HomeUrl, cache_bytes: int) -> Home:
        seen.append((url, cache_bytes))
        return DictHome()

    register_home("Dict", factory)
    url = HomeUrl.parse("DICT:there?x=1")
    assert isinstance(open_home(url, 123), DictHome)
    assert seen == [(url, 123)]


@pytest.mark.usefixtures("_registered")
def test_unknown_home_names_those_that_are_there() -> None:
    register_home("mine", lambda url, cache_bytes: DictHome())
    with pytest.raises(
        ArgumentError, match=r"'yours', which is not installed.*memory.*mine"
    ) as caught:
        open_home(HomeUrl.parse("yours://me:hunter2@there"), 0)
    assert isinstance(caught.value, StateKitError)
    assert "hunter2" not in str(caught.value)


@pytest.mark.usefixtures("_registered")
def test_entry_point_of_another_package_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[statekit.homes]\nother = other_home:make\n")
    (tmp_path / "other_home.py").write_text("def make(url, cache_bytes): return url, cache_bytes")
    monkeypatch.syspath_prepend(str(tmp_path))
    url = HomeUrl.parse("other:x")
    opened: object = open_home(url, 7)
    assert opened == (url, 7)


def test_entry_points_of_this_package_lead_to_factories() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points = project["entry-points"][home_module.ENTRY_POINTS]
    assert set(points) == {"rocksdb", "redis", "rediss"}
    for target in points.values():
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name))
