"""Moving in: a home is usable while its leaves are still in a checkpoint, and always exact.

The oracle is a dict of what was put in (Job, change() and held() of test_restore.py).
"""

import json
import random
import shutil
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from commit_model import DiskHome
from interrupts import Run, each_point
from remote_util import wait_until
from test_residence import DictHome
from test_residence import home as home  # a fixture
from test_restore import Image, Job, change, copied, declare, held, run_all
from test_restore import home_url as home_url
from test_restore import job as job
from test_restore import server as server

import statekit as sk
from statekit.cli.sources import HomeSource
from statekit.errors import (
    ArgumentError,
    DamagedError,
    HomeError,
    OccupiedError,
    SchemaError,
)
from statekit.homes import ledger as ledger_module
from statekit.homes.ledger import Ledger
from statekit.homes.record import HomeRecord
from statekit.provider import restore as restore_module
from statekit.residence import fetch, loading, moving_in

SECONDS_MAX = 120.0
LAZY: dict[str, Any] = {"lazy": True, "background": False}


def untouched(kv: sk.KVProvider) -> int:
    """How many leaves are still coming."""
    assert kv._residence.ledger is not None
    return len(kv._residence.ledger.coming)


def killed(kv: sk.KVProvider) -> None:
    """As if its process had ended: nothing more is written."""
    kv._let_go()


# ---- Usable at once


def test_a_touch_moves_one_leaf_in(job: Job, home_url: str) -> None:
    job.checkpoint(metadata={"offset": 7})
    with sk.restore(job.url, home=home_url, **LAZY) as kv:
        counts = kv.value("counts", int, default=0, key=int)
        before = untouched(kv)
        assert before > 20
        assert kv.committed == {"offset": 7}
        assert counts[3] == job.image["counts"].get(3, 0)
        assert untouched(kv) == before - 1
        assert kv.loading is not None
        assert kv.loading.leaves_done == kv.loading.leaves_total - untouched(kv)
        counts[3] = 1000  # it is at home now, and a leaf like all others
        assert untouched(kv) == before - 1
        job.image["counts"][3] = 1000
        assert held(declare(kv)) == job.image
        assert kv.loading is None, "the last leaf ends it, threads or not"
    with sk.open(home_url) as kv:
        assert kv.loading is None
        assert held(declare(kv)) == job.image


@pytest.mark.parametrize("write", ["put", "put_many", "append", "add_many", "clear"])
def test_what_is_written_without_reading_is_over_what_comes(
    job: Job, home_url: str, write: str
) -> None:
    job.checkpoint()
    image = job.image
    with sk.restore(job.url, home=home_url, **LAZY) as kv:
        texts, logs = kv.value("texts", str), kv.list("logs", int)
        counts = kv.value("counts", int, default=0, key=int)
        match write:
            case "put":
                texts["t5"] = image["texts"]["t5"] = "new"
            case "put_many":
                texts.put_many([f"t{at}" for at in range(9)], ["new"] * 9)
                image["texts"].update({f"t{at}": "new" for at in range(9)})
            case "append":
                logs["l5"].append(-1)
                image["logs"].setdefault("l5", []).append(-1)
            case "add_many":
                counts.add_many([5, 6, 5])
                for key in (5, 6, 5):
                    image["counts"][key] = image["counts"].get(key, 0) + 1
            case "clear":
                texts.clear()
                image["texts"].clear()
        kv.commit({"at": 1})
        killed(kv)
    with sk.open(home_url) as kv:
        assert held(declare(kv)) == image


def test_what_is_coming_is_absent_to_engines_until_it_is_fetched(job: Job, home_url: str) -> None:
    job.checkpoint()
    with sk.restore(job.url, home=home_url, **LAZY) as kv:
        kv.value("texts", str)
        keys = [*job.image["texts"]]
        assert len(kv.absent(keys)) == len(keys)
        kv.prefetch(keys[:5]).result(SECONDS_MAX)
        assert kv.is_here(keys[:5])
        assert not kv.is_here(keys)
        kv.wait_loaded(SECONDS_MAX)
        assert kv.is_here(keys)


def test_timers_fire_though_their_leaves_had_not_come(tmp_path: Path, home_url: str) -> None:
    place = str(tmp_path / "place")
    with sk.open("memory:", key_groups=8, subgroups=4) as first:
        due = first.timers("due")
        for at in range(100):
            due.set(f"k{at}", at)
        first.value("n", int, key=int).put_many(range(300), range(300))
        first.checkpoint(place)
    with sk.restore(place, home=home_url, **LAZY) as kv:
        assert [time for time, _ in kv.timers("due").pop_due(49)] == [*range(50)]
        kv.commit({"at": 1})
        killed(kv)
    with sk.open(home_url) as kv:
        assert [time for time, _ in kv.timers("due").pop_due(99)] == [*range(50, 100)]


def test_in_the_background_everything_moves_in(job: Job, home_url: str) -> None:
    job.checkpoint()
    with sk.restore(job.url, home=home_url, lazy=True) as kv:
        kv.wait_loaded(SECONDS_MAX)
        assert kv.loading is None
        shutil.rmtree(job.url)  # nobody needs it any more
        assert held(declare(kv)) == job.image
    with sk.open(home_url) as kv:
        assert held(declare(kv)) == job.image


def test_other_geometry_and_several_places(job: Job, tmp_path: Path, home_url: str) -> None:
    job.checkpoint()
    left, right = job.kv.split([range(5), range(5, 8)])
    urls = [str(tmp_path / "left"), str(tmp_path / "right")]
    left.checkpoint(urls[0])
    right.checkpoint(urls[1])
    left.close()
    right.close()
    with sk.restore(urls, home=home_url, regroup=64, **LAZY) as kv:
        states, image = declare(kv), copied(job.image)
        for _ in range(100):
            change(job.rng, states, image)
        assert untouched(kv)
    with sk.open(home_url) as kv:
        assert kv.key_group_count == 64
        assert held(declare(kv)) == image


# ---- Random work, with everything that a home does


@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_done_meanwhile_it_is_exact(
    job: Job, tmp_path: Path, home_url: str, seed: int
) -> None:
    """Changes, commits, rollbacks, evictions, checkpoints, splits and merges, and kills."""
    print(f"seed = {seed}")
    rng = random.Random(seed)
    job.work(600)
    job.checkpoint()
    kv = sk.restore(job.url, home=home_url, lazy=True, background=seed % 3 == 0)
    states, now = declare(kv), copied(job.image)
    committed, offset = copied(now), 0
    kv.commit({"offset": 0})
    for step in range(30):
        for _ in range(rng.randrange(12)):
            change(rng, states, now)
        match rng.randrange(9):
            case 0 | 1:
                offset += 1
                kv.commit({"offset": offset})
                committed = copied(now)
            case 2:
                kv.rollback()
                now = copied(committed)
            case 3:
                place = str(tmp_path / f"at{step}")
                kv.checkpoint(place)
                with sk.restore(place, lazy=rng.random() < 0.5) as other:
                    assert held(declare(other)) == now
            case 4:
                killed(kv)
                kv = sk.open(home_url)
                states, now = declare(kv), copied(committed)
                assert kv.committed == {"offset": offset}
            case 5:
                cut = rng.randrange(1, 8)
                (part,) = kv.split([range(cut)])
                kv.merge(part)
                part.close()
                kv.commit({"offset": offset})  # or the part would be at no position
                committed = copied(now)
            case 6:
                with kv._residence.lock:
                    kv._residence._evict(1 << 20)
            case 7:
                kv.close()
                committed = copied(now)
                kv = sk.open(home_url)
                states = declare(kv)
            case 8:
                assert held(states) == now
    assert held(states) == now
    kv.rollback()
    assert held(states) == committed
    kv.close()
    with sk.open(home_url) as kv:
        assert held(declare(kv)) == committed
        kv.wait_loaded(SECONDS_MAX)
        assert held(declare(kv)) == committed


def test_threads_work_while_everything_moves_in(job: Job, home_url: str) -> None:
    job.work(800)
    job.checkpoint()
    with sk.restore(job.url, home=home_url, lazy=True) as kv:
        counts = kv.value("counts", int, default=0, key=int)
        expected = dict(job.image["counts"])
        stop = threading.Event()

        def add(some: range) -> Callable[[], None]:
            def run() -> None:
                for _ in range(4):
                    for key in some:
                        counts.add(key, 1)
                        expected[key] = expected.get(key, 0) + 1

            return run

        def commit() -> None:
            while not stop.is_set():
                kv.commit({"at": 1})

        committing = threading.Thread(target=commit)
        committing.start()
        try:
            run_all([add(range(at, 150, 3)) for at in range(3)])
        finally:
            stop.set()
            committing.join(SECONDS_MAX)
        kv.wait_loaded(SECONDS_MAX)
        assert dict(counts.items()) == expected
    with sk.open(home_url) as kv:
        assert dict(kv.value("counts", int, default=0, key=int).items()) == expected


def test_a_rollback_leaves_it_coming(job: Job, home_url: str) -> None:
    job.checkpoint()
    with sk.restore(job.url, home=home_url, **LAZY) as kv:
        texts = kv.value("texts", str)
        coming = untouched(kv)
        kv.rollback()
        assert untouched(kv) == coming
        for key in range(0, 150, 9):  # written without reading
            texts[f"t{key}"] = job.image["texts"][f"t{key}"] = "new"
        kv.commit({"at": 1})
        killed(kv)
    with sk.open(home_url) as kv:
        assert held(declare(kv)) == job.image


def test_it_is_handed_on_in_the_middle(job: Job, home_url: str) -> None:
    job.checkpoint()
    kv = sk.restore(job.url, home=home_url, **LAZY)
    states = declare(kv)
    for key in range(20):
        states["counts"][key] = job.image["counts"][key] = -key
    with ExitStack() as stack:
        stack.callback(kv.close)
        other = stack.enter_context(sk.open("memory:", key_groups=8, subgroups=4, owned=()))
        arrival = other.fetch_from(kv.serve().address, key_groups=range(4), strategy="on_demand")
        there = declare(other)
        assert untouched(kv)
        assert held(there) == job.within(range(4))
        arrival.wait(SECONDS_MAX)
        assert held(states) == job.within(range(4, 8))
        kv.commit({"at": 1})
        killed(kv)
        with sk.open(home_url) as again:
            assert again.key_groups == (range(4, 8),)
            assert held(declare(again)) == job.within(range(4, 8))
            again.merge(other)
            assert held(declare(again)) == job.image
            again.commit({"at": 2})
            killed(again)
    with sk.open(home_url) as again:
        assert held(declare(again)) == job.image


def test_a_hand_over_that_is_taken_back_leaves_it_coming(job: Job, home_url: str) -> None:
    job.checkpoint()
    with sk.restore(job.url, home=home_url, **LAZY) as kv, ExitStack() as stack:
        states = declare(kv)
        other = stack.enter_context(sk.open("memory:", key_groups=8, subgroups=4, owned=()))
        arrival = other.fetch_from(kv.serve().address, key_groups=range(4), strategy="on_demand")
        coming = untouched(kv)
        assert arrival.give_back() == (range(4),)
        assert untouched(kv) == coming
        states["texts"].put_many(["a", "b", "c", "d"], ["x"] * 4)
        job.image["texts"].update(dict.fromkeys("abcd", "x"))
        assert held(states) == job.image


@pytest.mark.parametrize("count", [16, 32])
def test_what_moved_in_while_it_was_handed_over_is_open_when_it_is_back(
    job: Job, home_url: str, count: int
) -> None:
    job.checkpoint()
    with sk.restore(job.url, home=home_url, **LAZY) as kv, ExitStack() as stack:
        texts = kv.value("texts", str)
        other = stack.enter_context(sk.open("memory:", key_groups=8, subgroups=4, owned=()))
        arrival = other.fetch_from(kv.serve().address, key_groups=range(4), strategy="on_demand")
        assert kv.loading is not None
        kv.loading.load_many(range(count))
        assert (kv.loading is None) == (count == 32), "all leaves are at home"
        assert arrival.give_back() == (range(4),)
        keys = [*job.image["texts"]]
        texts.put_many(keys, ["x"] * len(keys))
        job.image["texts"] = dict.fromkeys(keys, "x")
        assert held(declare(kv)) == job.image


@pytest.mark.parametrize("is_filled", [False, True])
def test_what_comes_from_elsewhere_is_not_taken_for_coming(
    job: Job, home_url: str, is_filled: bool
) -> None:
    """The home gave key-groups away before they had moved in, and gets them from another one.

    is_filled: all others have moved in before, so that nothing is coming to that provider.
    """
    job.checkpoint()
    kv = sk.restore(job.url, home=home_url, **LAZY)
    gone = sk.open("memory:", key_groups=8, subgroups=4, owned=())
    server = kv.serve()
    gone.fetch_from(server.address, key_groups=range(4), strategy="on_demand")
    killed(kv)  # what nobody has fetched cannot be had any more
    server.close()
    gone.close()
    with sk.restore(job.url, key_groups=range(4), lazy=False) as part:
        states = declare(part)
        for key in job.within(range(4))["texts"]:
            states["texts"][key] = job.image["texts"][key] = "newer"
        if is_filled:
            with sk.open(home_url) as kv:
                kv.wait_loaded(SECONDS_MAX)
        with sk.open(home_url) as kv:
            assert kv.key_groups == (range(4, 8),)
            assert (kv.loading is None) == is_filled
            kv.merge(part)
            kv.commit({"at": 1})
            killed(kv)
    with sk.open(home_url) as kv:
        assert held(declare(kv)) == job.image


def test_who_is_fenced_keeps_what_was_coming_for_who_reclaims_it(job: Job, home_url: str) -> None:
    job.checkpoint()
    with sk.restore(job.url, home=home_url, **LAZY) as kv:
        declare_some(kv)["counts"].get(1)
        kv.serve(generation=1)
        kv.fence(2)
        assert kv.key_groups == ()
        assert kv.loading is None
    with sk.open(home_url, reclaim=True) as kv:
        assert held(declare(kv)) == job.image


def test_rows_that_were_handed_over_are_deleted(job: Job, home: DictHome) -> None:
    job.checkpoint()
    with (
        sk.restore(job.url, home="testdict:t?memory=64KiB", **LAZY) as kv,
        sk.open("memory:", key_groups=8, subgroups=4, owned=()) as other,
    ):
        declare(other)
        arrival = other.fetch_from(kv.serve().address, key_groups=range(4))
        arrival.wait(SECONDS_MAX)
        (departure,) = kv._as_peer().departures or (None,)
        if departure is not None:
            departure.wait(SECONDS_MAX)
        kv.flush()
        kv.close()
        assert not [row for row in home.rows if row[0] < 16], "leaves of key-groups 0 to 3"


def test_key_groups_that_were_merged_away_may_come_back(job: Job, home: DictHome) -> None:
    job.checkpoint()
    with (
        sk.restore(job.url, home="testdict:t?memory=64KiB", **LAZY) as kv,
        sk.open("memory:", key_groups=8, subgroups=4, owned=()) as other,
    ):
        (part,) = kv.split([range(3)])
        other.merge(part)
        part.close()
        assert untouched(kv)
        kv.merge(other)
        kv.commit({"at": 1})
        killed(kv)
    with sk.open("testdict:t?memory=64KiB") as kv:
        assert held(declare(kv)) == job.image


def test_key_groups_that_are_coming_are_not_vacant(job: Job, home: DictHome) -> None:
    job.checkpoint()
    url = "testdict:t?memory=64KiB"
    sk.restore(job.url, home=url, key_groups=range(4), **LAZY).close()
    with (
        sk.restore(job.url, key_groups=range(4)) as part,
        sk.open(url, owned=range(4, 8)) as kv,
        pytest.raises(OccupiedError, match=r"key-group 0.*owned="),
    ):
        kv.merge(part)


# ---- A crash at any call of the home


@pytest.mark.parametrize("is_atomic", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_power_is_lost_at_any_time(job: Job, is_atomic: bool, seed: int) -> None:
    """Whatever of what was not flushed is lost, the home is at the last commit."""
    print(f"seed = {seed}")
    rng = random.Random(seed)
    job.checkpoint()
    name = f"moving-{is_atomic}-{seed}"
    url = f"disk:{name}?atomic={int(is_atomic)}&memory=64KiB"
    kv = sk.restore(job.url, home=url, **LAZY)
    committed = copied(job.image)
    for turn in range(16):
        states, now = declare_some(kv), copied(committed)
        assert kv.committed == ({"turn": turn - 1} if turn else None)
        for _ in range(rng.randrange(3)):
            change_one(rng, states, now)
        kv.commit({"turn": turn})
        committed = copied(now)
        for _ in range(rng.randrange(3)):
            change_one(rng, states, now)
        if turn == 12 and seed % 2:
            kv.wait_loaded(SECONDS_MAX)
        killed(kv)
        DiskHome.places[name].crash(rng)
        kv = sk.open(url)
    assert held(declare(kv)) == committed
    kv.close()
    del DiskHome.places[name]


def test_a_source_is_forgotten_only_when_all_is_safe(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.checkpoint()
    url = "disk:forgotten?atomic=1&memory=64KiB"
    kv = sk.restore(job.url, home=url, **LAZY)

    def fail(ledger: Ledger, leaves: Any) -> None:
        raise HomeError("it fails, as the test wants.")

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "forget_moved_in", fail)
        assert kv.loading is not None
        kv.loading.load_many(range(32))
        assert kv.loading is not None, "it goes on with that later"
        assert kv.metrics().home["failed_writes"] == 1
    home = DiskHome.places["forgotten"]
    home.rows, home.unsafe = dict(home.safe), []  # power is lost
    killed(kv)
    with sk.open(url) as kv:
        assert kv.loading is None
        assert held(declare(kv)) == job.image
    del DiskHome.places["forgotten"]


def declare_some(kv: sk.KVProvider) -> dict[str, Any]:
    """Without the timers, for whose sake all leaves that have some move in."""
    return {"counts": kv.value("counts", int, default=0, key=int), "texts": kv.value("texts", str)}


def change_one(rng: random.Random, states: dict[str, Any], image: Image) -> None:
    key = rng.randrange(150)
    if rng.random() < 0.5:
        states["counts"].add(key, 3)
        image["counts"][key] = image["counts"].get(key, 0) + 3
    else:
        states["texts"][f"t{key}"] = image["texts"][f"t{key}"] = f"{rng.random()}"


def test_an_interrupt_at_any_line_of_a_touch(job: Job) -> None:
    job.work(100)
    job.checkpoint()
    count = iter(range(10**9))

    def make() -> tuple[str, sk.KVProvider]:
        name = f"touch-{next(count)}"
        url = f"disk:{name}?atomic=1&memory=64KiB"
        kv = sk.restore(job.url, home=url, **LAZY)
        declare(kv)
        return name, kv

    def step(made: tuple[str, sk.KVProvider]) -> None:
        kv = made[1]
        kv["texts"]["t1"] = "new"
        kv["counts"].add_many([1, 2, 3])

    def check(made: tuple[str, sk.KVProvider], run: Run) -> None:
        name, kv = made
        states = {one: kv[one] for one in job.image}
        found = held(states)
        for one in ("logs", "due"):
            assert found[one] == job.image[one]
        text = found["texts"].pop("t1", None)
        assert text in ("new", job.image["texts"].get("t1"))
        expected = {key: value for key, value in job.image["texts"].items() if key != "t1"}
        assert found["texts"] == expected
        kv["texts"].put_many(["t1", "t2", "t3"], ["x", "y", "z"])  # and it is open to all
        assert kv["texts"].get_many(["t1", "t2", "t3"]) == ["x", "y", "z"]
        kv.close()
        del DiskHome.places[name]

    files = [moving_in, loading, fetch, ledger_module]
    runs = [*each_point(make, step, check, files=files, every=5)]
    assert sum(run.is_interrupted for run in runs) >= 10


# ---- What can go wrong


def test_a_home_is_not_closed_while_it_is_told_that_all_is_there(
    job: Job, home: DictHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.checkpoint()
    telling, go_on, closed = threading.Event(), threading.Event(), threading.Event()
    update_record = restore_module.update_record

    def wait_first(*args: Any) -> Any:
        telling.set()
        go_on.wait(SECONDS_MAX)
        assert not closed.is_set()
        return update_record(*args)

    monkeypatch.setattr(restore_module, "update_record", wait_first)
    home.close = closed.set  # type: ignore[method-assign]
    kv = sk.restore(job.url, home="testdict:t?memory=64KiB", lazy=True)
    assert telling.wait(SECONDS_MAX)
    closing = threading.Thread(target=kv.close)
    closing.start()
    assert not closed.wait(0.2), "it waits (or has not come so far yet)"
    go_on.set()
    closing.join(SECONDS_MAX)
    assert closed.is_set()
    assert home.meta is not None
    assert "sources" not in json.loads(home.meta)


def test_a_home_that_fails_is_tried_again(job: Job, home: DictHome) -> None:
    job.checkpoint()
    url = "testdict:t?memory=64KiB"
    with sk.restore(job.url, home=url, **LAZY) as kv:
        texts = kv.value("texts", str)
        home.fails = lambda call: call == "write"
        coming = untouched(kv)
        for _ in range(2):
            with pytest.raises(HomeError, match="write fails"):
                texts.get("t1")
        assert untouched(kv) == coming
        home.tears = True
        with pytest.raises(HomeError, match="write fails"):
            texts.get("t1")
        home.fails = lambda call: False
        assert held(declare(kv)) == job.image


def test_filling_goes_on_when_the_home_works_again(job: Job, home: DictHome) -> None:
    job.checkpoint()
    failed = threading.Event()

    def fail(call: str) -> bool:
        is_ours = threading.current_thread().name == "statekit-loading"
        if is_ours and call == "write":
            failed.set()
        return is_ours and call == "write"

    home.fails = fail
    with sk.restore(job.url, home="testdict:t?memory=64KiB", lazy=True) as kv:
        assert failed.wait(SECONDS_MAX)
        with pytest.raises(HomeError, match="write fails"):
            kv.wait_loaded(SECONDS_MAX)
        home.fails = lambda call: False
        wait_until(lambda: kv.loading is None)  # by itself
        assert held(declare(kv)) == job.image


def test_a_home_that_cannot_be_told_says_so(
    job: Job, home: DictHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.checkpoint()

    def fail(*args: Any) -> None:
        raise HomeError("it fails, as the test wants.")

    with sk.restore(job.url, home="testdict:t?memory=64KiB", **LAZY) as kv:
        with monkeypatch.context() as patch:
            patch.setattr(restore_module, "update_record", fail)
            with pytest.raises(HomeError, match="as the test wants"):
                kv.wait_loaded(SECONDS_MAX)
        kv.wait_loaded(SECONDS_MAX)
        assert kv.loading is None


def test_a_home_keeps_no_password(job: Job, monkeypatch: pytest.MonkeyPatch, home_url: str) -> None:
    done = job.checkpoint()
    monkeypatch.setattr(done.storage, "shown", "sftp://me@host/place")
    with pytest.raises(ArgumentError, match="has a password"):
        sk.restore(done, home=home_url, lazy=True)
    with sk.restore(done, home=home_url) as kv:
        assert held(declare(kv)) == job.image


def test_the_command_line_sees_what_is_coming(job: Job, tmp_path: Path) -> None:
    job.checkpoint()
    url = f"rocksdb:{tmp_path}/db?memory=64KiB"
    with sk.restore(job.url, home=url, **LAZY) as kv:
        kv.value("texts", str)["t1"] = job.image["texts"]["t1"] = "new"
    with ExitStack() as stack:
        source = HomeSource(url)
        stack.callback(source.close)
        keys = {
            name: {key for leaf in source.leaves() for key in source.leaf_rows(leaf).get(name, ())}
            for name in job.image
        }
        assert keys["texts"] == {key.encode() for key in job.image["texts"]}
        assert {len(keys[name]) - len(job.image[name]) for name in job.image} == {0}
    with sk.open(url) as kv:
        assert untouched(kv), "the home itself was not touched"
        assert held(declare(kv)) == job.image


def test_the_command_line_refuses_a_home_of_which_it_would_miss_a_part(
    job: Job, home: DictHome
) -> None:
    job.checkpoint()
    sk.restore(job.url, home="testdict:t?memory=64KiB", **LAZY).close()
    with pytest.raises(HomeError, match="still being filled"):
        HomeSource("testdict:t?memory=64KiB")


def test_the_checkpoint_must_be_there_when_the_home_is_opened(
    job: Job, tmp_path: Path, home: DictHome
) -> None:
    job.checkpoint()
    url = "testdict:t?memory=64KiB"
    sk.restore(job.url, home=url, key_groups=range(4), **LAZY).close()
    shutil.move(job.url, tmp_path / "aside")
    with pytest.raises(HomeError, match=r"key-groups 0-3 .* checkpoint 1 .*owned="):
        sk.open(url)
    with sk.open(url, owned=range(4, 8)) as kv:  # the others are not affected
        assert held(declare(kv)) == {name: {} for name in job.image}
    other = Job(tmp_path / "job", seed=2)
    other.checkpoint()
    with pytest.raises(HomeError, match="another one of that number"):
        sk.open(url)
    other.kv.close()
    shutil.rmtree(job.url)
    shutil.move(tmp_path / "aside", job.url)
    with sk.open(url, owned=range(4)) as kv:
        assert held(declare(kv)) == job.within(range(4))


def test_restoring_again_must_be_meant(job: Job, home_url: str) -> None:
    job.checkpoint()
    with sk.restore(job.url, home=home_url, **LAZY) as kv:
        kv.value("texts", str)["mine"] = "kept"
    for lazy in (True, False):
        with pytest.raises(ArgumentError, match=r"still being filled from checkpoint 1 .*replace"):
            sk.restore(job.url, home=home_url, lazy=lazy)
    with sk.open(home_url) as kv:
        assert kv.value("texts", str)["mine"] == "kept"
    job.checkpoint()
    for lazy in (True, False):
        with sk.restore(job.url, home=home_url, replace=True, lazy=lazy) as kv:
            assert held(declare(kv)) == job.image
    with sk.open(home_url) as kv:
        assert held(declare(kv)) == job.image


def test_key_groups_from_two_checkpoints_come_each_from_its_own(job: Job, home: DictHome) -> None:
    """Both have all key-groups, so that a wrong one would be taken for right."""
    job.checkpoint()
    job.checkpoint()
    url = "testdict:t?memory=64KiB"
    sk.restore(job.url, home=url, key_groups=range(4), at=1, **LAZY).close()
    sk.restore(job.url, home=url, key_groups=range(4, 8), at=2, **LAZY).close()
    job.image, newest = job.taken[1], job.image
    expected = job.within(range(4))
    job.image = newest
    for name, entries in job.within(range(4, 8)).items():
        expected[name] |= entries
    with sk.open(url) as kv:
        assert held(declare(kv)) == expected
        kv.wait_loaded(SECONDS_MAX)
        assert HomeRecord.read(home).sources == ()
    with sk.open(url) as kv:
        assert held(declare(kv)) == expected


def test_older_versions_refuse_a_home_that_is_being_filled(job: Job, home: DictHome) -> None:
    job.checkpoint()
    url = "testdict:t?memory=64KiB"
    with sk.restore(job.url, home=url, **LAZY) as kv:
        assert home.meta is not None
        assert json.loads(home.meta)["statekit"] == 3
        kv.wait_loaded(SECONDS_MAX)
        assert json.loads(home.meta)["statekit"] == 2
        assert "sources" not in json.loads(home.meta)
    home.meta = home.meta.replace(b'"statekit": 2', b'"statekit": 5')
    with pytest.raises(SchemaError, match="Update statekit"):
        sk.open(url)


def test_damage_is_told_by_the_leaf_that_has_it(job: Job, home_url: str) -> None:
    job.work(3000)
    job.checkpoint()
    (pack,) = Path(job.url).glob("*.pack")
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    with sk.restore(job.url, home=home_url, **LAZY) as kv:
        counts = kv.value("counts", int, default=0, key=int)
        good = bad = 0
        for key in range(150):
            try:
                assert counts[key] == job.image["counts"].get(key, 0)
                good += 1
            except DamagedError:
                bad += 1
        assert good > 100
        assert bad
        with pytest.raises(DamagedError):
            kv.checkpoint(job.url + "-copy")  # it is not passed on
        with pytest.raises(DamagedError):
            kv.wait_loaded(SECONDS_MAX)
        kv.commit({"at": 1})
    with sk.open(home_url) as kv, pytest.raises(DamagedError):
        held(declare(kv))


def test_what_does_not_go_together_is_said(job: Job, home_url: str) -> None:
    job.checkpoint()
    with pytest.raises(ArgumentError, match="unless it is lazy, waits for all of it"):
        sk.restore(job.url, home=home_url, background=False)
    with pytest.raises(ArgumentError, match="lazy=False waits for all of it"):
        sk.restore(job.url, home=home_url, background=False, lazy=False)
