"""A home remembers who owns what: key-groups that were handed over do not come back by themselves.

The old owner has a home (RocksDB, Redis), the new owner is in memory. A crash is a copy of the
home's directory as it is at that moment, or a real kill -9. The oracle is a dict of what was
flushed.
"""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from remote_util import wait_until
from servers import redis_server

import statekit as sk
from statekit.errors import (
    ArgumentError,
    HomeError,
    NotOwnedError,
    PeerLostError,
)
from statekit.homes import Home
from statekit.homes.record import HomeRecord
from statekit.migration import report as report_module

pytest.importorskip("rocksdict")

GROUPS, SUBGROUPS = 8, 2
LOW, HIGH = range(4), range(4, 8)
KEYS = [f"key-{i}" for i in range(200)]
ALL = {key: i for i, key in enumerate(KEYS)}
SECONDS_MAX = 60.0


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class RocksHome:
    """A home in a directory, and its copies."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers = count(1)
        self.path = directory / "home"

    @property
    def url(self) -> str:
        return f"rocksdb:{self.path}?memory=4MiB"

    def crashed(self) -> str:
        """The URL of the home that a process leaves behind if it dies now."""
        copy = self._directory / f"copy-{next(self._numbers)}"
        shutil.copytree(self.path, copy)
        return f"rocksdb:{copy}?memory=4MiB"


@pytest.fixture
def home(tmp_path: Path) -> RocksHome:
    return RocksHome(tmp_path)


def opened(stack: ExitStack, url: str = "memory:", **options: Any) -> sk.KVProvider:
    options = {"key_groups": GROUPS, "subgroups": SUBGROUPS} | options
    return stack.enter_context(sk.open(url, **options))


def filled(stack: ExitStack, url: str) -> sk.KVProvider:
    kv = opened(stack, url)
    kv.value("n", int).put_many(KEYS, range(len(KEYS)))
    kv.flush()
    return kv


def content(kv: sk.KVProvider) -> dict[str, int]:
    return dict(kv.value("n", int).items())


def of_groups(kv: sk.KVProvider, groups: Any) -> dict[str, int]:
    return {key: value for key, value in ALL.items() if kv.key_group_of(key) in {*groups}}


def record_of(kv: sk.KVProvider) -> HomeRecord:
    home = kv._residence.home
    assert home is not None
    data = home.read_meta()
    assert data is not None
    return HomeRecord.decode(data, "")


def wait_freed(kv: sk.KVProvider) -> None:
    """Waits until the old owner has forgotten what others have."""
    wait_until(lambda: not kv._residence.shut_leaves, SECONDS_MAX)


def test_a_state_may_be_declared_with_another_type_between_two_hand_overs(
    stack: ExitStack, home: RocksHome
) -> None:
    filled(stack, home.url).close()
    a, b, c = opened(stack, home.url), opened(stack, owned=()), opened(stack, owned=())
    address = a.serve().address
    b.fetch_from(address, key_groups=[0]).wait(SECONDS_MAX)
    assert dict(b.value("n", int).items()) == of_groups(b, [0])
    floats, expected = a.value("n", float), of_groups(a, [1])
    changed = {key: value + 0.5 for key, value in [*expected.items()][::2]}
    floats.update(changed)
    c.fetch_from(address, key_groups=[1]).wait(SECONDS_MAX)
    assert dict(c.value("n", float).items()) == expected | changed


def test_timers_that_nobody_declared_here_are_not_late_there(
    stack: ExitStack, home: RocksHome
) -> None:
    with ExitStack() as inner:
        due = opened(inner, home.url).timers("due")
        for at in range(100):
            due.set(f"k{at}", at)
    a, b = opened(stack, home.url), opened(stack, owned=())
    b.fetch_from(a.serve().address, strategy="on_demand")
    assert b.timers("due").next_due == 0
    assert [at for at, _ in b.timers("due").pop_due(99)] == [*range(100)]


# ---- What is handed over stays handed over


def test_what_is_handed_over_is_not_there_after_a_crash(stack: ExitStack, home: RocksHome) -> None:
    a, b = filled(stack, home.url), opened(stack, owned=())
    b.fetch_from(a.serve().address, key_groups=HIGH, strategy="on_demand")
    b.value("n", int).put_many([*of_groups(b, HIGH)], [-1] * len(of_groups(b, HIGH)))
    with sk.open(home.crashed()) as again:
        assert again.key_groups == (LOW,)
        assert content(again) == of_groups(again, LOW)
        with pytest.raises(NotOwnedError):
            again.value("n", int)[next(iter(of_groups(again, HIGH)))]


def test_it_is_durable_before_the_new_owner_may_use_anything(
    stack: ExitStack, home: RocksHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = filled(stack, home.url), opened(stack, owned=())
    found: list[tuple[range, ...]] = []
    begin = type(a._as_peer()).begin

    def looking(peer: Any, call: Any) -> Any:
        reply = begin(peer, call)
        with sk.open(home.crashed()) as dead:  # killed just before it gives its answer
            found.append(dead.key_groups)
        return reply

    monkeypatch.setattr(type(a._as_peer()), "begin", looking)
    b.fetch_from(a.serve().address, key_groups=HIGH)
    assert found == [(LOW,)]


@pytest.mark.parametrize("when", ["begun", "done"])
def test_it_is_one_write_for_all_leaves(
    stack: ExitStack, home: RocksHome, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    a, b = filled(stack, home.url), opened(stack, owned=())
    writes: list[bytes] = []
    kept = a._residence.home
    assert kept is not None
    write = kept.write_meta

    def counting(meta: bytes, expected: bytes | None) -> bool:
        writes.append(meta)
        return write(meta, expected)

    monkeypatch.setattr(kept, "write_meta", counting)
    migration = b.fetch_from(a.serve().address, strategy="on_demand")
    assert len(writes) == 1
    if when == "done":
        migration.wait(SECONDS_MAX)
        wait_freed(a)
        assert len(writes) <= 1 + GROUPS  # rows are deleted some key-groups at a time


_OLD_OWNER = """
import sys
import statekit as sk
kv = sk.open(sys.argv[1], key_groups=8, subgroups=2)
kv.value("n", int).put_many([f"key-{i}" for i in range(200)], range(200))
kv.flush()
kv.value("n", int).put_many([f"key-{i}" for i in range(200)], [-1] * 200)
print(kv.serve().address, flush=True)
sys.stdin.read()
"""


def test_an_old_owner_that_is_killed_after_the_hand_over_owns_nothing(
    stack: ExitStack, home: RocksHome
) -> None:
    process = stack.enter_context(
        subprocess.Popen(
            [sys.executable, "-c", _OLD_OWNER, home.url],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
    )  # fmt: skip
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    b = opened(stack, owned=())
    b.fetch_from(address).wait(SECONDS_MAX)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with sk.open(home.url) as again:
        assert again.key_groups == ()
    with pytest.raises(NotOwnedError, match=r"key-groups 0-7 .*reclaim=True"):
        sk.open(home.url, owned=range(8))
    # It may have deleted some of it by then, or nothing yet. But it never claims to own it.
    with ExitStack() as inner:
        inner.enter_context(suppress(NotOwnedError))
        assert content(inner.enter_context(sk.open(home.url, reclaim=True))) == ALL
    assert set(b.value("n", int).get_many(KEYS)) == {-1}


def test_key_groups_that_were_handed_over_cannot_be_asked_for(
    stack: ExitStack, home: RocksHome, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as inner:
        a = filled(inner, home.url)
        b = opened(stack, owned=())
        b.fetch_from(a.serve().address, key_groups=HIGH).wait(SECONDS_MAX)
    for asked in (range(8), [3, 4], [7]):
        with pytest.raises(NotOwnedError, match=r"handed over to another process.*fetch_from\(\)"):
            sk.open(home.url, owned=asked)
    caplog.clear()
    with sk.open(home.url, owned=[0, 3]) as some:
        assert some.key_groups == (range(1), range(3, 4))
        assert caplog.records == []
    with sk.open(home.url) as rest:
        assert rest.key_groups == (LOW,)
        assert content(rest) == of_groups(rest, LOW)
        assert "4-7" in caplog.records[-1].getMessage()
        assert "reclaim=True" in caplog.records[-1].getMessage()


def test_siblings_share_what_the_home_says(stack: ExitStack, home: RocksHome) -> None:
    a = filled(stack, home.url)
    (sibling,) = a.split([HIGH])
    stack.enter_context(sibling)
    c = opened(stack, owned=())
    c.fetch_from(sibling.serve().address, key_groups=[4, 5], strategy="on_demand")
    c.fetch_from(a.serve().address, key_groups=[0], strategy="on_demand")
    with sk.open(home.crashed()) as again:
        assert again.key_groups == (range(1, 4), range(6, 8))
        assert content(again) == of_groups(again, [1, 2, 3, 6, 7])


def test_a_home_without_states_remembers_it_too(stack: ExitStack, home: RocksHome) -> None:
    a, b = opened(stack, home.url), opened(stack, owned=())
    b.fetch_from(a.serve().address, key_groups=HIGH).wait(SECONDS_MAX)
    with sk.open(home.crashed()) as again:
        assert again.key_groups == (LOW,)
        assert (again.key_group_count, again.subgroups) == (GROUPS, SUBGROUPS)


def test_records_of_earlier_versions_are_read(stack: ExitStack, home: RocksHome) -> None:
    with ExitStack() as inner:
        a = filled(inner, home.url)
        kept = a._residence.home
        assert kept is not None
        described = json.loads(kept.read_meta() or b"")
    assert not {"given", "deleted", "leases"} & described.keys()  # the record is as it used to be
    with sk.open(home.url) as again:
        assert content(again) == ALL


# ---- What comes back


def given_back(stack: ExitStack, a: sk.KVProvider, address: str) -> None:
    b = opened(stack, owned=())
    assert b.fetch_from(address, key_groups=HIGH, strategy="on_demand").give_back() == (HIGH,)


def closed(stack: ExitStack, a: sk.KVProvider, address: str) -> None:
    b = opened(stack, owned=())
    b.fetch_from(address, key_groups=HIGH, strategy="on_demand")
    b.close()


def aborted(stack: ExitStack, a: sk.KVProvider, address: str) -> None:
    b = opened(stack, owned=())
    b.fetch_from(address, key_groups=HIGH, strategy="on_demand")
    a.migrations[0].abort()  # type: ignore[union-attr]


def declared_dead(stack: ExitStack, a: sk.KVProvider, address: str) -> None:
    b = opened(stack, owned=())
    b.fetch_from(address, key_groups=HIGH, strategy="on_demand")
    a.migrations[0].abort(target_is_dead=True)  # type: ignore[union-attr]


def merged(stack: ExitStack, a: sk.KVProvider, address: str) -> None:
    b = opened(stack, owned=())
    b.fetch_from(address, key_groups=HIGH).wait(SECONDS_MAX)
    wait_freed(a)
    a.merge(b)


def merged_at_once(stack: ExitStack, a: sk.KVProvider, address: str) -> None:
    b = opened(stack, owned=())
    b.fetch_from(address, key_groups=HIGH).wait(SECONDS_MAX)
    a.merge(b)


def merged_by_a_third(stack: ExitStack, a: sk.KVProvider, address: str) -> None:
    b, c = opened(stack, owned=()), opened(stack, owned=())
    b.fetch_from(address, key_groups=HIGH).wait(SECONDS_MAX)
    c.fetch_from(b.serve().address).wait(SECONDS_MAX)
    a.merge(c)


WAYS_BACK = [
    given_back, closed, aborted, declared_dead, merged, merged_at_once, merged_by_a_third
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS_BACK, ids=lambda way: way.__name__)
def test_what_has_come_back_is_there_after_a_crash(
    stack: ExitStack, home: RocksHome, way: Callable[..., None]
) -> None:
    a = filled(stack, home.url)
    way(stack, a, a.serve().address)
    assert a.key_groups == (range(8),)
    a.flush()
    with sk.open(home.crashed()) as again:
        assert again.key_groups == (range(8),)
        assert content(again) == ALL
    assert content(a) == ALL


@pytest.mark.parametrize("way", WAYS_BACK, ids=lambda way: way.__name__)
def test_the_home_says_so_before_what_is_back_can_be_used(
    stack: ExitStack, home: RocksHome, way: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever the provider owns a key-group, the record does not say that another owns it."""
    a = filled(stack, home.url)
    checked: list[tuple[range, ...]] = []
    take_over = sk.KVProvider._take_over

    def looking(kv: sk.KVProvider, part: tuple[range, ...]) -> None:
        if kv is a:
            given = {group for one in record_of(a).given for group in one}
            assert given.isdisjoint(group for one in part for group in one)
            checked.append(part)
        take_over(kv, part)

    monkeypatch.setattr(sk.KVProvider, "_take_over", looking)
    way(stack, a, a.serve().address)
    wait_until(lambda: a.key_groups == (range(8),), SECONDS_MAX)
    assert checked == [(HIGH,)]


def test_epochs_of_leases_survive_a_restart(stack: ExitStack, home: RocksHome) -> None:
    """Otherwise a former peer would mistake the next offers for old ones, one after the other."""
    b = opened(stack, owned=())
    with ExitStack() as inner:
        a = filled(inner, home.url)
        here = a.serve().address
        there = b.serve().address
        for _ in range(4):
            b.fetch_from(here, key_groups=HIGH).wait(SECONDS_MAX)
            with opened(stack, owned=()) as c:
                c.fetch_from(there).wait(SECONDS_MAX)
                a.merge(c)
    for _ in range(2):  # and not only the first
        with sk.open(home.url) as again:
            address = again.serve().address
            b.fetch_from(address, key_groups=HIGH).wait(SECONDS_MAX)
            with opened(stack, owned=()) as c:
                c.fetch_from(there).wait(SECONDS_MAX)
                again.merge(c)
    with sk.open(home.url) as again:
        assert content(again) == ALL


def test_epochs_survive_with_siblings_and_without_a_hand_over_in_between(
    stack: ExitStack, home: RocksHome
) -> None:
    b = opened(stack, owned=())
    with ExitStack() as inner:
        a = filled(inner, home.url)
        for _ in range(2):
            b.fetch_from(a.serve().address, key_groups=HIGH).wait(SECONDS_MAX)
            a._as_peer()._server.close()  # type: ignore[union-attr]
            a.merge(b)
    with sk.open(home.url):  # a provider that does nothing about it
        pass
    with sk.open(home.url) as again:
        (sibling,) = again.split([HIGH])
        with sibling:
            b.fetch_from(sibling.serve().address).wait(SECONDS_MAX)
    assert content(b) == of_groups(b, HIGH)


# ---- Reclaiming


def test_what_was_handed_over_is_taken_back_as_it_was_at_the_last_flush(
    stack: ExitStack, home: RocksHome
) -> None:
    a, b = filled(stack, home.url), opened(stack, owned=())
    a.value("n", int).put_many(KEYS, [-1] * len(KEYS))  # these are not flushed
    b.fetch_from(a.serve().address, key_groups=HIGH, strategy="on_demand")
    left = home.crashed()
    with sk.open(left, reclaim=True) as again:
        assert again.key_groups == (range(8),)
        assert content(again) == ALL
    with sk.open(left) as again:  # once is enough
        assert again.key_groups == (range(8),)
        assert content(again) == ALL


def test_some_of_it_can_be_taken_back(stack: ExitStack, home: RocksHome) -> None:
    a, b = filled(stack, home.url), opened(stack, owned=())
    b.fetch_from(a.serve().address, key_groups=HIGH, strategy="on_demand")
    left = home.crashed()
    with sk.open(left, owned=[0, 5], reclaim=True) as some:
        assert content(some) == of_groups(some, [0, 5])
    with sk.open(left) as again:
        assert again.key_groups == (LOW, range(5, 6))
        assert content(again) == of_groups(again, [*LOW, 5])


def test_what_was_deleted_is_not_taken_back_but_can_be_restored(
    stack: ExitStack, home: RocksHome, tmp_path: Path
) -> None:
    b = opened(stack, owned=())
    with ExitStack() as inner:
        a = filled(inner, home.url)
        a.checkpoint(tmp_path / "checkpoint")
        address = a.serve().address
        gone = b.fetch_from(address, key_groups=[4, 5])
        gone.wait(SECONDS_MAX)
        wait_freed(a)
        a.flush()
        b.fetch_from(address, key_groups=[6], strategy="on_demand")
        left = home.crashed()
    with pytest.raises(NotOwnedError, match=r"key-groups 4-5 .*[Rr]estore.* 6 can"):
        sk.open(left, reclaim=True)
    with sk.open(left, owned=[0, 6], reclaim=True) as some:
        assert content(some) == of_groups(some, [0, 6])
    with pytest.raises(NotOwnedError, match="key-groups 4-5 "):
        sk.open(left, owned=[4, 5], reclaim=True)
    with sk.restore(tmp_path / "checkpoint", home=left, key_groups=[4, 5]) as restored:
        assert content(restored) == of_groups(restored, [4, 5])
    with sk.open(left) as again:
        assert again.key_groups == (range(8),)
        assert content(again) == ALL


def test_rows_are_deleted_only_after_the_home_says_so(
    stack: ExitStack, home: RocksHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = filled(stack, home.url), opened(stack, owned=())
    kept = a._residence.home
    assert kept is not None
    clear, cleared = kept.clear_leaves, []

    def looking(leaves: range, states: int) -> None:
        if leaves.start < 2**20:  # rows in place, not pending rows
            deleted = {group for part in record_of(a).deleted for group in part}
            assert {leaf // SUBGROUPS for leaf in leaves} <= deleted
            cleared.extend(leaves)
        clear(leaves, states)

    monkeypatch.setattr(kept, "clear_leaves", looking)
    b.fetch_from(a.serve().address, key_groups=HIGH).wait(SECONDS_MAX)
    wait_freed(a)
    a.flush()
    assert {leaf // SUBGROUPS for leaf in cleared} == {*HIGH}


def test_what_others_have_is_deleted_when_the_old_owner_closes(
    stack: ExitStack, home: RocksHome
) -> None:
    b = opened(stack, owned=())
    with ExitStack() as inner:
        a = filled(inner, home.url)
        peer = a._as_peer()
        with peer._idle:
            peer._streams += 1  # as if a stream were open: nothing is freed yet
        b.fetch_from(a.serve().address, key_groups=HIGH).wait(SECONDS_MAX)
        assert a._residence.shut_leaves
    with sk.open(home.url, owned=LOW) as again:
        kept = again._residence.home
        assert kept is not None
        rows = [row for leaf in range(8, 16) for row in kept.load(leaf, 0)]
        assert rows == []
        assert record_of(again).deleted == (HIGH,)


def test_reclaim_is_for_homes() -> None:
    with pytest.raises(ArgumentError, match="reclaim"):
        sk.open("memory:", reclaim=True)
    with pytest.raises(ArgumentError, match="reclaim"):
        sk.open("checkpoint:/nowhere", reclaim=True)


def test_a_home_of_which_nothing_was_handed_over_may_be_reclaimed(
    stack: ExitStack, home: RocksHome
) -> None:
    with filled(stack, home.url):
        pass
    with sk.open(home.url, reclaim=True) as again:
        assert content(again) == ALL


# ---- When the home fails


class Broken:
    """A home whose record cannot be written for a while, or cannot be forced to the disk."""

    def __init__(self, kept: Home, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_broken = False
        self.is_written = False  # True: the next record is written although the call fails
        write = kept.write_meta

        def failing(meta: bytes, expected: bytes | None) -> bool:
            if self.is_broken:
                if self.is_written:
                    self.is_written = False
                    write(meta, expected)
                raise HomeError("the disk is full")
            return write(meta, expected)

        monkeypatch.setattr(kept, "write_meta", failing)


def broken(kv: sk.KVProvider, monkeypatch: pytest.MonkeyPatch) -> Broken:
    assert kv._residence.home is not None
    return Broken(kv._residence.home, monkeypatch)


@pytest.mark.parametrize("is_written", [False, True])
def test_a_hand_over_that_the_home_cannot_record_does_not_begin(
    stack: ExitStack, home: RocksHome, monkeypatch: pytest.MonkeyPatch, is_written: bool
) -> None:
    a, b = filled(stack, home.url), opened(stack, owned=())
    disk = broken(a, monkeypatch)
    disk.is_written = is_written
    address = a.serve().address
    disk.is_broken = True
    with pytest.raises(HomeError, match="the disk is full"):
        b.fetch_from(address, key_groups=HIGH)
    assert a.key_groups == (range(8),)
    assert b.key_groups == ()
    assert a.migrations == ()
    numbers = a.value("n", int)
    numbers.add_many(KEYS, [1] * len(KEYS))
    numbers.add_many(KEYS, [-1] * len(KEYS))
    assert content(a) == ALL
    if is_written:
        with pytest.raises(HomeError, match="the disk is full"):
            a.flush()  # if reopened, the home would say that they belong to another
    disk.is_broken = False
    a.flush()
    with sk.open(home.crashed()) as again:
        assert content(again) == ALL
    b.fetch_from(address, key_groups=HIGH).wait(SECONDS_MAX)
    assert content(b) == of_groups(b, HIGH)


def test_what_is_given_back_stays_shut_until_the_home_says_that_it_is_back(
    stack: ExitStack, home: RocksHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_module, "RETRY_SECONDS", 0.01)
    a, b = filled(stack, home.url), opened(stack, owned=())
    disk = broken(a, monkeypatch)
    migration = b.fetch_from(a.serve().address, key_groups=HIGH, strategy="on_demand")
    disk.is_broken = True
    with pytest.raises(HomeError, match="the disk is full"):
        migration.give_back()
    assert a.key_groups == (LOW,)
    with pytest.raises(NotOwnedError):
        a.value("n", int)[next(iter(of_groups(a, HIGH)))]
    disk.is_broken = False  # the target says it again
    wait_until(lambda: a.key_groups == (range(8),), SECONDS_MAX)
    assert content(a) == ALL
    with sk.open(home.crashed()) as again:
        assert content(again) == ALL


def test_an_abort_that_the_home_cannot_record_can_be_repeated(
    stack: ExitStack, home: RocksHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = filled(stack, home.url), opened(stack, owned=())
    disk = broken(a, monkeypatch)
    b.fetch_from(a.serve().address, key_groups=HIGH, strategy="on_demand")
    (departure,) = a.migrations
    disk.is_broken = True
    with pytest.raises(HomeError):
        departure.abort()  # type: ignore[union-attr]
    assert a.key_groups == (LOW,)
    disk.is_broken = False
    departure.abort()  # type: ignore[union-attr]
    assert a.key_groups == (range(8),)
    assert content(a) == ALL
    assert departure.done


def test_a_merge_that_the_home_cannot_record_changes_nothing(
    stack: ExitStack, home: RocksHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = filled(stack, home.url), opened(stack, owned=())
    disk = broken(a, monkeypatch)
    b.fetch_from(a.serve().address, key_groups=HIGH).wait(SECONDS_MAX)
    peer = a._as_peer()
    with peer._idle:
        peer._streams += 1  # so that nothing is deleted yet, which would be recorded
    disk.is_broken = True
    with suppress(HomeError):
        a.merge(b)
    owners = [kv for kv in (a, b) if {*HIGH} <= {g for part in kv.key_groups for g in part}]
    assert len(owners) == 1
    assert {**content(a), **content(b)} == ALL
    disk.is_broken = False
    with peer._idle:
        peer._streams -= 1
    if owners == [b]:
        a.merge(b)
    a.flush()
    with sk.open(home.crashed()) as again:
        assert content(again) == ALL


# ---- Redis, which processes share


def test_what_is_handed_over_is_known_to_all_who_open_the_server(
    stack: ExitStack, tmp_path: Path
) -> None:
    server = stack.enter_context(redis_server(tmp_path))
    url = f"redis://127.0.0.1:{server.port}/0"
    a, b = filled(stack, url), opened(stack, owned=())
    b.fetch_from(a.serve().address, key_groups=HIGH, strategy="on_demand")
    with sk.open(url) as other:  # as another process
        assert other.key_groups == (LOW,)
    with pytest.raises(NotOwnedError, match="key-groups 4-7 "):
        sk.open(url, owned=HIGH)
    a.migrations[0].abort()  # type: ignore[union-attr]
    with sk.open(url) as other:
        assert other.key_groups == (range(8),)
        assert content(other) == ALL


def test_a_peer_that_cannot_be_reached_leaves_no_trace_in_the_home(
    stack: ExitStack, home: RocksHome
) -> None:
    b = opened(stack, owned=())
    with ExitStack() as inner:
        a = filled(inner, home.url)
        address = a.serve().address
    with pytest.raises(PeerLostError):
        b.fetch_from(address)
    with sk.open(home.url) as again:
        assert again.key_groups == (range(8),)
