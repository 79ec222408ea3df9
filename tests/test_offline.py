"""Checkpoints made of checkpoints hold what their sources hold. The oracle: restore, and read."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import statekit as sk
from statekit.checkpoint.reader import Checkpoint, open_checkpoint
from statekit.errors import (
    ArgumentError,
    DamagedError,
    NotOwnedError,
    OccupiedError,
    SchemaError,
    StorageError,
)
from statekit.format.manifest import PackRef, Segment
from statekit.offline import rescale as rescale_module
from statekit.offline.compact import compact
from statekit.offline.copying import runs
from statekit.offline.diff import diff
from statekit.offline.edit import edit
from statekit.offline.regroup import regroup
from statekit.offline.rescale import merge, rescale
from statekit.render import PlainCodec
from statekit.storage import open_storage

TTL = sk.TTL(timedelta(days=1), time="event")


@dataclass
class Click:
    url: str
    ms: int


class States:
    """The same states on any provider, and what they hold as dicts."""

    def __init__(self, kv: sk.KVProvider) -> None:
        self.kv = kv
        self.visits = kv.value("visits", int)
        self.clicks = kv.list("clicks", Click)
        self.prefs = kv.map("prefs", str, float, key=int)
        self.tags = kv.state("tags", set[str], key=tuple[str, int])
        self.recent = kv.value("recent", str, ttl=TTL)
        self.timers = kv.timers("expiry")

    def contents(self) -> dict[str, dict[Any, Any]]:
        states = (self.visits, self.clicks, self.prefs, self.tags, self.recent, self.timers)
        return {state.name: dict(state.items()) for state in states}

    def change(self, rng: random.Random, count: int) -> None:
        for _ in range(count):
            number = rng.randrange(400)
            name = f"user-{number}"
            match rng.randrange(8):
                case 0:
                    self.visits[name] = rng.randrange(1000)
                case 1:
                    self.visits.discard(name)
                case 2:
                    self.clicks[name].append(Click("/", number))
                case 3:
                    self.clicks.discard(name)
                case 4:
                    self.prefs[number][str(rng.randrange(5))] = rng.random()
                case 5:
                    self.tags[name, number].add(str(rng.randrange(5)))
                case 6:
                    self.recent[name] = str(number)
                case 7:
                    self.timers.set(name, rng.randrange(1000))


def make(
    directory: Path,
    rounds: int = 4,
    *,
    seed: int = 7,
    geometry: tuple[int, int] = (16, 4),
    compression: str | None = None,
) -> States:
    """Checkpoints 1 to `rounds` of changing state: chains of deltas."""
    kv = sk.open("memory:", key_groups=geometry[0], subgroups=geometry[1])
    kv.advance_watermark(1000)
    states = States(kv)
    rng = random.Random(seed)
    for at in range(rounds):
        states.change(rng, 1500 if at == 0 else 60)
        kv.checkpoint(str(directory), metadata={"round": at}, compression=compression)
    return states


def restored(*places: Checkpoint | Path, **options: Any) -> dict[str, dict[Any, Any]]:
    urls = [place.url if isinstance(place, Checkpoint) else str(place) for place in places]
    with sk.restore(urls, lazy=False, **options) as kv:
        return States(kv).contents()


def no_damage(checkpoint: Checkpoint) -> bool:
    return not list(checkpoint.verify())


def is_folded(checkpoint: Checkpoint) -> bool:
    return all(len(chain) == 1 for _, chain in checkpoint.manifest.chains())


# ---- Rescale and merge


@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
@pytest.mark.parametrize("workers", [1, 2, 3, 16])
def test_rescaled_workers_hold_together_what_was_there(
    tmp_path: Path, workers: int, compression: str | None
) -> None:
    states = make(tmp_path / "ck", compression=compression)
    source = open_checkpoint(tmp_path / "ck")
    made = rescale([source], open_storage(tmp_path / "out"), workers)
    assert [one.key_groups for one in made] == [(part,) for part in sk.assign(16, workers)]
    assert all(map(no_damage, made))
    assert {one.manifest.compression for one in made} == {compression}
    assert {(one.watermark, one.metadata["round"]) for one in made} == {(1000, 3)}
    assert restored(*made) == states.contents()
    for one in made:  # each alone is what its key-groups have
        with sk.restore(one.url) as kv, sk.restore(str(tmp_path / "ck")) as whole:
            mine = States(kv).contents()["visits"]
            groups = {key: whole.key_group_of(key) for key in states.contents()["visits"]}
            assert mine.keys() == {key for key, at in groups.items() if at in one.key_groups[0]}


def test_rescaling_again_and_merging_gives_the_first_state(tmp_path: Path) -> None:
    states = make(tmp_path / "ck")
    two = rescale([open_checkpoint(tmp_path / "ck")], open_storage(tmp_path / "2"), 2)
    three = rescale(two, open_storage(tmp_path / "3"), 3)
    merged = merge(three, open_storage(tmp_path / "1"))
    assert merged.key_groups == (range(16),)
    assert merged.metadata["merged"][0]["merged"] == [{"round": 3}, {"round": 3}]
    assert restored(merged) == states.contents()
    assert all(state.is_same for state in diff(open_checkpoint(tmp_path / "ck"), merged))


def test_copied_frames_are_the_same_bytes_but_for_their_checksums(tmp_path: Path) -> None:
    make(tmp_path / "ck")
    source = open_checkpoint(tmp_path / "ck")
    merged = merge([source], open_storage(tmp_path / "out"))
    for leaf, chain in source.manifest.chains():
        before = [data for _, data in source.segments(leaf)]
        after = [data for _, data in merged.segments(leaf)]
        assert [len(data) for data in before] == [segment.length for segment in chain]
        assert [data[8:56] for data in before] == [data[8:56] for data in after]
    assert merged.bytes == source.bytes


def test_equal_sources_give_equal_files(tmp_path: Path) -> None:
    make(tmp_path / "ck")
    source = open_checkpoint(tmp_path / "ck")
    for name in ("a", "b"):
        rescale([source], open_storage(tmp_path / name), 3)
    files = {
        name: {
            str(file.relative_to(tmp_path / name)): file.read_bytes()
            for file in sorted((tmp_path / name).rglob("*"))
            if file.is_file()
        }
        for name in ("a", "b")
    }
    assert files["a"] == files["b"]


def test_watermark_of_a_merge_is_the_lowest(tmp_path: Path) -> None:
    kv = sk.open("memory:", key_groups=16, subgroups=4)
    left, right = kv.split([range(8), range(8, 16)])
    left.advance_watermark(500)
    right.advance_watermark(300)
    parts = [part.checkpoint(str(tmp_path / str(at))) for at, part in enumerate((left, right))]
    assert merge(parts, open_storage(tmp_path / "m")).watermark == 300


def test_runs_put_neighbours_together_and_keep_chains_in_order() -> None:
    packs = [PackRef(bytes([at] * 16), 1 << 30, at + 1) for at in range(2)]
    segments = [
        Segment(0, 0, 64, 8, False),
        Segment(0, 1, 64, 8, True),
        Segment(1, 0, 72, 8, False),
        Segment(2, 0, 96, 8, False),
        Segment(3, 1, 80, 8, False),  # its chain goes back in the file: to 72
        Segment(3, 1, 72, 8, True),
    ]
    found = [
        (run.pack.number, [one.offset for one in run.segments]) for run in runs(packs, segments)
    ]
    assert found == [(1, [64, 72]), (1, [96]), (2, [64]), (2, [80]), (2, [72])]


def test_rescale_leaves_nothing_if_it_fails(tmp_path: Path) -> None:
    make(tmp_path / "ck")
    source = open_checkpoint(tmp_path / "ck")
    last = source.manifest.segments[-1]
    pack = tmp_path / "ck" / source.manifest.packs[last.pack].name
    data = bytearray(pack.read_bytes())
    data[last.offset + 60] ^= 1
    pack.write_bytes(data)
    with pytest.raises(DamagedError) as caught:
        rescale([source], open_storage(tmp_path / "out"), 4)
    assert caught.value.file.endswith(pack.name)
    assert caught.value.offset == last.offset
    assert {file.name for file in (tmp_path / "out").rglob("*") if file.is_file()} <= {".lock"}
    good = open_checkpoint(tmp_path / "ck", 1)
    assert len(rescale([good], open_storage(tmp_path / "out"), 2)) == 2  # it can be repeated


def test_a_pack_that_is_cut_is_named(tmp_path: Path) -> None:
    make(tmp_path / "ck", rounds=1)
    source = open_checkpoint(tmp_path / "ck")
    (ref,) = source.manifest.packs
    pack = tmp_path / "ck" / ref.name
    for length in (0, 100, ref.size - 8):
        pack.write_bytes(pack.read_bytes()[:length].ljust(length, b"\0"))
        with pytest.raises(DamagedError, match=ref.name):
            merge([source], open_storage(tmp_path / "out"))
    pack.unlink()
    with pytest.raises(StorageError, match=ref.name):
        merge([source], open_storage(tmp_path / "out"))


def test_sources_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    make(tmp_path / "a", rounds=1)
    make(tmp_path / "b", rounds=1, geometry=(8, 4))
    a, b = open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "b")
    out = open_storage(tmp_path / "out")
    with pytest.raises(OccupiedError, match="have the same key-groups: 0-15 and 0-15"):
        merge([a, a], out)
    with pytest.raises(ArgumentError, match="Regroup one of them first"):
        merge([a, b], out)
    with pytest.raises(ArgumentError, match="Name one place or more"):
        merge([], out)
    two = rescale([a], open_storage(tmp_path / "2"), 2)
    with pytest.raises(ArgumentError, match="key-groups 8-15 of 16 are in none"):
        rescale(two[:1], out, 3)
    with pytest.raises(ArgumentError, match="Use 1 to 16 workers"):
        rescale([a], out, 17)
    with pytest.raises(ArgumentError, match="is not empty"):
        merge([a], open_storage(tmp_path / "2"))
    other = sk.open("memory:", key_groups=16, subgroups=4)
    (part,) = other.split([range(8, 16)])
    part.value("visits", str)
    made = part.checkpoint(str(tmp_path / "c"))
    with pytest.raises(SchemaError, match=r"'visits' is value of int.* and value of str"):
        merge([two[0], made], out)


# ---- Regroup


@pytest.mark.parametrize("key_groups", [1, 8, 16, 64, 128, 1024])
@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_regrouped_state_is_the_same(tmp_path: Path, key_groups: int, is_elsewhere: bool) -> None:
    states = make(tmp_path / "ck", compression="zstd")  # 64 leaves
    source = open_checkpoint(tmp_path / "ck")
    out = open_storage(tmp_path / "out") if is_elsewhere else None
    made = regroup(source, key_groups, out)
    assert (made.key_group_count, made.subgroups) == (key_groups, max(1, 64 // key_groups))
    assert made.number == (1 if is_elsewhere else 5)
    assert no_damage(made)
    assert restored(made) == states.contents()
    assert (made.watermark, made.metadata) == (1000, {"round": 3})
    if key_groups <= 64 and not is_elsewhere:
        assert made.new_bytes == 0  # all of it is referred to
    assert all(state.is_same for state in diff(source, made))


def test_regroup_of_a_worker_counts_its_key_groups_anew(tmp_path: Path) -> None:
    make(tmp_path / "ck", rounds=1)
    workers = rescale([open_checkpoint(tmp_path / "ck")], open_storage(tmp_path / "w"), 3)
    assert [one.key_groups for one in workers] == [(range(5),), (range(5, 10),), (range(10, 16),)]
    made = regroup(workers[1], 32)
    assert made.key_groups == (range(10, 20),)
    assert regroup(workers[2], 8).key_groups == (range(5, 8),)
    with pytest.raises(ArgumentError, match="which are no whole ones of 8"):
        regroup(workers[1], 8)


@pytest.mark.parametrize(
    ("key_groups", "message"),
    [(12, "Use 8 or 16"), (0, "power of 2"), (-4, "power of 2"), (1 << 21, "power of 2")],
)
def test_regroup_refuses_what_is_no_power_of_two(
    tmp_path: Path, key_groups: int, message: str
) -> None:
    make(tmp_path / "ck", rounds=1)
    with pytest.raises(ArgumentError, match=message):
        regroup(open_checkpoint(tmp_path / "ck"), key_groups)
    assert len(list((tmp_path / "ck").glob("*.manifest"))) == 1


# ---- Compact


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_compacted_state_is_the_same_without_deltas(
    tmp_path: Path, compression: str | None
) -> None:
    states = make(tmp_path / "ck", rounds=6, compression=compression)
    source = open_checkpoint(tmp_path / "ck")
    assert not is_folded(source)
    made = compact(source)
    assert made is not None
    assert is_folded(made)
    assert (made.number, made.manifest.base) == (7, 6)
    assert no_damage(made)
    assert restored(made) == states.contents()
    assert compact(made) is None
    sk.collect(open_storage(tmp_path / "ck"), 1)
    assert restored(tmp_path / "ck") == states.contents()
    # Most of what is left is used.
    stored = sum(file.stat().st_size for file in (tmp_path / "ck").glob("*.pack"))
    assert stored <= 2 * made.bytes + 4096


def test_compacting_drops_entries_that_were_deleted(tmp_path: Path) -> None:
    kv = sk.open("memory:", key_groups=4, subgroups=1)
    visits = kv.value("visits", int)
    for number in range(100):
        visits[str(number)] = number
    kv.checkpoint(str(tmp_path))
    for number in range(100):
        del visits[str(number)]
    kv.checkpoint(str(tmp_path), base="auto")
    made = compact(open_checkpoint(tmp_path))
    assert made is None or list(made.leaves()) == []


def test_states_whose_type_has_changed_since(tmp_path: Path) -> None:
    url = str(tmp_path / "ck")
    with sk.open("memory:", key_groups=4, subgroups=2) as kv:
        kv.value("number", int).put_many(list("abcdefgh"), list(range(8)))
        kv.checkpoint(url)
    for new in ("a", "x"):
        with sk.restore(url) as kv:
            number = kv.value("number", float, ttl=timedelta(days=1))
            number[new] = 0.5
            kv.checkpoint(url)
    source = open_checkpoint(url)
    expected = {**{key: float(at) for at, key in enumerate("abcdefgh")}, "a": 0.5, "x": 0.5}
    made = [
        compact(source) or source,
        merge([source], open_storage(tmp_path / "m")),
        regroup(source, 64),
        edit(source, "number", "y", PlainCodec(source.states["number"]).write(7)),
    ]
    for at, one in enumerate(made):
        with sk.restore(one.url, at=one.number) as kv:
            found = dict(kv.value("number", float, ttl=timedelta(days=1)).items())
        assert found == (expected | {"y": 7.0} if at == 3 else expected)


# ---- Edit

EDITS: list[tuple[str, Any, Any, Callable[[States], Any]]] = [
    ("visits", "user-1", 77, lambda states: states.visits["user-1"]),
    ("clicks", "new", [{"url": "/x", "ms": 1}], lambda s: [c.url for c in s.clicks["new"]]),
    ("prefs", -5, {"a": 0.5}, lambda states: states.prefs[-5].copy()),
    ("tags", ("x", 1), ["b", "a"], lambda states: sorted(states.tags["x", 1])),
    ("recent", "user-1", "now", lambda states: states.recent["user-1"]),
    ("expiry", "user-1", [9, 8], lambda states: list(states.timers["user-1"])),
]


@pytest.mark.parametrize(("name", "key", "plain", "read"), EDITS)
def test_an_edit_changes_one_entry_and_writes_little(
    tmp_path: Path, name: str, key: Any, plain: Any, read: Callable[[States], Any]
) -> None:
    states = make(tmp_path / "ck")
    source = open_checkpoint(tmp_path / "ck")
    value = PlainCodec(source.states[name]).write(plain)
    made = edit(source, name, key, value)
    assert made.new_bytes < 500
    assert no_damage(made)
    with sk.restore(str(tmp_path / "ck")) as kv:
        expected = {
            "clicks": ["/x"],
            "tags": ["a", "b"],
            "expiry": [8, 9],
        }.get(name, plain)
        assert read(States(kv)) == expected
    others = {state: rows for state, rows in restored(made).items() if state != name}
    assert others == {state: rows for state, rows in states.contents().items() if state != name}
    assert restored(tmp_path / "ck", at=4) == states.contents()  # the old one stays
    # And the entry can be deleted again.
    gone = edit(made, name, key, None)
    with sk.restore(gone.url) as kv:
        assert key not in getattr(States(kv), "timers" if name == "expiry" else name)
    with pytest.raises(ArgumentError, match="there is nothing to delete"):
        edit(gone, name, key, None)


def test_the_stamp_of_an_edit_is_the_watermark(tmp_path: Path) -> None:
    make(tmp_path / "ck", rounds=1)
    made = edit(
        open_checkpoint(tmp_path / "ck"), "recent", "x", PlainCodec(_schema(tmp_path)).write("y")
    )
    leaf = sk.leaf_of(str, "x", 16, 4)
    assert made.leaf_rows(leaf)["recent"][b"x"][1] == 1000


def _schema(tmp_path: Path) -> Any:
    return open_checkpoint(tmp_path / "ck").states["recent"]


def test_an_edit_of_an_empty_leaf_and_of_a_foreign_one(tmp_path: Path) -> None:
    kv = sk.open("memory:", key_groups=16, subgroups=4)
    kv.value("visits", int)
    made = kv.checkpoint(str(tmp_path / "empty"))
    value = (7).to_bytes(8, "little")
    edited = edit(made, "visits", "alice", value)
    with sk.restore(edited.url) as again:
        assert dict(again.value("visits", int).items()) == {"alice": 7}
    make(tmp_path / "ck", rounds=1)
    left, right = rescale([open_checkpoint(tmp_path / "ck")], open_storage(tmp_path / "w"), 2)
    refused = right if sk.leaf_of(str, "alice", 16, 1) < 8 else left
    with pytest.raises(NotOwnedError, match="Edit the checkpoint of the worker that has it"):
        edit(refused, "visits", "alice", value)


def test_everything_at_random(tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    states = make(tmp_path / "0", seed=seed, compression=rng.choice([None, "zstd", "lz4"]))
    sources = [open_checkpoint(tmp_path / "0")]
    for step in range(1, 9):
        out = open_storage(tmp_path / str(step))
        match rng.randrange(4):
            case 0:
                total = sources[0].key_group_count
                sources = rescale(sources, out, rng.randrange(1, min(total, 5) + 1))
            case 1:
                sources = [merge(sources, out)]
            case 2:
                groups = 2 ** rng.randrange(0, 9)
                if len(sources) > 1:
                    sources = [merge(sources, out)]
                    out = open_storage(tmp_path / f"{step}b")
                sources = [regroup(sources[0], groups, rng.choice([None, out]))]
            case 3:
                sources = [compact(source) or source for source in sources]
        assert all(map(no_damage, sources))
    assert restored(*sources) == states.contents()


# ---- Damage

REWORKS: dict[str, Callable[[Checkpoint, Path], Any]] = {
    "compact": lambda source, out: compact(source),
    "edit": lambda source, out: edit(source, "visits", "x", (1).to_bytes(8, "little")),
    "regroup": lambda source, out: regroup(source, 32),
    "regroup finely": lambda source, out: regroup(source, 256),
    "regroup elsewhere": lambda source, out: regroup(source, 32, open_storage(out)),
    "rescale": lambda source, out: rescale([source], open_storage(out), 3),
    "merge": lambda source, out: merge([source], open_storage(out)),
}


def damage(place: Path, source: Checkpoint, at: float) -> str:
    """Flips a bit of the packs that a checkpoint needs. at: how far into its segments."""
    segments = sorted(source.manifest.segments, key=lambda one: (one.pack, one.offset))
    segment = segments[int(at * (len(segments) - 1))]
    name = source.manifest.packs[segment.pack].name
    data = bytearray((place / name).read_bytes())
    data[segment.offset + segment.length // 2] ^= 0x10
    (place / name).write_bytes(bytes(data))
    return name


@pytest.mark.parametrize("at", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("kind", REWORKS)
def test_nothing_is_published_over_damage(tmp_path: Path, kind: str, at: float) -> None:
    place = tmp_path / "ck"
    make(place, rounds=2)
    source = open_checkpoint(place)
    name = damage(place, source, at)
    before = sorted(path.name for path in place.iterdir())
    with pytest.raises(DamagedError) as caught:
        REWORKS[kind](source, tmp_path / "out")
    assert name in str(caught.value)
    assert sorted(path.name for path in place.iterdir()) == before
    assert not list((tmp_path / "out").rglob("*.manifest"))
    assert open_checkpoint(place).number == 2


@pytest.mark.parametrize("kind", [kind for kind in REWORKS if "regroup " not in kind][:3])
def test_nothing_refers_to_a_pack_whose_header_is_damaged(tmp_path: Path, kind: str) -> None:
    make(tmp_path, rounds=2)
    source = open_checkpoint(tmp_path)
    name = source.manifest.packs[0].name
    data = bytearray((tmp_path / name).read_bytes())
    data[50] = 1
    (tmp_path / name).write_bytes(bytes(data))
    with pytest.raises(DamagedError, match="header"):
        REWORKS[kind](source, tmp_path / "out")
    assert open_checkpoint(tmp_path).number == 2


def test_compacting_what_is_compact_already_still_says_if_it_is_damaged(tmp_path: Path) -> None:
    """A user who is told that there is nothing to do may remove the older checkpoints next."""
    make(tmp_path, rounds=1)
    source = open_checkpoint(tmp_path)
    assert compact(source) is None
    damage(tmp_path, source, 0.5)
    with pytest.raises(DamagedError):
        compact(source)


def test_a_rescale_that_fails_leaves_files_of_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rescale_module, "_TOGETHER", 1)  # one worker after the other
    make(tmp_path / "ck", rounds=2)
    out = tmp_path / "out"
    letter = out / "worker-0" / "letter"

    def fail_later(_: int) -> None:
        if list(out.rglob("*.manifest")):
            letter.write_text("dear")
            raise KeyError

    with pytest.raises(KeyError):
        rescale([open_checkpoint(tmp_path / "ck")], open_storage(out), 3, on_bytes=fail_later)
    files = [path for path in out.rglob("*") if path.is_file() and path.name != ".lock"]
    assert files == [letter]
    assert letter.read_text() == "dear"


# ---- Diff


def test_diff_says_what_a_dict_comparison_says(tmp_path: Path) -> None:
    kv = sk.open("memory:", key_groups=16, subgroups=4)
    states = States(kv)
    rng = random.Random(3)
    before = {}
    states.change(rng, 1500)
    first = kv.checkpoint(str(tmp_path))
    before = states.contents()
    states.change(rng, 300)
    second = kv.checkpoint(str(tmp_path))
    after = states.contents()
    found = {one.name: one for one in diff(first, second, limit=10**6)}
    for name, one in found.items():
        was, now = before[name], after[name]
        assert one.added == len(now.keys() - was.keys())
        assert one.removed == len(was.keys() - now.keys())
        assert one.changed == sum(was[key] != now[key] for key in was.keys() & now.keys())
        assert len(one.first) == one.added + one.removed + one.changed + one.touched
    assert all(one.is_same for one in diff(first, first))


def test_diff_of_states_that_came_went_and_became_others(tmp_path: Path) -> None:
    checkpoints = []
    for at, hint in enumerate((int, str)):
        kv = sk.open("memory:")
        kv.value("same", int)["a"] = 1
        kv.value("other", hint, key=str if at else int)["a" if at else 1] = hint(7)
        kv.value(f"only-{at}", int)["a"] = at
        checkpoints.append(kv.checkpoint(str(tmp_path / str(at))))
    found = {one.name: one for one in diff(*checkpoints)}
    assert found["same"].is_same
    assert (found["other"].added, found["other"].removed) == (1, 1)
    assert (found["only-0"].removed, found["only-0"].after) == (1, None)
    assert (found["only-1"].added, found["only-1"].before) == (1, None)


def test_order_in_sets_and_maps_is_no_difference(tmp_path: Path) -> None:
    made = []
    for at, words in enumerate((["a", "b", "c"], ["c", "b", "a"])):
        kv = sk.open("memory:")
        tags, prefs = kv.state("tags", set[str]), kv.map("prefs", str, int)
        for word in words:
            tags["k"].add(word)
            prefs["k"][word] = 1
        kv.value("number", float)["k"] = float("nan")
        made.append(kv.checkpoint(str(tmp_path / str(at))))
    assert all(one.is_same for one in diff(*made))
