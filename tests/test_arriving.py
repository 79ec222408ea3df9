"""Arriving: a provider with a home takes leaves over from another process, one by one.

The oracle is a dict of what was put in (change() and held() of test_restore.py). A crash of the new
owner is a copy of its home's directory, while the one that it is a copy of is cut off from the old
owner. tests/faults/test_arriving_kill.py kills real processes.
"""

import json
import logging
import random
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from commit_model import DiskHome
from interrupts import Run, each_point
from remote_util import wait_until
from servers import HOST, redis_server
from test_residence import DictHome
from test_residence import home as home  # a fixture
from test_restore import Image, change, copied, declare, held
from test_restore import home_url as home_url
from test_restore import server as server

import statekit as sk
from statekit.cli.sources import HomeSource
from statekit.errors import (
    ArgumentError,
    HomeError,
    LeaseError,
    NotOwnedError,
    OccupiedError,
)
from statekit.homes import ledger as ledger_module
from statekit.homes import register_home
from statekit.homes.record import HomeRecord
from statekit.migration import fetch as fetch_module
from statekit.migration import new_owner as new_owner_module
from statekit.migration.report import Reports
from statekit.migration.strategies import WHOLE as STRATEGIES
from statekit.provider import recording
from statekit.remote.channel import PeerChannel
from statekit.residence import fetch as residence_fetch
from statekit.residence import loading, moving_in, transfer

GROUPS, SUBGROUPS = 8, 4
LOW, HIGH = range(4), range(4, 8)
SECONDS_MAX = 120.0
_numbers = count(1)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def opened(stack: ExitStack, url: str = "memory:", **options: Any) -> sk.KVProvider:
    options = {"key_groups": GROUPS, "subgroups": SUBGROUPS} | options
    return stack.enter_context(sk.open(url, **options))


class Old:
    """A provider in memory with states of several kinds, and a dict that has the same."""

    def __init__(self, stack: ExitStack, seed: int = 1, url: str = "memory:") -> None:
        self.kv = opened(stack, url)
        self.rng = random.Random(seed)
        self.image: Image = {"counts": {}, "texts": {}, "logs": {}, "due": {}}
        states = declare(self.kv)
        for _ in range(1500):
            change(self.rng, states, self.image)
        self.address = self.kv.serve().address

    def within(self, groups: Any, image: Image | None = None) -> Image:
        group_of, wanted = self.kv.key_group_of, {*groups}
        return {
            name: {key: value for key, value in entries.items() if group_of(key) in wanted}
            for name, entries in (image or self.image).items()
        }


@pytest.fixture
def old(stack: ExitStack) -> Old:
    return Old(stack)


def coming(kv: sk.KVProvider) -> int:
    """How many leaves are still coming."""
    assert kv._residence.ledger is not None
    return len(kv._residence.ledger.coming)


def record_of(kv: sk.KVProvider) -> HomeRecord:
    return HomeRecord.read(kv._residence.home)


def cut_off(kv: sk.KVProvider) -> None:
    """As if its process had ended: it says nothing more to anybody."""
    assert kv._peer is not None
    for arrival in kv._peer.arrivals:
        with arrival.lock:
            arrival.is_closed = True
            arrival.lock.notify_all()
        arrival.channel.close()


def crashed(kv: sk.KVProvider, path: Path) -> str:
    """The URL of the home that is left when the process ends now."""
    cut_off(kv)
    while True:
        copy = path.parent / f"copy-{next(_numbers)}"
        try:
            shutil.copytree(path, copy)
            break
        except shutil.Error:  # RocksDB has just deleted a file that it needs no more
            continue
    return f"rocksdb:{copy}?memory=64KiB"


def groups_of(kv: sk.KVProvider) -> set[int]:
    return {group for part in kv.key_groups for group in part}


# ---- Usable at once


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_state_is_exact_while_its_leaves_are_coming(
    stack: ExitStack, old: Old, home_url: str, strategy: Any
) -> None:
    kv = opened(stack, home_url, owned=())
    arrival = kv.fetch_from(old.address, strategy=strategy)
    states, image, committed = declare(kv), copied(old.image), copied(old.image)
    for at in range(400):
        change(old.rng, states, image)
        if at % 40 == 20:
            kv.commit({"at": at})
            committed = copied(image)
        if at % 100 == 70:
            kv.rollback()
            image = copied(committed)
    assert held(states) == image
    arrival.wait(SECONDS_MAX)
    assert kv.loading is None
    assert record_of(kv).arrivals == ()
    assert kv._residence.ledger is not None
    assert kv._residence.ledger.moved_in() == set()
    assert old.kv.key_groups == ()
    assert held(states) == image
    kv.close()
    with sk.open(home_url) as again:
        assert held(declare(again)) == image


def test_a_touch_moves_one_leaf_in_and_no_entry_by_itself(
    stack: ExitStack, old: Old, home_url: str
) -> None:
    texts = old.kv.value("texts", str)
    texts["large"] = old.image["texts"]["large"] = "x" * 500_000  # its leaf would be picked from
    near = next(
        f"n{at}" for at in count() if old.kv.key_group_of(f"n{at}") == old.kv.key_group_of("large")
    )
    texts[near] = old.image["texts"][near] = "y"
    kv = opened(stack, home_url, owned=())
    kv.fetch_from(old.address, strategy="on_demand")
    before = coming(kv)
    assert kv.absent([near]).tolist() == [0]
    assert kv.value("texts", str)[near] == "y"
    assert coming(kv) == before - 1
    assert kv.is_here([near])
    kv.prefetch([*old.image["texts"]][:20]).result(SECONDS_MAX)
    assert kv.is_here([*old.image["texts"]][:20])
    assert held(declare(kv)) == old.image


def test_timers_that_come_fire_in_time(stack: ExitStack, home_url: str) -> None:
    first = opened(stack)
    due = first.timers("due")
    for at in range(100):
        due.set(f"k{at}", at)
    first.value("n", int, key=int).put_many(range(300), range(300))
    kv = opened(stack, home_url, owned=())
    kv.fetch_from(first.serve().address, strategy="on_demand")
    assert [time for time, _ in kv.timers("due").pop_due(49)] == [*range(50)]
    kv.commit()
    kv.rollback()
    assert [time for time, _ in kv.timers("due").pop_due(99)] == [*range(50, 100)]


def test_a_rollback_leaves_timers_alone_that_are_being_handed_over(
    stack: ExitStack, home_url: str
) -> None:
    """They moved in, were not in memory yet, and went on."""
    first = opened(stack)
    due, image = first.timers("due"), {f"k{at}": at for at in range(100)}
    for key, at in image.items():
        due.set(key, at)
    kv, third = opened(stack, home_url, owned=()), opened(stack, owned=())
    kv.fetch_from(first.serve().address).wait(SECONDS_MAX)
    third.fetch_from(kv.serve().address, key_groups=HIGH, strategy="on_demand")
    kv.rollback()
    fired = [*kv.timers("due").pop_due(99), *third.timers("due").pop_due(99)]
    assert sorted(time for time, _ in fired) == [*range(100)]


@pytest.mark.parametrize("with_base", [False, True])
def test_a_state_may_be_of_another_type_here(
    stack: ExitStack, home_url: str, tmp_path: Path, with_base: bool
) -> None:
    first = opened(stack)
    numbers = first.value("n", int)
    image = {f"k{at}": at for at in range(500)}
    numbers.update(image)
    base = str(tmp_path / "base")
    first.checkpoint(base)
    numbers["k7"] = image["k7"] = 1000
    del numbers["k8"], image["k8"]
    kv = opened(stack, home_url, owned=())
    floats = kv.value("n", float)
    arrival = kv.fetch_from(first.serve().address, base=base if with_base else None)
    assert arrival.is_based == with_base
    floats["k9"] = image["k9"] = 0.5  # type: ignore[assignment]
    arrival.wait(SECONDS_MAX)
    assert dict(floats.items()) == image


def test_what_is_written_does_not_pass_the_budget(stack: ExitStack, home: DictHome) -> None:
    old = opened(stack)
    old.value("n", int, key=int).put_many(range(20_000), range(20_000))
    kv = opened(stack, "testdict:t?memory=64KiB", owned=())
    kv.fetch_from(old.serve().address)
    numbers = kv.value("n", int, key=int)
    for start in range(0, 20_000, 500):
        numbers.add_many(range(start, start + 500))
        assert kv._residence.store.bytes_used <= kv._residence._bytes_max
    assert dict(numbers.items()) == {at: at + 1 for at in range(20_000)}


# ---- Split, merged, handed on, checkpointed, in the middle of it


@pytest.mark.parametrize("strategy", ["prioritised", "on_demand"])
def test_checkpoints_have_what_is_coming(
    stack: ExitStack, old: Old, home_url: str, tmp_path: Path, strategy: Any
) -> None:
    kv = opened(stack, home_url, owned=())
    arrival = kv.fetch_from(old.address, strategy=strategy)
    states, image = declare(kv), copied(old.image)
    place = str(tmp_path / "place")
    taken = []
    for _ in range(3):  # the first is full, the others are incremental
        job = kv.checkpoint_async(place)
        taken.append(copied(image))
        for _ in range(60):
            change(old.rng, states, image)
        job.wait(SECONDS_MAX)
    arrival.wait(SECONDS_MAX)
    taken.append(copied(image))
    kv.checkpoint(place)
    for number, expected in enumerate(taken, 1):
        with sk.restore(place, at=number) as restored:
            assert held(declare(restored)) == expected


def test_what_is_coming_may_be_split_and_merged(stack: ExitStack, old: Old, home_url: str) -> None:
    kv = opened(stack, home_url, owned=())
    kv.fetch_from(old.address, strategy="on_demand")
    states = declare(kv)
    (part,) = kv.split([HIGH])
    stack.callback(part.close)
    assert held(declare(part)) == old.within(HIGH)
    assert held(states) == old.within(LOW)
    other = opened(stack, owned=())
    other.merge(part)
    assert held(declare(other)) == old.within(HIGH)
    kv.merge(other)
    assert held(states) == old.image


def test_timers_that_came_fire_at_who_has_them_after_a_split(
    stack: ExitStack, home_url: str
) -> None:
    first = opened(stack)
    due = first.timers("due")
    for at in range(100):
        due.set(f"k{at}", at)
    kv = opened(stack, home_url, owned=())
    kv.fetch_from(first.serve().address).wait(SECONDS_MAX)
    (part,) = kv.split([HIGH])
    stack.callback(part.close)
    fired = [*part.timers("due").pop_due(99), *kv.timers("due").pop_due(99)]
    assert sorted(time for time, _ in fired) == [*range(100)]


def test_what_a_sibling_gave_away_may_come_here(
    stack: ExitStack, old: Old, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sibling frees it while it is on its way here, and says at home that it is deleted."""
    pytest.importorskip("rocksdict")
    path = tmp_path / "home"
    kv = opened(stack, f"rocksdb:{path}?memory=64KiB", owned=())
    kv.fetch_from(old.address).wait(SECONDS_MAX)
    (part,) = kv.split([()])
    stack.callback(part.close)
    third = opened(stack, owned=())
    peer = kv._as_peer()
    with peer._idle:
        peer._streams += 1  # so that it frees later
    third.fetch_from(kv.serve().address, key_groups=HIGH).wait(SECONDS_MAX)
    arrival = part.fetch_from(third.serve().address, strategy="on_demand")
    with peer._idle:
        peer._streams -= 1
        peer._idle.notify_all()
    wait_until(lambda: not kv._residence.shut_leaves)
    arrival.wait(SECONDS_MAX)
    kv.flush()
    part.flush()
    assert held(declare(part)) == old.within(HIGH)
    with sk.open(crashed(part, path)) as again:
        assert held(declare(again)) == old.image


def test_siblings_fetch_each_from_another_process(
    stack: ExitStack, old: Old, home_url: str
) -> None:
    second = Old(stack, seed=2)
    kv = opened(stack, home_url, owned=())
    (part,) = kv.split([()])
    stack.callback(part.close)
    one = kv.fetch_from(old.address, key_groups=LOW, strategy="on_demand")
    two = part.fetch_from(second.address, key_groups=HIGH, strategy="on_demand")
    assert kv.value("counts", int, default=0, key=int)[3] in (0, old.image["counts"].get(3))
    two.wait(SECONDS_MAX)
    assert part.loading is None, "the sibling's leaves are not its own"
    assert kv.loading is not None
    assert held(declare(part)) == second.within(HIGH)
    assert held(declare(kv)) == old.within(LOW)
    one.wait(SECONDS_MAX)
    assert record_of(kv).arrivals == ()


@pytest.mark.parametrize("with_home", [False, True])
def test_what_has_come_may_be_handed_on_and_come_back(
    stack: ExitStack, old: Old, home_url: str, tmp_path: Path, with_home: bool
) -> None:
    pytest.importorskip("rocksdict")
    kv = opened(stack, home_url, owned=())
    url = f"rocksdb:{tmp_path}/third?memory=64KiB" if with_home else "memory:"
    third = opened(stack, url, owned=())
    kv.fetch_from(old.address, strategy="on_demand")
    address = kv.serve().address
    states, image = declare(kv), copied(old.image)
    for _ in range(100):
        change(old.rng, states, image)
    third.fetch_from(address, key_groups=HIGH)  # what had not come yet comes first
    theirs = declare(third)
    assert held(theirs) == old.within(HIGH, image)
    theirs["texts"]["mine"] = "new"
    back = kv.fetch_from(third.serve().address, key_groups=[third.key_group_of("mine")])
    assert states["texts"]["mine"] == "new"
    back.wait(SECONDS_MAX)
    kv.flush()
    third.merge(kv)
    image["texts"]["mine"] = "new"
    assert held(theirs) == image


def test_the_old_owner_may_begin(stack: ExitStack, old: Old, home_url: str) -> None:
    kv = opened(stack, home_url, owned=())
    departure = old.kv.migrate(kv.serve().address, key_groups=HIGH)
    departure.wait(SECONDS_MAX)
    assert held(declare(kv)) == old.within(HIGH)
    wait_until(lambda: record_of(kv).arrivals == ())


def test_a_restore_and_a_hand_over_may_fill_a_home_at_once(
    stack: ExitStack, old: Old, home_url: str, tmp_path: Path
) -> None:
    source = Old(stack, seed=3)
    place = str(tmp_path / "place")
    source.kv.checkpoint(place)
    kv = sk.restore(place, home=home_url, key_groups=LOW, lazy=True, background=False)
    stack.callback(kv.close)
    kv.fetch_from(old.address, key_groups=HIGH, strategy="on_demand")
    states = declare(kv)
    states["texts"]["both"] = "here"
    image = source.within(LOW)
    for name, entries in old.within(HIGH).items():
        image[name] |= entries
    image["texts"]["both"] = "here"
    kv.commit()
    kv.rollback()
    assert held(states) == image
    kv.wait_loaded(SECONDS_MAX)
    assert record_of(kv).sources == ()
    wait_until(lambda: record_of(kv).arrivals == ())
    kv.close()
    with sk.open(home_url) as again:
        assert held(declare(again)) == image


# ---- The old owner lets go only of what is safe


@pytest.mark.parametrize("atomic", [0, 1])
def test_a_leaf_is_durable_before_the_old_owner_forgets_it(
    stack: ExitStack, old: Old, monkeypatch: pytest.MonkeyPatch, atomic: int
) -> None:
    monkeypatch.setattr(DiskHome, "places", {})
    register_home("arrivingdisk", DiskHome.open)
    url = f"arrivingdisk:t?atomic={atomic}"
    kv = opened(stack, url, owned=())
    disk = DiskHome.places["t"]
    told: list[tuple[int, bool]] = []
    installed = PeerChannel.installed

    def watched(self: PeerChannel, call: Any, **options: Any) -> Any:
        with disk.lock:
            for leaf, _ in call.leases:
                told.append((leaf, ((1 << 31) - 1, 1, leaf.to_bytes(4)) in disk.safe))
        return installed(self, call, **options)

    monkeypatch.setattr(PeerChannel, "installed", watched)
    kv.fetch_from(old.address).wait(SECONDS_MAX)
    assert {leaf for leaf, _ in told} == {*range(GROUPS * SUBGROUPS)}
    assert all(is_safe for _, is_safe in told)
    disk.unsafe.clear()
    disk.rows = dict(disk.safe)  # the power is lost
    with sk.open(url) as again:
        assert held(declare(again)) == old.image
    kv._let_go()


def test_a_home_that_fails_for_a_while_is_tried_again(
    stack: ExitStack, old: Old, home: DictHome
) -> None:
    failed = threading.Event()
    kv = opened(stack, "testdict:t?memory=64KiB", owned=())

    def fail(call: str) -> bool:
        is_stream = threading.current_thread().name in ("statekit-arrival", "statekit-reports")
        if is_stream and call in ("write", "flush"):
            failed.set()
            return True
        return False

    home.fails = fail
    arrival = kv.fetch_from(old.address)
    assert failed.wait(SECONDS_MAX)
    states = declare(kv)
    assert states["counts"][3] == old.image["counts"].get(3, 0), "whoever touches a leaf has it"
    with pytest.raises(HomeError, match="fails, as the test wants"):
        arrival.wait(SECONDS_MAX)
    home.fails = lambda call: False
    wait_until(lambda: kv.loading is None)  # by itself
    assert held(states) == old.image
    assert old.kv.key_groups == ()


def test_a_touch_says_that_the_home_fails(stack: ExitStack, old: Old, home: DictHome) -> None:
    kv = opened(stack, "testdict:t?memory=64KiB", owned=())
    kv.fetch_from(old.address, strategy="on_demand")
    texts = kv.value("texts", str)
    home.fails = lambda call: call == "write"
    before = coming(kv)
    for _ in range(2):
        with pytest.raises(HomeError, match="write fails"):
            texts.get("t1")
    assert coming(kv) == before
    home.fails = lambda call: False
    assert held(declare(kv)) == old.image


def test_nothing_is_taken_over_if_the_home_cannot_be_told(
    stack: ExitStack, old: Old, home: DictHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = opened(stack, "testdict:t?memory=64KiB", owned=())
    for nth in range(1, 20):
        with monkeypatch.context() as patch:
            calls = count(1)
            write = home.write_meta

            def fail(*args: Any, calls: Any = calls, nth: int = nth, write: Any = write) -> bool:
                if next(calls) == nth:
                    raise HomeError("the record fails, as the test wants.")
                return bool(write(*args))

            patch.setattr(home, "write_meta", fail)
            try:
                kv.fetch_from(old.address, key_groups=HIGH, strategy="on_demand")
            except HomeError:
                assert kv.key_groups == ()
                continue
        break
    else:
        raise AssertionError("so many writes are not needed")
    assert nth == 4, "the states, what is asked for, what is offered"
    assert held(declare(kv)) == old.within(HIGH)
    assert old.kv.key_groups == (LOW,)


# ---- A crash of the new owner


def half_way(old: Old, kv: sk.KVProvider) -> Any:
    """A hand-over of which some key-groups are complete, one is not, and others have not begun."""
    arrival = kv.fetch_from(old.address, strategy="on_demand")
    kv._residence.load_leaves(range(2 * SUBGROUPS + 1))
    return arrival


@pytest.mark.parametrize("told", [False, True], ids=["nobody knows", "the old owner knows"])
@pytest.mark.parametrize("way", ["all", "none"])
def test_after_a_crash_it_goes_on(
    stack: ExitStack,
    old: Old,
    tmp_path: Path,
    told: bool,
    way: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("rocksdict")
    path = tmp_path / "home"
    first = opened(stack, f"rocksdb:{path}?memory=64KiB", owned=())
    if not told:
        monkeypatch.setattr(Reports, "report", lambda self: None)
    arrival = half_way(old, first)
    states, image = declare(first), copied(old.image)
    keys = [key for key in image["texts"] if old.kv.key_group_of(key) * SUBGROUPS < 2 * SUBGROUPS]
    for key in keys[::2]:
        states["texts"][key] = image["texts"][key] = "changed"
    first.commit({"at": 1})
    for key in keys:
        states["texts"][key] = "lost with the process"
    if told:
        wait_until(lambda: len(arrival.state.installed) == 0)
    else:
        assert len(arrival.state.installed) == 2 * SUBGROUPS + 1
    url = crashed(first, path)
    monkeypatch.undo()

    with caplog.at_level(logging.WARNING, "statekit"):
        kv = opened(stack, url) if way == "all" else opened(stack, url, owned=())
    if way == "all":
        assert groups_of(kv) == {0, 1}, "what is complete"
        assert "2-7" in caplog.text
        assert old.address in caplog.text
        assert kv.committed == {"at": 1}
        assert held(declare(kv)) == old.within([0, 1], image)
        with pytest.raises(NotOwnedError, match=r"2 of .* only in part.*fetch_from"):
            sk.open(crashed(first, path), owned=[2])
    fetched = old.kv._as_peer().departures[0].bytes_sent
    again = kv.fetch_from(old.address)
    assert groups_of(kv) == {*range(GROUPS)}
    assert held(declare(kv)) == image
    again.wait(SECONDS_MAX)
    assert old.kv.migrations == (), "the old owner knows that all of it is here"
    assert record_of(kv).arrivals == ()
    assert kv.committed == {"at": 1} or way == "all"
    assert fetched > 0
    kv.flush()
    kv.close()
    with sk.open(url) as last:
        assert held(declare(last)) == image


def test_it_may_crash_again_and_again(stack: ExitStack, old: Old, tmp_path: Path) -> None:
    pytest.importorskip("rocksdict")
    path = tmp_path / "home"
    url = f"rocksdb:{path}?memory=64KiB"
    owned: Any = ()
    for at in range(GROUPS * SUBGROUPS):
        with ExitStack() as inner:
            kv = opened(inner, url, owned=owned)
            kv.fetch_from(old.address, strategy="on_demand")
            assert coming(kv) == GROUPS * SUBGROUPS - at
            kv._residence.load_leaves([at])
            url = crashed(kv, path)
            path = Path(url.removeprefix("rocksdb:").partition("?")[0])
    with sk.open(url) as kv:
        assert held(declare(kv)) == old.image
        assert [one.held for one in record_of(kv).arrivals] == [(range(GROUPS),)]
        with pytest.raises(ArgumentError, match="no key-groups to fetch"):
            kv.fetch_from(old.address)  # it is told, though
        assert record_of(kv).arrivals == ()
    assert old.kv.migrations == ()


def test_a_question_that_was_never_answered_is_asked_again(
    stack: ExitStack, old: Old, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new owner ends after the old one has begun, and before it knows."""
    pytest.importorskip("rocksdict")
    path = tmp_path / "home"
    first = opened(stack, f"rocksdb:{path}?memory=64KiB", owned=())
    begin = PeerChannel.begin
    urls: list[str] = []

    def dies(self: PeerChannel, *args: Any, **options: Any) -> Any:
        begin(self, *args, **options)
        monkeypatch.undo()
        urls.append(crashed(first, path))
        raise KeyboardInterrupt

    monkeypatch.setattr(PeerChannel, "begin", dies)
    with pytest.raises(KeyboardInterrupt):
        first.fetch_from(old.address, key_groups=HIGH)
    assert old.kv.key_groups == (LOW,)
    first._peer._asked.clear()  # type: ignore[union-attr]  (its process is gone)
    kv = opened(stack, urls[0], owned=())
    kv.fetch_from(old.address, key_groups=HIGH)
    assert held(declare(kv)) == old.within(HIGH)


def test_what_was_given_back_is_not_taken_in_by_a_later_life(
    stack: ExitStack, old: Old, tmp_path: Path
) -> None:
    pytest.importorskip("rocksdict")
    path = tmp_path / "home"
    first = opened(stack, f"rocksdb:{path}?memory=64KiB", owned=())
    arrival = half_way(old, first)
    assert arrival.give_back() == (range(3, 8),)
    assert old.kv.key_groups == (range(3, 8),)
    old.kv.value("texts", str)["after"] = old.image["texts"]["after"] = "it came back"
    kv = opened(stack, crashed(first, path), owned=())
    kv.fetch_from(old.address, key_groups=[2]).wait(SECONDS_MAX)
    assert groups_of(kv) == {0, 1, 2}
    assert held(declare(kv)) == old.within([0, 1, 2])
    kv.fetch_from(old.address)
    assert held(declare(kv)) == old.image


def test_what_the_old_owner_took_back_is_its_own(
    stack: ExitStack, old: Old, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told that the new owner is dead, before it knew of any leaf: all is as it was."""
    pytest.importorskip("rocksdict")
    path = tmp_path / "home"
    first = opened(stack, f"rocksdb:{path}?memory=64KiB", owned=())
    monkeypatch.setattr(Reports, "report", lambda self: None)
    half_way(old, first)
    url, second_url = crashed(first, path), crashed(first, path)
    monkeypatch.undo()
    (departure,) = old.kv.migrations
    assert isinstance(departure, sk.Departure)
    departure.abort(target_is_dead=True)
    old.kv.value("texts", str)["after"] = old.image["texts"]["after"] = "it came back"
    kv = opened(stack, url, owned=())
    kv.fetch_from(old.address, key_groups=[2, 3]).wait(SECONDS_MAX)
    assert held(declare(kv)) == old.within([2, 3])
    assert groups_of(old.kv) == {0, 1, 4, 5, 6, 7}
    wrong = opened(stack, second_url)
    assert groups_of(wrong) == {0, 1}, "nobody has told it"
    with pytest.raises(LeaseError, match=r"0-1 back.*Both have them"):
        wrong.fetch_from(old.address)


def test_a_new_owner_that_is_wrongly_said_to_be_dead_gives_way(
    stack: ExitStack, old: Old, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lives, and its home must not have later what it has given up now."""
    pytest.importorskip("rocksdict")
    url = f"rocksdb:{tmp_path}/home?memory=64KiB"
    kv = opened(stack, url, owned=())
    report = Reports.report
    monkeypatch.setattr(Reports, "report", lambda self: None)
    arrival = half_way(old, kv)
    (departure,) = old.kv.migrations
    assert isinstance(departure, sk.Departure)
    departure.abort(target_is_dead=True)
    monkeypatch.setattr(Reports, "report", report)
    with arrival.lock:
        arrival.lock.notify_all()
    arrival.give_back()
    wait_until(lambda: kv.key_groups == ())
    assert held(declare(old.kv)) == old.image
    kv.close()
    with sk.open(url) as again:
        assert again.key_groups == ()
        again.fetch_from(old.address, key_groups=[0]).wait(SECONDS_MAX)
        assert held(declare(again)) == old.within([0])


def test_siblings_do_not_hand_over_to_each_other(stack: ExitStack, home_url: str) -> None:
    kv = opened(stack, home_url)
    kv.value("n", int)["a"] = 1
    (part,) = kv.split([HIGH])
    stack.callback(part.close)
    with pytest.raises(ArgumentError, match=r"the same home.*merge"):
        part.fetch_from(kv.serve().address)
    with pytest.raises(ArgumentError, match=r"the same home.*merge"):
        kv.migrate(part.serve().address, key_groups=LOW)
    assert kv.key_groups == (LOW,)
    assert part.key_groups == (HIGH,)


def test_what_will_never_be_complete_is_given_up(
    stack: ExitStack, old: Old, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rocksdict")
    place = str(tmp_path / "place")
    old.kv.checkpoint(place)
    path = tmp_path / "home"
    url = f"rocksdb:{path}?memory=64KiB"
    kv = opened(stack, url, owned=())
    arrival = half_way(old, kv)
    wait_until(lambda: len(arrival.state.installed) == 0)
    assert arrival.abandon() == (range(2, 8),)
    assert groups_of(kv) == {0, 1}
    assert held(declare(kv)) == old.within([0, 1])
    assert kv.loading is None
    with sk.open(crashed(kv, path)) as again:
        assert groups_of(again) == {0, 1}
    with sk.restore(place, key_groups=range(2, 8)) as rest:
        kv.merge(rest)
    assert held(declare(kv)) == old.image
    kv.close()
    with sk.open(url) as again:
        assert held(declare(again)) == old.image


def test_an_interrupted_hand_over_may_be_replaced_by_a_checkpoint(
    stack: ExitStack, old: Old, tmp_path: Path
) -> None:
    pytest.importorskip("rocksdict")
    place = str(tmp_path / "place")
    old.kv.checkpoint(place)
    path = tmp_path / "home"
    first = opened(stack, f"rocksdb:{path}?memory=64KiB", owned=())
    half_way(old, first)
    for lazy in (True, False):
        url = crashed(first, path)
        with pytest.raises(ArgumentError, match=r"on their way from another process .*replace"):
            sk.restore(place, home=url, key_groups=range(2, 8), lazy=lazy)
        with sk.restore(place, home=url, key_groups=range(2, 8), lazy=lazy, replace=True) as kv:
            assert held(declare(kv)) == old.within(range(2, 8))
        with sk.open(url) as kv:
            assert held(declare(kv)) == old.image


def test_rows_of_an_earlier_time_are_not_taken_for_what_came(
    stack: ExitStack, old: Old, tmp_path: Path
) -> None:
    """Leaves that had moved in went away, and are on their way back when the process ends."""
    pytest.importorskip("rocksdict")
    path = tmp_path / "home"
    kv = opened(stack, f"rocksdb:{path}?memory=64KiB", owned=())
    other = opened(stack, owned=())
    kv.fetch_from(old.address, key_groups=HIGH).wait(SECONDS_MAX)
    kv.commit({"at": 1})
    other.fetch_from(kv.serve().address).wait(SECONDS_MAX)
    texts = other.value("texts", str)
    key = next(f"n{at}" for at in count() if old.kv.key_group_of(f"n{at}") in HIGH)
    texts[key] = old.image["texts"][key] = "at the other"
    there = other.serve().address
    kv.fetch_from(there, strategy="on_demand")
    kv._residence.load_leaves([HIGH[0] * SUBGROUPS])
    again = opened(stack, crashed(kv, path))
    assert groups_of(again) == {*LOW}
    again.fetch_from(there)
    assert held(declare(again)) == old.within(HIGH)
    assert again.committed is None, "of what has come since nothing was committed"


def test_a_closed_provider_gives_back_what_it_can(
    stack: ExitStack, old: Old, home_url: str
) -> None:
    kv = opened(stack, home_url, owned=())
    half_way(old, kv)
    kv.close()
    assert groups_of(old.kv) == {*range(3, 8)}
    with sk.open(home_url, owned=range(2)) as kv:
        assert held(declare(kv)) == old.within([0, 1])
    with pytest.raises(NotOwnedError, match="only in part"):
        sk.open(home_url, owned=[2])
    kv = opened(stack, home_url, owned=())
    kv.fetch_from(old.address, key_groups=[2])
    assert held(declare(kv)) == old.within([2])


# ---- What is refused


def test_older_versions_refuse_a_home_into_which_leaves_are_coming(
    stack: ExitStack, old: Old, home: DictHome
) -> None:
    kv = opened(stack, "testdict:t?memory=64KiB", owned=())
    arrival = kv.fetch_from(old.address, strategy="on_demand")
    assert home.meta is not None
    assert json.loads(home.meta)["statekit"] == 4
    with pytest.raises(HomeError, match="on their way"):
        HomeSource("testdict:t?memory=64KiB")
    arrival.wait(SECONDS_MAX)
    assert json.loads(home.meta)["statekit"] == 2
    assert "arrivals" not in json.loads(home.meta)


def test_a_copy_to_look_at_takes_nothing_over(stack: ExitStack, old: Old, tmp_path: Path) -> None:
    pytest.importorskip("rocksdict")
    url = f"rocksdb:{tmp_path}/home"
    opened(stack, url, owned=()).close()
    look = opened(stack, url + "?look=1", owned=())
    with pytest.raises(HomeError, match="copy to look at"):
        look.fetch_from(old.address)
    with pytest.raises(HomeError, match="copy to look at"):
        old.kv.migrate(look.serve().address, key_groups=HIGH)
    assert old.kv.key_groups == (range(GROUPS),)


def test_rows_that_were_never_given_away_are_not_overwritten(
    stack: ExitStack, old: Old, home_url: str
) -> None:
    first = opened(stack, home_url)
    first.value("texts", str).update(old.image["texts"])
    first.close()
    kv = opened(stack, home_url, owned=LOW)
    with pytest.raises(OccupiedError, match=r"has entries of key-group \d"):
        kv.fetch_from(old.address, key_groups=HIGH)
    assert old.kv.key_groups == (range(GROUPS),)


def test_a_hand_over_from_a_base_goes_on_with_it(
    stack: ExitStack, old: Old, tmp_path: Path
) -> None:
    pytest.importorskip("rocksdict")
    base = str(tmp_path / "base")
    old.kv.checkpoint(base)
    old.kv.value("texts", str)["since"] = old.image["texts"]["since"] = "the base"
    path = tmp_path / "home"
    first = opened(stack, f"rocksdb:{path}?memory=64KiB", owned=())
    assert first.fetch_from(old.address, strategy="on_demand", base=base).is_based
    first._residence.load_leaves(range(5))
    kv = opened(stack, crashed(first, path), owned=())
    with pytest.raises(ArgumentError, match=r"begun from .*number 1.*base="):
        kv.fetch_from(old.address)
    kv.fetch_from(old.address, base=base)
    assert held(declare(kv)) == old.image


# ---- Ctrl-C


class Small:
    """Two providers, of which one has a home, and few keys."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        geometry: dict[str, Any] = {"key_groups": 2, "subgroups": 2}
        self.old = self.stack.enter_context(sk.open("memory:", **geometry))
        self.old.value("n", int).update({f"k{at}": at for at in range(20)})
        self.address = self.old.serve().address
        self.name = f"small{next(_numbers)}"
        self.new = self.stack.enter_context(sk.open(self.url, owned=(), **geometry))

    @property
    def url(self) -> str:
        return f"arrivingdisk:{self.name}?atomic=1"

    def check(self) -> None:
        """Everything is exact, has one owner, and is so again when the home is opened anew."""
        expected = {f"k{at}": at for at in range(20)}
        numbers = self.new.value("n", int)
        numbers.put("k3", 100)
        assert dict(numbers.items()) == expected | {"k3": 100}
        wait_until(lambda: self.new.migrations == () and self.old.migrations == ())
        wait_until(lambda: record_of(self.new).arrivals == ())
        assert self.old.key_groups == ()
        self.stack.close()
        with sk.open(self.url) as again:
            assert dict(again.value("n", int).items()) == expected | {"k3": 100}
        del DiskHome.places[self.name]


@pytest.fixture
def disks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskHome, "places", {})
    register_home("arrivingdisk", DiskHome.open)


def test_ctrl_c_in_a_touch_costs_nothing(disks: None) -> None:
    def make() -> Small:
        small = Small()
        small.new.fetch_from(small.address, strategy="on_demand")
        return small

    def step(small: Small) -> None:
        numbers = small.new.value("n", int)
        assert numbers["k3"] == 3
        numbers.get_many(["k4", "k5"])

    def check(small: Small, run: Run) -> None:
        for arrival in small.new.migrations:
            arrival.wait(SECONDS_MAX)
        small.check()

    files = [moving_in, loading, residence_fetch, fetch_module, ledger_module]
    runs = [*each_point(make, step, check, files=files, every=11)]
    assert sum(run.is_interrupted for run in runs) >= 10


def test_ctrl_c_in_fetch_from_costs_nothing(disks: None) -> None:
    def step(small: Small) -> None:
        small.new.fetch_from(small.address)

    def check(small: Small, run: Run) -> None:
        if not small.new.key_groups:
            small.new.fetch_from(small.address)  # the same, or anew
        small.check()

    files = [new_owner_module, recording, transfer, moving_in, ledger_module]
    runs = [*each_point(Small, step, check, files=files, every=5)]
    assert sum(run.is_interrupted for run in runs) >= 10


def test_ctrl_c_while_it_goes_on_costs_nothing(disks: None) -> None:
    """Half of the leaves have come when the first process ends."""

    def make() -> Small:
        small = Small()
        small.new.fetch_from(small.address, strategy="on_demand")
        small.new._residence.load_leaves([0, 1, 2])
        cut_off(small.new)
        small.new._let_go()
        small.new = small.stack.enter_context(sk.open(small.url, owned=()))
        return small

    def step(small: Small) -> None:
        small.new.fetch_from(small.address)

    def check(small: Small, run: Run) -> None:
        if not small.new.key_groups:
            small.new.fetch_from(small.address)
        for arrival in small.new.migrations:
            arrival.wait(SECONDS_MAX)
        small.check()

    files = [new_owner_module, recording, transfer, moving_in, ledger_module]
    runs = [*each_point(make, step, check, files=files, every=5)]
    assert sum(run.is_interrupted for run in runs) >= 10


# ---- A home that several processes have open


@pytest.fixture
def shared(stack: ExitStack, tmp_path: Path) -> str:
    server = stack.enter_context(redis_server(tmp_path))
    return f"redis://{HOST}:{server.port}/0"


def test_what_comes_to_another_process_of_the_home_is_not_taken_from_it(
    stack: ExitStack, shared: str, old: Old
) -> None:
    """A hand-over that is under way looks like one whose new owner was killed."""
    first = opened(stack, shared, owned=())
    first.fetch_from(old.address, key_groups=LOW, strategy="on_demand")
    second = opened(stack, shared, owned=())  # as another process
    with pytest.raises(ArgumentError, match=r"key-groups 0-3 are on their way from .* open in"):
        second.fetch_from(old.address)
    assert (first.key_groups, second.key_groups) == ((LOW,), ())
    second.fetch_from(old.address, key_groups=HIGH).wait(SECONDS_MAX)
    assert held(declare(first)) == old.within(LOW)
    assert held(declare(second)) == old.within(HIGH)


def test_what_came_to_a_dead_process_of_the_home_is_fetched_by_its_key_groups(
    stack: ExitStack, shared: str, old: Old
) -> None:
    first = opened(stack, shared, owned=())
    first.fetch_from(old.address, key_groups=LOW, strategy="on_demand")
    first._residence.load_leaves([0, 1, 2])
    cut_off(first)
    first._let_go()
    second = opened(stack, shared, owned=())
    with pytest.raises(ArgumentError, match="key-groups 0 are on their way"):
        second.fetch_from(old.address)  # of the others nothing had come: they are there still
    second.fetch_from(old.address, key_groups=[0]).wait(SECONDS_MAX)
    second.fetch_from(old.address).wait(SECONDS_MAX)
    assert held(declare(second)) == old.image
