"""Taking checkpoints of a provider in use: one moment, incremental, in the background, periodic."""

import itertools
import json
import random
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import statekit as sk
from statekit.checkpoint import writer
from statekit.errors import (
    ArgumentError,
    CheckpointCancelledError,
    CheckpointError,
    FencedError,
    StorageError,
)
from statekit.live import checkpointer


def small() -> sk.KVProvider:
    return sk.open("memory:", key_groups=8, subgroups=4)


def contents(kv: sk.KVProvider, name: str = "counts", kind: Any = int) -> dict[str, Any]:
    return dict(kv.value(name, kind).items())


def restored(place: Path, **options: Any) -> dict[str, Any]:
    with sk.restore(place, **options) as kv:
        return contents(kv)


# ---- Full and incremental


def test_restore_gives_what_was_there_at_the_checkpoint(tmp_path: Path) -> None:
    kv = small()
    counts = kv.value("counts", int)
    counts.put_many([f"k{i}" for i in range(500)], list(range(500)))
    taken = kv.checkpoint(tmp_path)
    counts["k1"] = -1
    assert taken.number == 1
    assert restored(tmp_path) == {f"k{i}": i for i in range(500)}


def test_incremental_checkpoints_have_every_change_and_deletion(tmp_path: Path) -> None:
    rng = random.Random(7)
    kv = small()
    counts = kv.value("counts", int)
    oracle: dict[str, int] = {}
    history = []
    for _ in range(25):
        for _ in range(rng.randrange(60)):
            key = f"k{rng.randrange(200)}"
            if rng.random() < 0.3 and key in oracle:
                del counts[key], oracle[key]
            else:
                counts[key] = oracle[key] = rng.randrange(1000)
        if rng.random() < 0.1:
            counts.clear()
            oracle.clear()
        kv.checkpoint(tmp_path)
        history.append(dict(oracle))
    for at, expected in enumerate(history, 1):
        assert restored(tmp_path, at=at) == expected
    longest = max(
        len(chain) for taken in sk.checkpoints(tmp_path) for _, chain in taken.manifest.chains()
    )
    assert 1 < longest <= checkpointer.CHAIN_MAX


def test_large_leaves_are_not_all_written_anew_by_the_same_checkpoint(tmp_path: Path) -> None:
    kv = sk.open("memory:", key_groups=16, subgroups=1)
    texts = kv.value("texts", str)
    keys = [f"k{i}" for i in range(3200)]
    texts.put_many(keys, [f"{key:512}" for key in keys])
    oracle = dict(texts.items())
    first = kv.checkpoint(tmp_path)
    chosen = {sk.leaf_of(str, key, 16, 1): key for key in keys}  # one of each leaf
    rewritten = []
    for at in range(40):
        for key in chosen.values():
            texts[key] = oracle[key] = str(at)
        lengths = [len(chain) for _, chain in kv.checkpoint(tmp_path).manifest.chains()]
        assert max(lengths) <= checkpointer.CHAIN_LONG_MAX
        rewritten.append(lengths.count(1))
    assert min(map(first.leaf_bytes, range(16))) > 64 << 10  # or this would test nothing
    assert sum(rewritten) > 16
    assert max(rewritten) <= 16 // 2
    with sk.restore(tmp_path) as again:
        assert dict(again.value("texts", str).items()) == oracle


def test_unchanged_leaves_are_referred_to_and_changes_are_small(tmp_path: Path) -> None:
    kv = sk.open("memory:")
    names = kv.value("names", str)
    names.put_many([f"k{i}" for i in range(20_000)], ["x" * 100] * 20_000)
    full = kv.checkpoint(tmp_path)
    assert kv.checkpoint(tmp_path).new_bytes == 0
    names["k5"] = "y"
    third = kv.checkpoint(tmp_path)
    assert 0 < third.new_bytes < full.new_bytes / 1000
    assert kv.checkpoint(tmp_path, base=None).new_bytes > full.new_bytes * 0.99
    with sk.restore(tmp_path, at=third.number) as back:
        assert back.value("names", str)["k5"] == "y"


def test_another_directory_starts_with_a_full_one(tmp_path: Path) -> None:
    kv = small()
    kv.value("counts", int)["a"] = 1
    kv.checkpoint(tmp_path / "one")
    taken = kv.checkpoint(tmp_path / "two")
    assert taken.manifest.base is None
    assert restored(tmp_path / "two") == {"a": 1}


def test_a_base_that_is_gone_makes_the_next_one_full(tmp_path: Path) -> None:
    kv = small()
    kv.value("counts", int)["a"] = 1
    kv.checkpoint(tmp_path)
    for path in tmp_path.iterdir():
        path.unlink()
    kv.value("counts", int)["b"] = 2
    assert kv.checkpoint(tmp_path).manifest.base is None
    assert restored(tmp_path) == {"a": 1, "b": 2}


def test_a_base_that_is_not_known_is_refused(tmp_path: Path) -> None:
    kv = small()
    kv.value("counts", int)["a"] = 1
    first = kv.checkpoint(tmp_path)
    assert kv.checkpoint(tmp_path, base=first).manifest.base == 1
    with pytest.raises(CheckpointError, match="known for checkpoint 2 only"):
        kv.checkpoint(tmp_path, base=1)


def test_a_restored_provider_goes_on_incrementally(tmp_path: Path) -> None:
    kv = sk.open("memory:")
    names = kv.value("counts", int)
    names.put_many([f"k{i}" for i in range(5000)], list(range(5000)))
    full = kv.checkpoint(tmp_path)
    kv.close()
    for lazy in (True, False):
        with sk.restore(tmp_path, lazy=lazy) as back:
            counts = back.value("counts", int)
            counts[f"new-{lazy}"] = 1
            del counts["k7" if lazy else "k8"]
            taken = back.checkpoint(tmp_path)
            assert taken.new_bytes < full.new_bytes / 50
    expected = {f"k{i}": i for i in range(5000) if i not in (7, 8)}
    assert restored(tmp_path) == expected | {"new-True": 1, "new-False": 1}


def test_a_checkpoint_of_what_is_not_loaded_yet_is_complete_elsewhere(tmp_path: Path) -> None:
    kv = sk.open("memory:")
    counts = kv.value("counts", int)
    counts.put_many([f"k{i}" for i in range(3000)], list(range(3000)))
    kv.checkpoint(tmp_path / "one")
    counts["k1"] = -1
    kv.checkpoint(tmp_path / "one")
    with sk.restore(tmp_path / "one") as back:
        back.value("counts", int)["k2"] = -2
        back.checkpoint(tmp_path / "two")
    expected = {f"k{i}": i for i in range(3000)} | {"k1": -1, "k2": -2}
    assert restored(tmp_path / "two") == expected


def test_leaves_that_came_by_merge_are_in_the_next_checkpoint(tmp_path: Path) -> None:
    kv = small()
    counts = kv.value("counts", int)
    oracle = {f"k{i}": i for i in range(300)}
    counts.put_many(list(oracle), list(oracle.values()))
    (right,) = kv.split([range(4, 8)])
    kv.checkpoint(tmp_path / "left")
    right["counts"]["k0" if right.owner_of("k0") is right else "k1"] = 9
    for key in oracle:
        if right.owner_of(key) is right:
            right["counts"][key] = oracle[key] = oracle[key] + 1000
    kv.merge(right)
    kv.checkpoint(tmp_path / "left")
    assert restored(tmp_path / "left") == oracle


# ---- One moment, while the state is in use


def test_a_checkpoint_is_one_moment_of_concurrent_writers(tmp_path: Path) -> None:
    """Each writer counts up `first`, then `second` of a key: they always differ by 0 or 1."""
    kv = sk.open("memory:")
    first, second = kv.value("first", int, default=0), kv.value("second", int, default=0)
    stop = threading.Event()

    def write(seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            key = f"{seed}-{rng.randrange(500)}"
            first.add(key, 1)
            second.add(key, 1)

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(15):
            kv.checkpoint(tmp_path)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    totals = []
    for at in range(1, 16):
        with sk.restore(tmp_path, at=at, lazy=False) as back:
            ones = dict(back.value("first", int).items())
            twos = dict(back.value("second", int).items())
            assert all(ones[key] - twos.get(key, 0) in (0, 1) for key in ones)
            assert set(twos) <= set(ones)
            # At any moment, a writer is between its two calls for one key at most.
            for seed in range(3):
                ahead = sum(
                    ones[key] - twos.get(key, 0) for key in ones if key.startswith(f"{seed}-")
                )
                assert ahead in (0, 1)
            totals.append(sum(ones.values()))
    assert totals == sorted(totals)


def test_a_job_tells_how_far_it_is_and_gives_the_checkpoint(tmp_path: Path) -> None:
    kv = small()
    kv.value("counts", int)["a"] = 1
    job = kv.checkpoint_async(tmp_path)
    taken = job.wait(60)
    assert job.done
    assert job.error is None
    assert job.progress.fraction == 1
    assert job.progress.bytes_written == taken.new_bytes
    assert taken.number == 1


def test_a_cancelled_job_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = small()
    kv.value("counts", int)["a"] = 1
    kv.checkpoint(tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    going, go = threading.Event(), threading.Event()
    link = checkpointer._Run._link_leaves

    def wait_first(run: Any, attempt: Any) -> None:
        going.set()
        assert go.wait(60)
        link(run, attempt)

    monkeypatch.setattr(checkpointer._Run, "_link_leaves", wait_first)
    kv.value("counts", int)["b"] = 1
    job = kv.checkpoint_async(tmp_path)
    assert going.wait(60)
    job.cancel()
    go.set()
    with pytest.raises(CheckpointCancelledError, match="cancelled"):
        job.wait(60)
    assert {path.name for path in tmp_path.iterdir()} == before
    monkeypatch.undo()
    kv.checkpoint(tmp_path)
    assert restored(tmp_path) == {"a": 1, "b": 1}


def test_a_failed_checkpoint_can_be_taken_again_and_loses_no_change(tmp_path: Path) -> None:
    kv = small()
    counts = kv.value("counts", int)
    counts["a"] = 1
    kv.checkpoint(tmp_path)
    moved = tmp_path.with_name("elsewhere")
    counts["b"] = 2
    tmp_path.rename(moved)
    tmp_path.write_text("in the way")
    with pytest.raises(StorageError):
        kv.checkpoint(tmp_path)
    tmp_path.unlink()
    moved.rename(tmp_path)
    del counts["a"]
    kv.checkpoint(tmp_path)
    assert restored(tmp_path) == {"b": 2}


def test_closing_lets_a_checkpoint_finish(tmp_path: Path) -> None:
    kv = small()
    kv.value("counts", int)["a"] = 1
    job = kv.checkpoint_async(tmp_path)
    kv.close()
    assert job.done
    assert restored(tmp_path) == {"a": 1}


@pytest.mark.parametrize("home", ["memory:", "rocksdb:{}/home?memory=16MiB"])
def test_what_was_alive_at_the_watermark_of_a_checkpoint_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    """Even if it expires and is read, swept and flushed before its leaf is written."""
    with sk.open(home.format(tmp_path), key_groups=8, subgroups=4) as kv:
        seen = kv.value("seen", int, ttl=sk.TTL(10, time="event"))
        kv.advance_watermark(1000)
        oracle = {f"k{i}": i for i in range(200)}
        seen.put_many(list(oracle), list(oracle.values()))
        going, go = threading.Event(), threading.Event()
        write = checkpointer._Run._write

        def wait_first(run: Any) -> Any:
            going.set()
            assert go.wait(60)
            return write(run)

        for base in (None, "auto"):
            monkeypatch.setattr(checkpointer._Run, "_write", wait_first)
            going.clear(), go.clear()
            job = kv.checkpoint_async(tmp_path / "place", base=base)
            assert going.wait(60)
            at = job_watermark = kv._residence.store.time("event")
            assert at is not None
            # Not advance_watermark(), which sweeps: here the reads come first.
            kv._residence.store.set_time("event", at + 100_000)
            assert all(seen.get(key) is None for key in list(oracle)[:50])
            kv.sweep()
            kv.flush()
            go.set()
            job.wait()
            with sk.restore(tmp_path / "place") as back:
                assert sk.checkpoints(tmp_path / "place")[-1].watermark == job_watermark
                found = dict(back.value("seen", int, ttl=sk.TTL(10, time="event")).items())
            assert found == oracle
            oracle = {f"n{i}": i for i in range(100)}
            seen.put_many(list(oracle), list(oracle.values()))


# ---- Periodic


def test_periodic_checkpoints_are_taken_and_the_newest_are_kept(tmp_path: Path) -> None:
    kv = small()
    counts = kv.value("counts", int, default=0)
    with kv.checkpoint_every(tmp_path, seconds=0.01, keep=2) as periodic:
        while periodic.taken < 6:
            counts["a"] += 1
    assert not periodic.errors
    assert periodic.last is not None
    numbers = [taken.number for taken in sk.checkpoints(tmp_path)]
    assert numbers == [periodic.last.number - 1, periodic.last.number]
    assert restored(tmp_path)["a"] <= counts["a"]


def test_periodic_checkpoints_go_on_after_a_failure(tmp_path: Path) -> None:
    kv = small()
    kv.value("counts", int)["a"] = 1
    place = tmp_path / "place"
    with kv.checkpoint_every(place, seconds=0.01) as periodic:
        while not periodic.taken:
            pass
        for attempt in itertools.count():  # a checkpoint may make the directory anew in between
            place.rename(tmp_path / f"aside{attempt}")
            with suppress(IsADirectoryError):
                place.write_text("in the way")
                break
        while not periodic.errors:
            pass
        place.unlink()
        taken = periodic.taken
        while periodic.taken == taken:
            pass
    assert restored(place) == {"a": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seconds": 0}, "no interval"),
        ({"seconds": "1"}, "no interval"),
        ({"seconds": 1, "keep": 0}, "Keep 1 or more"),
    ],
)
def test_bad_periods_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        small().checkpoint_every(tmp_path, **options)


# ---- What is kept with it


def test_metadata_and_watermark_come_back(tmp_path: Path) -> None:
    kv = small()
    kv.value("seen", int, ttl=sk.TTL(10, time="event"))["a"] = 1
    kv.advance_watermark(1000)
    metadata = {"offsets": [1, 2, {"x": None}], "name": "é"}
    kv.checkpoint(tmp_path, metadata=metadata)
    (taken,) = sk.checkpoints(tmp_path)
    assert taken.metadata == metadata
    assert taken.watermark == 1000


@pytest.mark.parametrize("metadata", [{1: 2}, {"a": {1, 2}}, [1], {"a": float("nan")}, {"a": (1,)}])
def test_metadata_that_json_cannot_hold_is_refused(tmp_path: Path, metadata: Any) -> None:
    with pytest.raises(ArgumentError, match="metadata"):
        small().checkpoint(tmp_path, metadata=metadata)


def test_unknown_compression_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="zstd"):
        small().checkpoint(tmp_path, compression="zip")


@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
def test_equal_state_gives_equal_files_but_for_the_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str | None
) -> None:
    monkeypatch.setattr(checkpointer, "draw_owner", lambda: "0123456789abcdef")
    entries = {f"k{i}": [f"v{i}"] * (i % 7) for i in range(400)}
    for place, seed in (("one", 1), ("two", 2)):
        kv = small()
        if seed == 1:  # the order in which they are declared does not matter
            kv.value("counts", int)
        lists = kv.list("lists", str)
        counts = kv.value("counts", int)
        keys = list(entries)
        random.Random(seed).shuffle(keys)
        for key in keys:
            lists[key] = entries[key]
            counts[key] = len(entries[key])
        kv.checkpoint(tmp_path / place, compression=compression, metadata={"n": 1})
        lists["k1"].append("more")
        kv.checkpoint(tmp_path / place, compression=compression)
    files = [
        {path.name: path.read_bytes() for path in (tmp_path / place).glob("[!.]*")}
        for place in ("one", "two")
    ]
    assert files[0] == files[1]
    assert len(files[0]) == 4


def test_compression_makes_packs_smaller_and_changes_nothing_else(tmp_path: Path) -> None:
    sizes = {}
    for compression in (None, "zstd", "lz4"):
        kv = small()
        kv.value("texts", str).put_many([f"k{i}" for i in range(300)], ["abc" * 100] * 300)
        taken = kv.checkpoint(tmp_path / str(compression), compression=compression)
        sizes[compression] = taken.new_bytes
        with sk.restore(tmp_path / str(compression)) as back:
            assert dict(back.value("texts", str).items()) == dict(kv["texts"].items())
    assert sizes["zstd"] < sizes[None] / 5
    assert sizes["lz4"] < sizes[None] / 5


def test_large_state_is_spread_over_packs_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PACK_BYTES", 1 << 16)
    kv = sk.open("memory:")
    texts = kv.value("counts", int)
    texts.put_many([f"k{i}" for i in range(20_000)], list(range(20_000)))
    taken = kv.checkpoint(tmp_path)
    assert len(taken.manifest.packs) > 10
    leaves = [segment.leaf for segment in sorted(taken.manifest.segments, key=lambda s: s[1:3])]
    assert leaves == sorted(leaves)
    assert restored(tmp_path) == {f"k{i}": i for i in range(20_000)}


@pytest.mark.parametrize("others", [1, 2])
def test_of_two_writers_at_a_time_the_slower_one_fails_and_harms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    kv, other = small(), small()
    for provider in (kv, other):  # the same state: packs of the same name
        provider.value("counts", int)["a"] = 1
    publish = writer.Attempt.publish

    def be_slow(attempt: Any, **description: Any) -> Any:
        monkeypatch.undo()
        for _ in range(others):
            other.checkpoint(tmp_path)
        if others > 1:
            sk.collect(tmp_path, keep=1)
        return publish(attempt, **description)

    monkeypatch.setattr(writer.Attempt, "publish", be_slow)
    with pytest.raises(FencedError):
        kv.checkpoint(tmp_path)
    assert [taken.number for taken in sk.checkpoints(tmp_path)] == [others]
    assert restored(tmp_path) == {"a": 1}
    kv.value("counts", int)["b"] = 2
    with pytest.raises(FencedError):  # the place belongs to the other provider
        kv.checkpoint(tmp_path)
    other.value("counts", int)["b"] = 3
    assert other.checkpoint(tmp_path).number == others + 1
    assert restored(tmp_path) == {"a": 1, "b": 3}


def test_a_writer_that_finds_checkpoints_of_another_takes_their_place(tmp_path: Path) -> None:
    kv, other = small(), small()
    kv.value("counts", int)["a"] = 1
    other.value("counts", int)["b"] = 2
    kv.checkpoint(tmp_path)
    other.checkpoint(tmp_path)  # it publishes next, and so replaces the first provider
    with pytest.raises(FencedError):
        kv.checkpoint(tmp_path)
    assert [json.dumps(taken.manifest.base) for taken in sk.checkpoints(tmp_path)] == [
        "null",
        "null",
    ]
    assert restored(tmp_path) == {"b": 2}
