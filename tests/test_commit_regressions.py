"""Ways in which commits, arrivals and fetches once went wrong, each as a small test."""

import socket
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from commit_model import DiskHome
from servers import HOST, RedisServer, redis_server

import statekit as sk
from statekit.errors import ArgumentError, HomeError, OccupiedError
from statekit.homes import ledger as ledger_module
from statekit.homes import redis as redis_module
from statekit.homes import register_home
from statekit.homes.home import Named

SECONDS_MAX = 60.0
KEYS = [str(i) for i in range(20)]
FEW = {"key_groups": 4, "subgroups": 1}


class Shaky(DiskHome):
    """A home some of whose calls fail: those that a test names."""

    places: ClassVar[dict[str, DiskHome]] = {}
    fails: ClassVar[dict[str, Any]] = {}  # by the name of the call: what says whether it fails

    def _visit(self, call: str, *args: Any) -> None:
        if call in self.fails and self.fails[call](*args):
            raise HomeError(f"{call} fails, as the test wants.")

    def load(self, leaf: int, state: int) -> list[tuple[bytes, bytes]]:
        self._visit("load", leaf)
        return super().load(leaf, state)

    def clear_leaves(self, leaves: range, states: int) -> None:
        self._visit("clear_leaves", leaves)
        super().clear_leaves(leaves, states)

    def write_rows(
        self, rows: Named, cleared: Iterable[tuple[int, int]] = (), durable: bool = False
    ) -> None:
        super().write_rows(rows, cleared, durable)
        self._visit("write_rows", rows, durable)

    def write_meta(self, meta: bytes, expected: bytes | None) -> bool:
        self._visit("write_meta", meta)
        return super().write_meta(meta, expected)


register_home("shaky", Shaky.open)


@pytest.fixture(autouse=True)
def calm() -> Iterator[None]:
    Shaky.places.clear()
    yield
    Shaky.fails.clear()


def once(condition: Any = lambda *_: True) -> Any:
    """True the first time that a condition holds."""
    left = [1]
    return lambda *args: bool(condition(*args) and left and left.pop())


def contents(kv: sk.KVProvider) -> dict[str, int]:
    return dict(kv.value("c", int, default=0).items())


def fill(kv: sk.KVProvider, value: int, keys: list[str] = KEYS) -> None:
    counts = kv.value("c", int, default=0)
    for key in keys:
        if any(kv.key_group_of(key) in part for part in kv.key_groups):
            counts[key] = value


def test_a_home_that_was_given_its_key_groups_back_says_so_when_a_commit_is_acknowledged() -> None:
    kv = sk.open("shaky:a?atomic=1", **FEW)
    fill(kv, 1)
    kv.commit({"o": 1})
    memory = sk.open("memory:", owned=(), **FEW)
    memory.value("c", int, default=0)
    token = "0123456789abcdef"
    address = kv.serve(token=token).address
    memory.fetch_from(address, key_groups=range(2, 4), token=token).wait(SECONDS_MAX)
    Shaky.fails["write_meta"] = once(lambda meta: b'"given"' not in meta)
    kv.merge(memory)
    fill(kv, 2)
    kv.commit({"o": 2})
    kv._let_go()
    with sk.open("shaky:a") as kv:
        assert contents(kv) == dict.fromkeys(KEYS, 2)


class Logged(DiskHome):
    """After a failed write it shows the old rows; reopened, by flush(), the rows in its log."""

    places: ClassVar[dict[str, DiskHome]] = {}
    is_failing = False

    def __init__(self, is_atomic: bool) -> None:
        super().__init__(is_atomic)
        self.log: list[Any] = []

    def write_rows(
        self, rows: Named, cleared: Iterable[tuple[int, int]] = (), durable: bool = False
    ) -> None:
        if durable and self.is_failing:
            self.log.append((rows, [*cleared]))
            raise HomeError("fsync fails, as the test wants.")
        self._replay()
        super().write_rows(rows, cleared, durable)

    def clear_leaves(self, leaves: range, states: int) -> None:
        self._replay()
        super().clear_leaves(leaves, states)

    def flush(self) -> None:
        self._replay()
        super().flush()

    def _replay(self) -> None:
        for rows, cleared in self.log:
            super().write_rows(rows, cleared)
        self.log.clear()


register_home("logged", Logged.open)


def test_a_commit_that_failed_and_is_in_the_log_counts_before_it_is_rolled_back() -> None:
    """As with RocksDB: a batch whose fsync failed cannot be seen, until the home is reopened."""
    kv = sk.open("logged:a?atomic=1", **FEW)
    home = kv._residence.home
    assert isinstance(home, Logged)
    fill(kv, 1)
    kv.commit({"o": 1})
    fill(kv, 2)
    home.is_failing = True
    with pytest.raises(HomeError, match="fsync fails"):
        kv.commit({"o": 2})
    home.is_failing = False
    kv.rollback()
    assert (kv.committed, set(contents(kv).values())) == ({"o": 2}, {2})
    kv._let_go()
    with sk.open("logged:a") as kv:
        assert (kv.committed, set(contents(kv).values())) == ({"o": 2}, {2})


def test_a_home_whose_committed_rows_are_still_pending_is_not_empty(tmp_path: Path) -> None:
    source = sk.open("memory:", **FEW)
    fill(source, -1)
    source.checkpoint(tmp_path / "ck")
    source.close()
    kv = sk.open("shaky:a?atomic=0", **FEW)
    fill(kv, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ledger_module.Ledger, "_move", lambda *_: (_ for _ in ()).throw(HomeError(""))
        )
        kv.commit({"o": 1})  # the commit is made, though its rows are not in place yet
    kv._let_go()
    with pytest.raises(ArgumentError, match="is not empty"):
        sk.restore(tmp_path / "ck", home="shaky:a")
    with sk.open("shaky:a") as kv:
        assert contents(kv) == dict.fromkeys(KEYS, 1)
        assert kv.committed == {"o": 1}


@pytest.mark.parametrize("times", [1, 2])
def test_an_arrival_of_which_the_end_is_not_known_is_void(times: int) -> None:
    """Its record is written but the answer is lost; then writing that it is void fails, too."""
    a = sk.open("shaky:a?atomic=1", owned=range(2), **FEW)
    b = sk.open("shaky:b?atomic=1", owned=range(2, 4), **FEW)
    for kv in (a, b):
        fill(kv, 1)
        kv.commit({"o": 1})
    failures = [1] * times
    Shaky.fails["write_rows"] = lambda rows, durable: bool(
        durable and rows and b'"void"' not in (rows[1] or b"") and failures and failures.pop()
    )
    with pytest.raises(HomeError):
        a.merge(b)
    Shaky.fails.clear()
    fill(b, 2)
    a.commit({"o": 2})
    a._let_go()
    b.close()
    with sk.open("shaky:a") as a, sk.open("shaky:b") as b:
        assert not contents(a).keys() & contents(b).keys()
        assert set(contents(b).values()) == {2}


def test_timers_that_could_not_be_loaded_after_a_rollback_fire_all_the_same() -> None:
    kv = sk.open("shaky:a?atomic=1", **FEW)
    timers, counts = kv.timers("t"), kv.value("c", int, default=0)
    for key in KEYS:
        timers.set(key, 10)
    counts["0"] = 1
    kv.commit({"o": 1})
    counts["0"] = 2
    Shaky.fails["load"] = once()
    with pytest.raises(HomeError):
        kv.rollback()
    assert counts["0"] == 1
    assert timers.next_due == 10
    assert len(timers.pop_due(10)) == len(KEYS)
    kv.close()


def test_a_rollback_waits_for_a_fold_that_has_read_what_it_undoes() -> None:
    kv = sk.open("shaky:a?atomic=1", **FEW)
    inside, go = threading.Event(), threading.Event()
    is_slow = False

    def plus(one: int, other: int) -> int:
        if is_slow:
            inside.set()
            go.wait(SECONDS_MAX)
        return one + other

    totals = kv.reduce("r", int, plus)
    totals.add("k", 1)
    kv.commit({"o": 1})
    totals.add("k", 100)
    is_slow = True
    adding = threading.Thread(target=totals.add, args=("k", 1000))
    adding.start()
    assert inside.wait(SECONDS_MAX)
    rolling = threading.Thread(target=kv.rollback)
    rolling.start()
    go.set()
    adding.join()
    rolling.join()
    assert totals.get("k") == 1
    kv.close()


def test_merge_does_not_overwrite_what_the_home_has_of_key_groups_it_was_not_opened_with() -> None:
    with sk.open("shaky:a?atomic=1", **FEW) as kv:
        fill(kv, 1)
    memory = sk.open("memory:", owned=range(2, 4), **FEW)
    memory.value("c", int, default=0)
    with sk.open("shaky:a", owned=range(2)) as kv:
        with pytest.raises(OccupiedError, match="has entries of key-group"):
            kv.merge(memory)
        assert memory.key_groups == (range(2, 4),)
    with sk.open("shaky:a") as kv:
        assert contents(kv) == dict.fromkeys(KEYS, 1)


def test_filters_leave_room_for_entries(tmp_path: Path) -> None:
    kv = sk.open(f"rocksdb:{tmp_path}/db?sync=0&memory=256KiB", **FEW)
    texts = kv.value("t", str)
    for at in range(0, 40_000, 1000):
        texts.update({f"x{i}": "v" for i in range(at, at + 1000)})
    kv.commit()
    for i in range(10_000):
        assert texts.get(f"new{i}") is None
    for i in range(100):
        texts[f"y{i}"] = "value"
    kv.close()


def test_what_a_home_has_said_is_not_installed_after_room_was_made(tmp_path: Path) -> None:
    """Another thread's change may have gone home and left memory in between."""
    kv = sk.open(f"rocksdb:{tmp_path}/db?sync=0&memory=64KiB", key_groups=1, subgroups=1)
    texts = kv.value("t", str)
    for i in range(2000):
        texts[f"x{i}"] = "v" * 50
    kv.commit()
    residence = kv._residence
    make_room = residence._make_room_to_read
    changed: list[str] = []

    def change_first(limit: Any) -> None:
        if not changed:
            changed.append(asked)
            residence.store.limit(0)  # otherwise it would have to wait for us
            writer = threading.Thread(target=texts.__setitem__, args=(asked, "written"))
            writer.start()
            writer.join(SECONDS_MAX)
            residence._limit()
            residence._write_back(1 << 62, cold=False)
            residence._evict(1 << 30)
        make_room(limit)

    residence._make_room_to_read = change_first  # type: ignore[method-assign]
    for i in range(2000):
        asked = f"x{i}"
        if texts[asked] != "v" * 50:
            break
    assert changed == [asked]
    assert texts[asked] == "written"
    kv.close()


# ---- Redis


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as one:
        yield one


def test_the_commits_of_key_groups_that_come_from_another_worker_are_superseded(
    server: RedisServer,
) -> None:
    url = f"redis://{HOST}:{server.port}/0?prefix=workers"
    a, b = (sk.open(url, owned=owned, **FEW) for owned in (range(2), range(2, 4)))
    for kv in (a, b):
        fill(kv, 1)
    a.commit({"o": 1})
    for at in range(5):
        b.commit({"o": at})
    memory = sk.open("memory:", owned=(), **FEW)
    memory.merge(b)
    b.close()
    a.merge(memory)
    fill(a, 2)
    a.commit({"o": 9})
    a._let_go()
    with sk.open(url, owned=range(2, 4)) as kv:
        assert kv.committed == {"o": 9}


def test_rows_that_another_worker_has_by_now_are_not_dropped(server: RedisServer) -> None:
    url = f"redis://{HOST}:{server.port}/0?prefix=dropping"
    a, b = (sk.open(url, owned=owned, **FEW) for owned in (range(2), range(2, 4)))
    for kv in (a, b):
        fill(kv, 1)
        kv.commit({"o": 1})
    memory = sk.open("memory:", owned=(), **FEW)
    home = b._residence.home
    assert home is not None

    def fail(*_: Any) -> None:
        raise HomeError("away for a moment, as the test wants.")

    home.clear_leaves = fail  # type: ignore[method-assign]
    memory.merge(b)
    del home.clear_leaves
    a.merge(memory)
    a.commit({"o": 2})
    b.close()
    a._let_go()
    with sk.open(url) as kv:
        assert contents(kv) == dict.fromkeys(KEYS, 1)


def test_a_scan_begins_again_if_the_server_was_started_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_module, "_SCAN_ROWS_MAX", 100)
    runs = iter(["1"] * 5 + ["2"] * 1000)
    with redis_server(tmp_path) as server:
        kv = sk.open(f"redis://{HOST}:{server.port}/0", key_groups=1, subgroups=1)
        counts = kv.value("c", int)
        counts.update({f"k{i}": i for i in range(3000)})
        kv.flush()
        kv.rollback()  # out of memory
        run_of = redis_module._run_of
        asked = []

        def another(client: Any, name: str) -> str:
            asked.append(run_of(client, name))
            return next(runs)

        monkeypatch.setattr(redis_module, "_run_of", another)
        scan, cursors = redis_module._scan, []

        def noted(name: str, cursor: int, count: int) -> Any:
            cursors.append(cursor)
            return scan(name, cursor, count)

        monkeypatch.setattr(redis_module, "_scan", noted)
        home = kv._residence.home
        assert home is not None
        found = [key for key, _ in home.load(0, 0)]
        assert len(set(asked)) == 1
        assert asked[0]
        assert next(runs) == "2"
        assert cursors.count(0) == 3  # scans begun: first, for the known server, for the new one
        assert sorted(found) == sorted(f"k{i}".encode() for i in range(3000))
        kv.close()


class SlowNetwork:
    """Stands between a client and a server: what old connections send may arrive late."""

    def __init__(self, port: int) -> None:
        self._server = (HOST, port)
        self._listening = socket.create_server((HOST, 0))
        self.port: int = self._listening.getsockname()[1]
        self._open: list[socket.socket] = []
        self._are_held: list[threading.Event] = []  # by connection: set if it passes
        self._upward: list[threading.Thread] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            server = socket.create_connection(self._server)
            passes = threading.Event()
            passes.set()
            self._open += (client, server)
            self._are_held.append(passes)
            up = threading.Thread(target=_pump, args=(client, server, passes), daemon=True)
            self._upward.append(up)
            up.start()
            threading.Thread(target=_pump, args=(server, client, None), daemon=True).start()

    def hold(self) -> None:
        """From now on, what is sent to the server on present connections is held, not lost."""
        for passes in self._are_held:
            passes.clear()

    def release(self) -> None:
        """What was held arrives."""
        for passes, up in zip(self._are_held, self._upward, strict=True):
            if not passes.is_set():
                passes.set()
                up.join(SECONDS_MAX)

    def close(self) -> None:
        self._listening.close()
        for one in self._open:
            one.close()


def _pump(source: socket.socket, target: socket.socket, passes: threading.Event | None) -> None:
    while True:
        try:
            data = source.recv(1 << 16)
        except OSError:
            data = b""
        if passes is not None:
            passes.wait()
        try:
            if not data:
                target.shutdown(socket.SHUT_WR)
                return
            target.sendall(data)
        except OSError:
            return


def test_a_commit_that_was_given_up_does_not_come_later(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_module, "_ANSWER_SECONDS_MAX", 1.0)
    network = SlowNetwork(server.port)
    kv = sk.open(f"redis://{HOST}:{network.port}/0?prefix=late", **FEW)
    counts = kv.value("c", int, default=0)
    counts["a"] = 1
    kv.commit({"o": 1})
    counts["a"] = 2
    network.hold()
    with pytest.raises(HomeError):
        kv.commit({"o": 2})
    kv.rollback()
    assert (kv.committed, counts["a"]) == ({"o": 1}, 1)
    counts["a"] = 11
    kv.commit({"o": 3})
    network.release()
    kv._let_go()
    network.close()
    with sk.open(f"redis://{HOST}:{server.port}/0?prefix=late") as kv:
        assert (kv.committed, contents(kv)) == ({"o": 3}, {"a": 11})
