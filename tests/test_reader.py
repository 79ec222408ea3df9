"""Checkpoints as they lie in a storage: found, chosen and read, through chains of any shape."""

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import format_oracle
import pytest
from small_checkpoint import (
    GROUPS,
    LEAVES,
    SUBGROUPS,
    Files,
    Line,
    dump,
    fill,
    new_store,
    restore,
)

import statekit as sk
from statekit import Store, leaf_of
from statekit.checkpoint.reader import (
    Checkpoint,
    checkpoints,
    find_checkpoints,
    open_checkpoint,
    read_checkpoint,
)
from statekit.errors import ArgumentError, DamagedError, KeyTypeError, NoCheckpointError
from statekit.keys import encode_key
from statekit.native.block import Block
from statekit.storage.local import LocalStorage

SEED = 4


class Life:
    """A store that changes at random, and the line of its checkpoints."""

    def __init__(self, rng: random.Random, compression: str | None = None) -> None:
        self.rng = rng
        self.store = new_store()
        self.line = Line(compression)
        self.states: dict[str, Any] = {state.name: state for state in self.store.states()}
        self.epoch = 0
        self.dumps: dict[int, list[bytes]] = {}
        self.taken: list[Checkpoint] = []

    def change(self) -> None:
        i = self.rng.randrange(30)
        kind = self.rng.randrange(8)
        if kind < 4:
            fill(self.store, i, i + 1)
        elif kind < 7:
            self.states["visits"].delete(f"key-{i}")
            self.states["names"].delete((f"name-{i}", i))
            self.states["due"].cancel(f"key-{i}", 1000 + i)
        else:
            self.store.clear(self.states[self.rng.choice(["visits", "tags"])])

    def checkpoint(self) -> None:
        full = not self.taken or self.rng.random() < 0.2
        since = 0 if full else self.epoch
        blocks = {leaf: self.store.encode_leaf(leaf, since=since) for leaf in range(LEAVES)}
        number = self.line.number + 1
        self.dumps[number] = dump(self.store)
        self.epoch = self.store.advance_epoch()
        self.store.track(self.epoch)
        packs = self.rng.randrange(1, 4)
        self.taken.append(self.line.take(blocks, full=full, packs=packs))


def live(seed: int, compression: str | None = None) -> Life:
    life = Life(random.Random(seed), compression)
    for _ in range(6):
        for _ in range(life.rng.randrange(12)):
            life.change()
        life.checkpoint()
    return life


@pytest.mark.parametrize("seed", range(SEED, SEED + 25))
def test_every_checkpoint_of_a_line_is_read_as_it_was(seed: int, tmp_path: Path) -> None:
    life = live(seed, compression=[None, "zstd", "lz4"][seed % 3])
    life.line.files.save(tmp_path)
    for checkpoint in life.taken:
        assert dump(restore(checkpoint)) == life.dumps[checkpoint.number]
        manifest, leaves = format_oracle.read_checkpoint(tmp_path, checkpoint.number)
        assert manifest["number"] == checkpoint.number
        for leaf in range(LEAVES):
            assert checkpoint.leaf_rows(leaf) == leaves.get(leaf, {})
        assert list(checkpoint.verify()) == []


@pytest.mark.parametrize("seed", range(SEED, SEED + 10))
def test_one_key_is_found_as_in_the_rows(seed: int) -> None:
    for checkpoint in live(seed).taken:
        rows: dict[str, dict[bytes, Any]] = {name: {} for name in checkpoint.states}
        for leaf in range(LEAVES):
            for name, found in checkpoint.leaf_rows(leaf).items():
                rows[name].update(found)
        for i in range(30):
            for name, key in (
                ("visits", encode_key(str, f"key-{i}")),
                ("names", encode_key(tuple[str, int], (f"name-{i}", i))),
                ("tags", encode_key(int, i)),
                ("due", encode_key(str, f"key-{i}")),
            ):
                assert checkpoint.find(name, key) == rows[name].get(key, (None,))[0]


def test_steps_are_of_distinct_states_and_nothing_is_under_a_full_block() -> None:
    seen_steps = 0
    for seed in range(SEED, SEED + 10):
        for checkpoint in live(seed).taken:
            for leaf in range(LEAVES):
                done: set[str] = set()
                steps = checkpoint.read_leaf(leaf)
                seen_steps = max(seen_steps, len(steps))
                for step in steps:
                    blocks = list(Block.each(step))
                    names = [block.name for block in blocks]
                    assert len(set(names)) == len(names) > 0
                    assert not done & set(names)
                    done |= {block.name for block in blocks if not block.is_delta}
    assert seen_steps >= 3


def test_segments_are_oldest_first() -> None:
    life = live(SEED)
    checkpoint = life.taken[-1]
    for leaf in checkpoint.leaves():
        found = checkpoint.segments(leaf)
        assert [segment for segment, _ in found] == list(checkpoint.manifest.chain(leaf))
        assert [segment.is_delta for segment, _ in found] == [at > 0 for at in range(len(found))]


def test_find_wants_a_state_and_a_key_of_its_type() -> None:
    (checkpoint, *_) = live(SEED).taken
    with pytest.raises(ArgumentError, match=r"no state 'visit'\. It has 'visits', 'names'"):
        checkpoint.find("visit", b"a")
    with pytest.raises(KeyTypeError):
        checkpoint.find("tags", b"abc")
    schema = checkpoint.states["visits"]
    assert checkpoint.find(schema, b"no such key") is None


def test_what_a_checkpoint_says_about_itself() -> None:
    store = new_store()
    fill(store, 0, 10)
    line = Line()
    blocks = dict(enumerate(dump(store)))
    first = line.take(blocks, watermark=77, metadata={"a": "<b>"})
    assert (first.number, first.watermark, first.metadata) == (1, 77, {"a": "<b>"})
    assert (first.key_group_count, first.subgroups, first.key_groups) == (
        GROUPS, SUBGROUPS, (range(GROUPS),),
    )  # fmt: skip
    assert list(first.states) == ["visits", "names", "tags", "due"]
    assert first.bytes == sum(map(len, blocks.values()))
    assert first.new_bytes == first.bytes + 64
    assert first.modified.tzinfo is not None
    assert repr(first).startswith("<Checkpoint 1 of 'dict:': 4 states, key-groups 0-1 of 2, ")
    assert "<td>visits</td>" in first._repr_html_()
    assert "tuple[str, int]" in first._repr_html_()
    second = line.take({0: blocks[0]}, full=False, base=1)
    assert "on top of 1" in repr(second)
    assert second.new_bytes == len(blocks[0]) + 64


def line_of(count: int) -> Files:
    line = Line()
    for i in range(count):
        store = new_store()
        fill(store, 0, i + 1)
        line.take(dict(enumerate(dump(store))))
    return line.files


def test_the_newest_is_opened_or_the_one_asked_for() -> None:
    storage = line_of(3).storage()
    assert open_checkpoint(storage).number == 3
    assert open_checkpoint(storage, at=2).number == 2
    with pytest.raises(NoCheckpointError, match="no checkpoint 4"):
        open_checkpoint(storage, at=4)
    for bad in ("2", 2.0, True):
        with pytest.raises(ArgumentError, match="says no checkpoint"):
            open_checkpoint(storage, at=bad)  # type: ignore[arg-type]
    assert [checkpoint.number for checkpoint in checkpoints(storage)] == [1, 2, 3]


def test_a_time_chooses_the_newest_that_is_not_later() -> None:
    storage = line_of(3).storage()
    times = {c.number: c.modified for c in checkpoints(storage)}
    moment = timedelta(milliseconds=1)
    assert open_checkpoint(storage, at=times[2]).number == 2
    assert open_checkpoint(storage, at=times[3] - moment).number == 2
    assert open_checkpoint(storage, at=times[3] + moment).number == 3
    assert open_checkpoint(storage, at=times[2].astimezone(None).replace(tzinfo=None)).number == 2
    with pytest.raises(NoCheckpointError, match="or before"):
        open_checkpoint(storage, at=times[1] - moment)


def test_an_empty_place_has_no_checkpoint(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "not there", str(tmp_path)):
        with pytest.raises(NoCheckpointError, match="there is no checkpoint in"):
            open_checkpoint(place)
        assert checkpoints(place) == []


def test_a_damaged_newest_is_an_error_and_never_the_one_before() -> None:
    files = line_of(3)
    name = "000000000003.manifest"
    files[name] = files[name][:-1]
    storage = files.storage()
    with pytest.raises(DamagedError, match="at=N") as caught:
        open_checkpoint(storage)
    assert caught.value.file == f"dict:/{name}"
    assert "Older checkpoints there: 1, 2." in caught.value.__notes__
    assert open_checkpoint(storage, at=2).number == 2
    with pytest.raises(DamagedError):
        checkpoints(storage)
    found = find_checkpoints(storage)
    assert [checkpoint.number for checkpoint in found.good] == [1, 2]
    assert [error.file for error in found.errors if isinstance(error, DamagedError)] == [
        f"dict:/{name}"
    ]


def test_a_checkpoint_that_goes_while_it_is_listed_is_no_damage() -> None:
    files = line_of(2)
    storage = files.storage()
    entries = files.list()
    del files["000000000001.manifest"]
    files.list = lambda: entries  # type: ignore[method-assign]
    assert [checkpoint.number for checkpoint in checkpoints(storage)] == [2]
    with pytest.raises(NoCheckpointError):
        read_checkpoint(storage, 1)


def test_other_files_are_passed_over(tmp_path: Path) -> None:
    line_of(1).save(tmp_path)
    for name in ("README", ".lock", "000000000002.manifest.tmp-1a2b", "0.manifest"):
        (tmp_path / name).write_bytes(b"x")
    assert [checkpoint.number for checkpoint in checkpoints(tmp_path)] == [1]
    when = open_checkpoint(tmp_path).modified
    assert abs(when - datetime.now(UTC)) < timedelta(hours=1)


def test_a_block_of_another_number_of_leaves_is_damage() -> None:
    store = Store(GROUPS * 2, SUBGROUPS)
    store.state("visits", "i64").put("a", 1)
    leaf = leaf_of(str, "a", GROUPS * 2, SUBGROUPS)
    line = Line()
    if leaf >= LEAVES:
        store.state("visits", "i64").put("f", 1)
    data = {at: store.encode_leaf(at) for at in range(LEAVES)}
    assert any(data.values())
    checkpoint = line.take(data)
    with pytest.raises(DamagedError, match="a block is of 8 leaves"):
        restore(checkpoint)


def test_a_listing_that_misses_what_is_published_while_it_runs_is_made_again(
    tmp_path: Path,
) -> None:
    """Begun before 2 is published, it goes past 1 when that is removed: it shows packs alone."""
    kv = sk.open("memory:")
    kv.value("n", int)["a"] = 1
    kv.checkpoint(tmp_path)
    kv.checkpoint(tmp_path)
    sk.collect(tmp_path, keep=1)

    class Torn(LocalStorage):
        listed = 0

        def list(self) -> Any:
            self.listed += 1
            found = super().list()
            if self.listed == 1:
                return [entry for entry in found if not entry.name.endswith(".manifest")]
            return found

    storage = Torn(str(tmp_path))
    assert open_checkpoint(storage).number == 2
    assert storage.listed == 2
    with pytest.raises(NoCheckpointError, match="there is no checkpoint in"):
        open_checkpoint(tmp_path / "nowhere")
