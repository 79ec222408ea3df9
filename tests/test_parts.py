"""Checkpoints in parts: what many processes write and one publishes is one checkpoint, or none."""

import json
import os
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest

import statekit as sk
from statekit import failpoints
from statekit.checkpoint.parts import find_unpublished
from statekit.errors import (
    ArgumentError,
    CheckpointError,
    DamagedError,
    FencedError,
    OccupiedError,
    SchemaError,
    StateKitError,
)
from statekit.offline.regroup import regroup
from statekit.storage import open_storage

GROUPS, SUBGROUPS = 16, 4
KEYS = 2_000


def opened(**options: Any) -> sk.KVProvider:
    kv = sk.open("memory:", key_groups=GROUPS, subgroups=SUBGROUPS, **options)
    kv.value("n", int, key=int, default=0)
    return kv


def counts(kv: sk.KVProvider) -> sk.ValueState[int]:
    return kv.value("n", int, key=int, default=0)


def group(key: int) -> int:
    return sk.leaf_of(int, key, GROUPS, SUBGROUPS) // SUBGROUPS


def has(kv: sk.KVProvider, key: int) -> bool:
    return any(group(key) in part for part in kv.key_groups)


def workers(count: int = 2) -> list[sk.KVProvider]:
    """A provider with entries, split."""
    first = opened()
    state = counts(first)
    for key in range(KEYS):
        state[key] = key
    return [first, *first.split(sk.assign(GROUPS, count)[1:])]


def content(place: Any, **options: Any) -> dict[int, int]:
    with sk.restore(place, lazy=False, **options) as kv:
        return dict(counts(kv).items())


def files(place: Path) -> set[str]:
    return {name for name in os.listdir(place) if name != ".lock"}


def taken(place: Path, *some: sk.KVProvider, number: int, **options: Any) -> list[sk.Part]:
    return [kv.write_part(place, number=number, **options) for kv in some]


@pytest.fixture
def points() -> Iterator[Callable[[str | None], None]]:
    yield failpoints.configure
    failpoints.configure(os.environ.get(failpoints.VARIABLE))


# ---- What it is for


def test_parts_of_several_are_one_checkpoint(tmp_path: Path) -> None:
    some = workers(3)
    parts = taken(tmp_path, *some, number=1)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        sk.restore(tmp_path)
    made = sk.publish(tmp_path, parts, number=1, metadata={"batch": 7})
    assert made.key_groups == (range(GROUPS),)
    assert made.metadata == {"batch": 7}
    assert content(tmp_path) == {key: key for key in range(KEYS)}
    assert content(tmp_path, key_groups=range(4)) == {
        key: key for key in range(KEYS) if group(key) < 4
    }


def test_a_part_is_small_and_travels(tmp_path: Path) -> None:
    a, b = workers()
    part = a.write_part(tmp_path, number=1)
    assert pickle.loads(pickle.dumps(part)) == part
    assert sk.Part.from_json(part.to_json()) == part
    assert json.loads(part.to_json())["key_groups"] == [[0, GROUPS // 2]]
    assert len(pickle.dumps(part)) < 500
    other = b.write_part(tmp_path, number=1)
    sk.publish(tmp_path, [part.to_json(), pickle.loads(pickle.dumps(other))], number=1)
    assert len(content(tmp_path)) == KEYS


def test_the_next_parts_are_changes_to_what_was_published(tmp_path: Path) -> None:
    a, b = workers()
    sk.publish(tmp_path, taken(tmp_path, a, b, number=1), number=1)
    key = next(key for key in range(KEYS) if group(key) < GROUPS // 2)
    counts(a)[key] = -1
    parts = taken(tmp_path, a, b, number=2)
    assert parts[0].bytes < 1_000
    assert parts[1].bytes == 0
    made = sk.publish(tmp_path, parts, number=2)
    assert made.manifest.base == 1
    assert content(tmp_path) == {**{key: key for key in range(KEYS)}, key: -1}


def test_a_part_whose_attempt_came_to_nothing_is_no_base(tmp_path: Path) -> None:
    a, b = workers()
    sk.publish(tmp_path, taken(tmp_path, a, b, number=1), number=1)
    for key in range(KEYS // 2):
        state = counts(a if has(a, key) else b)
        state[key] = -key
    taken(tmp_path, a, number=2)  # b failed, so 2 was begun again
    sk.publish(tmp_path, taken(tmp_path, a, b, number=2), number=2)
    assert content(tmp_path) == {key: -key if key < KEYS // 2 else key for key in range(KEYS)}


def test_parts_may_be_written_before_the_last_ones_are_published(tmp_path: Path) -> None:
    a, b = workers()
    first = taken(tmp_path, a, b, number=1)
    for key in range(KEYS):
        counts(a if has(a, key) else b)[key] = -key
    second = taken(tmp_path, a, b, number=2)
    with pytest.raises(CheckpointError, match="Publish 1 first"):
        sk.publish(tmp_path, second, number=2)
    sk.publish(tmp_path, first, number=1)
    sk.publish(tmp_path, second, number=2)
    assert content(tmp_path, at=1) == {key: key for key in range(KEYS)}
    assert content(tmp_path, at=2) == {key: -key for key in range(KEYS)}


def test_tasks_that_restore_their_share_write_what_they_changed(tmp_path: Path) -> None:
    """As a Spark task does: it is another process each time."""
    sk.publish(tmp_path, taken(tmp_path, *workers(), number=1), number=1)
    rng = random.Random(7)
    model = {key: key for key in range(KEYS)}
    for number in range(2, 6):
        changed = rng.sample(range(KEYS), 50)
        parts = []
        for groups in sk.assign(GROUPS, rng.randrange(1, 6)):
            with sk.restore(tmp_path, key_groups=groups) as kv:
                for key in changed:
                    if has(kv, key):
                        counts(kv)[key] = model[key] = number
                parts.append(kv.write_part(tmp_path, number=number))
        sk.publish(tmp_path, parts, number=number)
        sk.collect(tmp_path, keep=2)
        assert content(tmp_path) == model


def test_the_least_watermark_of_the_parts_counts(tmp_path: Path) -> None:
    a, b = workers()
    a.advance_watermark(500)
    b.advance_watermark(300)
    parts = taken(tmp_path, a, b, number=1)
    assert sk.publish(tmp_path, parts, number=1).watermark == 300
    parts = taken(tmp_path, a, b, number=2)
    assert sk.publish(tmp_path, parts, number=2, watermark=200).watermark == 200


def test_attachments_live_as_long_as_their_checkpoint(tmp_path: Path) -> None:
    kv = opened()
    counts(kv)[1] = 1
    for number in (1, 2):
        note = sk.write_attachment(tmp_path, "offsets", b"%d" % number, number=number)
        sk.collect(tmp_path)
        made = sk.publish(
            tmp_path, taken(tmp_path, kv, number=number), number=number, attachments=[note]
        )
        assert made.attachments == ("offsets",)
        assert sk.checkpoints(tmp_path)[-1].read_attachment("offsets") == b"%d" % number
    with pytest.raises(ArgumentError, match="no attachment 'x'"):
        made.read_attachment("x")
    sk.collect(tmp_path)
    assert sum(name.endswith(".attachment") for name in files(tmp_path)) == 1
    (tmp_path / note.file).write_bytes(b"x")
    with pytest.raises(DamagedError, match="'offsets'"):
        made.read_attachment("offsets")
    assert [error.file for error in made.verify()] == [str(tmp_path / note.file)]


def test_a_home_writes_parts_too(tmp_path: Path) -> None:
    place = tmp_path / "ckpt"
    with sk.open(f"rocksdb:{tmp_path / 'home'}", key_groups=GROUPS, subgroups=SUBGROUPS) as kv:
        counts(kv).put_many([*range(KEYS)], [*range(KEYS)])
        kv.flush()
        (other,) = kv.split([range(8, GROUPS)])
        with other:
            sk.publish(place, taken(place, kv, other, number=1), number=1)
            key = next(key for key in range(KEYS) if has(kv, key))
            counts(kv)[key] = -1
            sk.publish(place, taken(place, kv, other, number=2), number=2)
    assert content(place) == {**{key: key for key in range(KEYS)}, key: -1}


# ---- Once, whoever publishes and however often


def test_publishing_again_gives_the_same_checkpoint(tmp_path: Path) -> None:
    parts = taken(tmp_path, *workers(), number=1)
    made = sk.publish(tmp_path, parts, number=1, metadata={"n": 1})
    sk.collect(tmp_path)  # the parts are gone by now
    assert not any(name.endswith(".part") for name in files(tmp_path))
    again = sk.publish(tmp_path, reversed(parts), number=1, metadata={"n": 1})
    assert again.digest == made.digest
    with pytest.raises(CheckpointError, match="other metadata"):
        sk.publish(tmp_path, parts, number=1, metadata={"n": 2})


def test_of_many_publishers_of_different_parts_one_wins(tmp_path: Path) -> None:
    kvs = [opened() for _ in range(4)]
    for at, kv in enumerate(kvs):
        counts(kv)[0] = at
    parts = [kv.write_part(tmp_path, number=1) for kv in kvs]
    won: list[int] = []
    lost: list[StateKitError] = []
    barrier = threading.Barrier(len(kvs))

    def run(at: int) -> None:
        barrier.wait()
        try:
            sk.publish(tmp_path, [parts[at]], number=1)
            won.append(at)
        except (CheckpointError, FencedError) as error:
            lost.append(error)

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(kvs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert len(lost) == len(kvs) - 1
    assert content(tmp_path) == {0: won[0]}


def test_a_writer_that_was_replaced_is_refused(tmp_path: Path) -> None:
    a, b = workers()
    sk.publish(tmp_path, taken(tmp_path, a, b, number=1), number=1)
    late = taken(tmp_path, a, b, number=2)
    with sk.restore(tmp_path) as successor:
        counts(successor)[0] = 99
        successor.checkpoint(tmp_path)
        with pytest.raises(FencedError):
            sk.publish(tmp_path, late, number=2)
        for kv in (a, b):
            with pytest.raises(FencedError):
                kv.write_part(tmp_path, number=3)
            with pytest.raises(FencedError):
                kv.checkpoint(tmp_path)
        sk.publish(tmp_path, taken(tmp_path, successor, number=3), number=3)
    assert content(tmp_path)[0] == 99


def test_a_writer_that_joins_later_does_not_fence_the_others(tmp_path: Path) -> None:
    a, b = workers()
    sk.publish(tmp_path, taken(tmp_path, a, b, number=1), number=1)
    (c,) = b.split([range(12, GROUPS)])
    for number in (2, 3):
        made = sk.publish(tmp_path, taken(tmp_path, a, b, c, number=number), number=number)
        assert len(made.manifest.writers) == 3
    b.merge(c)
    sk.publish(tmp_path, taken(tmp_path, a, b, number=4), number=4)
    assert content(tmp_path) == {key: key for key in range(KEYS)}


def test_a_crash_before_or_after_publishing_costs_nothing(
    tmp_path: Path, points: Callable[[str | None], None]
) -> None:
    parts = taken(tmp_path, *workers(), number=1)
    for name in ("parts.publish", "parts.published"):
        points(f"{name}=error")
        with pytest.raises((StateKitError, OSError)):
            sk.publish(tmp_path, parts, number=1)
        points(None)
        sk.collect(tmp_path)
    sk.publish(tmp_path, parts, number=1)
    assert content(tmp_path) == {key: key for key in range(KEYS)}


# ---- What is collected, and what is not


def test_parts_are_kept_until_their_number_is_published(tmp_path: Path) -> None:
    a, b = workers()
    abandoned = taken(tmp_path, a, number=1)
    parts = taken(tmp_path, a, b, number=1)
    before = files(tmp_path)
    found = sk.collect(tmp_path)
    assert found.unpublished == (1,)
    assert files(tmp_path) == before
    sk.publish(tmp_path, parts, number=1)
    found = sk.collect(tmp_path)
    assert {one.file for one in (*abandoned, *parts)} == {*found.parts}
    assert files(tmp_path) == {"000000000001.manifest", *sk.checkpoints(tmp_path)[0].manifest.files}


def test_a_base_is_kept_for_parts_that_need_it(tmp_path: Path) -> None:
    a, b = workers()
    sk.publish(tmp_path, taken(tmp_path, a, b, number=1), number=1)
    parts = taken(tmp_path, a, b, number=3)  # these go on from 1
    sk.publish(tmp_path, taken(tmp_path, a, b, number=2, base=None), number=2)
    sk.collect(tmp_path, keep=1)
    with pytest.raises(CheckpointError, match="no checkpoint 1"):
        sk.restore(tmp_path, at=1)
    sk.publish(tmp_path, parts, number=3)
    assert content(tmp_path) == {key: key for key in range(KEYS)}


def test_unpublished_parts_go_when_told_so(tmp_path: Path) -> None:
    a, b = workers()
    parts = taken(tmp_path, a, b, number=1)
    assert sk.collect(tmp_path, unpublished=True, dry_run=True).unpublished == ()
    assert len(files(tmp_path)) == 4
    sk.collect(tmp_path, unpublished=True)
    assert files(tmp_path) == set()
    with pytest.raises(CheckpointError, match="write it again"):
        sk.publish(tmp_path, parts, number=1)


def test_what_was_not_published_can_be_seen(tmp_path: Path) -> None:
    a, b = workers()
    sk.publish(tmp_path, taken(tmp_path, a, b, number=1), number=1)
    (part,) = taken(tmp_path, a, number=2, base=None)
    (found,) = find_unpublished(open_storage(tmp_path))
    assert (found.number, found.parts, found.key_groups) == (2, (part.file,), (range(8),))
    assert found.bytes >= part.bytes
    sk.publish(tmp_path, taken(tmp_path, a, b, number=2), number=2)
    assert find_unpublished(open_storage(tmp_path)) == []


# ---- Bad input: a clear error, and nothing is published


def bad(place: Path, parts: Any, error: type[Exception], match: str, **options: Any) -> None:
    with pytest.raises(error, match=match):
        sk.publish(place, parts, **{"number": 1, **options})
    assert not any(name.endswith(".manifest") for name in os.listdir(place))


def test_holes_and_overlaps_are_refused(tmp_path: Path) -> None:
    a, b = workers()
    parts = taken(tmp_path, a, b, number=1)
    bad(tmp_path, parts[:1], ArgumentError, "key-groups 8-15 of 16 are in none")
    again = a.write_part(tmp_path, number=1)
    if again.file != parts[0].file:
        bad(tmp_path, [*parts, again], OccupiedError, "key-groups 0-7 are in two parts")
    bad(tmp_path, [*parts, opened().write_part(tmp_path, number=1)], OccupiedError, "in two")
    bad(tmp_path, [], ArgumentError, "no parts")


def test_what_is_no_part_is_refused(tmp_path: Path) -> None:
    a, b = workers()
    parts = taken(tmp_path, a, b, number=1)
    bad(tmp_path, parts[0], ArgumentError, "in a list")
    bad(tmp_path, 7, ArgumentError, "in a list")
    bad(tmp_path, [7], ArgumentError, "7 is no part")
    bad(tmp_path, ["{"], ArgumentError, "is no part of a checkpoint")
    bad(tmp_path, ["[1]"], ArgumentError, "no object")
    bad(tmp_path, ['{"number": 1}'], ArgumentError, "'file' is missing")
    bad(tmp_path, [parts[0]._replace(file="../x")], ArgumentError, "no file of a part")
    gone = parts[0].file[:-6] + ("1.part" if parts[0].file[-6] == "0" else "0.part")
    bad(tmp_path, [parts[0]._replace(file=gone)], CheckpointError, "is not there")
    bad(tmp_path, parts, ArgumentError, "another checkpoint than 2", number=2)
    bad(tmp_path, parts, ArgumentError, "no number", number="1")
    bad(tmp_path, parts, ArgumentError, "metadata", metadata={1: 2})
    bad(tmp_path, parts, ArgumentError, "no attachment", attachments=["x"])
    note = sk.write_attachment(tmp_path, "x", b"", number=1)
    bad(tmp_path, parts, ArgumentError, "same name", attachments=[note, note])
    bad(tmp_path / "..", parts, CheckpointError, "another place")


def test_geometry_and_schemas_must_agree(tmp_path: Path) -> None:
    a, _ = workers()
    part = a.write_part(tmp_path, number=1)
    with sk.open("memory:", key_groups=2 * GROUPS, subgroups=2) as other:
        wide = other.write_part(tmp_path, number=1)
    bad(tmp_path, [part, wide], ArgumentError, "16( key-groups)? x 4")
    with sk.open("memory:", key_groups=GROUPS, subgroups=SUBGROUPS) as other:
        other.value("n", str, key=int)
        (rest,) = other.split([range(8, GROUPS)])
        bad(tmp_path, [part, rest.write_part(tmp_path, number=1)], SchemaError, "state 'n'")


def test_parts_that_go_on_from_different_checkpoints_are_refused(tmp_path: Path) -> None:
    a, b = workers()
    sk.publish(tmp_path, taken(tmp_path, a, b, number=1), number=1)
    counts(a)[next(key for key in range(KEYS) if has(a, key))] = 5
    sk.publish(tmp_path, taken(tmp_path, a, b, number=2), number=2)
    with (
        sk.restore(tmp_path, key_groups=range(8)) as new,
        sk.restore(tmp_path, key_groups=range(8, 16), at=1) as old,
    ):
        parts = taken(tmp_path, new, old, number=3)
        with pytest.raises(CheckpointError, match="from checkpoint 2, the one of 8-15 from 1"):
            sk.publish(tmp_path, parts, number=3)
        full = [new.write_part(tmp_path, number=3, base=None), parts[1]]
        sk.publish(tmp_path, full, number=3)


def test_a_base_is_told_by_its_contents(tmp_path: Path) -> None:
    a, b = workers()
    sk.publish(tmp_path, taken(tmp_path, a, b, number=1), number=1)
    parts = taken(tmp_path, a, b, number=2)
    (tmp_path / "000000000001.manifest").unlink()
    with opened() as stranger:
        stranger.checkpoint(tmp_path)
    with pytest.raises((CheckpointError, FencedError)):
        sk.publish(tmp_path, parts, number=2)
    assert [one.number for one in sk.checkpoints(tmp_path)] == [1]


def test_a_number_that_exists_is_refused(tmp_path: Path) -> None:
    a, b = workers()
    parts = taken(tmp_path, a, b, number=1)
    sk.publish(tmp_path, parts, number=1)
    with pytest.raises(CheckpointError, match="number the next one 2"):
        a.write_part(tmp_path, number=1)
    for number in (0, "1", True, None):
        with pytest.raises(ArgumentError):
            a.write_part(tmp_path, number=number)  # type: ignore[arg-type]


def test_damaged_parts_and_packs_are_found_before_anything_is_published(tmp_path: Path) -> None:
    parts = taken(tmp_path, *workers(), number=1)
    file = tmp_path / parts[0].file
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    bad(tmp_path, parts, DamagedError, "Write that part again")
    file.write_bytes(whole)
    pack = next(tmp_path.glob("*.pack"))
    contents = pack.read_bytes()
    pack.unlink()
    bad(tmp_path, parts, CheckpointError, "is not there")
    pack.write_bytes(contents[:-8])
    bad(tmp_path, parts, CheckpointError, "bytes, not")
    pack.write_bytes(contents)
    sk.publish(tmp_path, parts, number=1)
    assert content(tmp_path) == {key: key for key in range(KEYS)}


# ---- What a review found


def batch(place: Path, number: int, *ats: int | None, value: int = 0) -> list[sk.Part]:
    """Parts of two tasks that restored these checkpoints and changed all of their keys."""
    parts = []
    for groups, at in zip(sk.assign(GROUPS, 2), ats, strict=True):
        kv = opened(owned=groups) if at is None else sk.restore(place, key_groups=groups, at=at)
        with kv:
            mine = [key for key in range(KEYS) if has(kv, key)]
            counts(kv).put_many(mine, [value or number] * len(mine))
            parts.append(kv.write_part(place, number=number))
    return parts


def test_generations_never_fall_and_the_replaced_stay_out(tmp_path: Path) -> None:
    (w,) = workers(1)
    for number in (1, 2):
        sk.publish(tmp_path, taken(tmp_path, w, number=number), number=number)
    (late,) = w.split([range(8, 16)])  # joins at 3: so does its generation
    sk.publish(tmp_path, taken(tmp_path, w, late, number=3), number=3)
    successor = sk.restore(tmp_path, key_groups=range(8, 16), lazy=False)
    changed = [key for key in range(KEYS) if has(successor, key)]
    counts(successor).put_many(changed, [-1] * len(changed))
    sk.publish(tmp_path, taken(tmp_path, w, successor, number=4), number=4)
    with pytest.raises(FencedError):
        late.write_part(tmp_path, number=5)
    w.merge(successor)
    sk.publish(tmp_path, taken(tmp_path, w, number=5), number=5)
    for base in ("auto", None):
        with pytest.raises(FencedError):
            late.write_part(tmp_path, number=6, base=base)
    generations = [one.manifest.generation for one in sk.checkpoints(tmp_path)]
    assert generations == sorted(generations)
    assert {content(tmp_path)[key] for key in changed} == {-1}


def test_a_driver_that_stalled_does_not_override_its_successor(tmp_path: Path) -> None:
    a, b = workers()
    first = pickle.dumps(sk.publish(tmp_path, taken(tmp_path, a, b, number=1), number=1))
    sk.publish(tmp_path, batch(tmp_path, 2, 1, 1), number=2)
    for groups in sk.assign(GROUPS, 2):
        with sk.restore(pickle.loads(first), key_groups=groups, background=False) as task:
            counts(task)[next(key for key in range(KEYS) if has(task, key))] = -5
            with pytest.raises(FencedError):
                task.write_part(tmp_path, number=3)
    assert {*content(tmp_path).values()} == {2}


def test_to_go_back_on_purpose_is_allowed(tmp_path: Path) -> None:
    for number in (1, 2):
        ats = (number - 1 or None,) * 2
        sk.publish(tmp_path, batch(tmp_path, number, *ats), number=number)
    older = sk.checkpoints(tmp_path)[0]
    tasks = [sk.restore(older, key_groups=groups) for groups in sk.assign(GROUPS, 2)]
    sk.publish(tmp_path, taken(tmp_path, *tasks, number=3), number=3)
    assert {*content(tmp_path).values()} == {1}


def test_bases_are_compared_though_all_leaves_are_written_anew(tmp_path: Path) -> None:
    sk.publish(tmp_path, batch(tmp_path, 1, None, None), number=1)
    for number in (2, 3):
        sk.publish(tmp_path, batch(tmp_path, number, number - 1, number - 1), number=number)
    with pytest.raises(CheckpointError, match="from checkpoint 2, the one of 8-15 from 3"):
        sk.publish(tmp_path, batch(tmp_path, 4, 2, 3), number=4)
    sk.publish(tmp_path, batch(tmp_path, 4, 3, 3), number=4)


def test_a_checkpoint_of_some_key_groups_does_not_hide_the_others(tmp_path: Path) -> None:
    a, b = workers()
    sk.publish(tmp_path, taken(tmp_path, a, b, number=1), number=1)
    with pytest.raises(CheckpointError, match=r"would hide its key-groups 8-15.*write_part"):
        a.checkpoint(tmp_path)
    with sk.restore(tmp_path, key_groups=range(4)) as some, pytest.raises(CheckpointError):
        some.checkpoint(tmp_path)
    assert len(content(tmp_path)) == KEYS
    a.merge(b)
    assert a.checkpoint(tmp_path).number == 2


def test_one_that_owns_nothing_for_a_while_stays_a_writer(tmp_path: Path) -> None:
    a, b = workers()
    sk.publish(tmp_path, taken(tmp_path, a, b, number=1), number=1)
    a.merge(b)
    empty = sk.open("memory:", key_groups=GROUPS, subgroups=SUBGROUPS, owned=())
    sk.publish(tmp_path, taken(tmp_path, a, empty, number=2), number=2)
    (back,) = a.split([range(8, 16)])
    empty.merge(back)
    sk.publish(tmp_path, taken(tmp_path, a, empty, number=3), number=3)
    assert len(content(tmp_path)) == KEYS


def test_regrouping_in_place_keeps_attachments(tmp_path: Path) -> None:
    a, b = workers()
    attached = sk.write_attachment(tmp_path, "model", b"abc", number=1)
    parts = taken(tmp_path, a, b, number=1)
    sk.publish(tmp_path, parts, number=1, attachments=[attached])
    made = regroup(sk.checkpoints(tmp_path)[-1], 2 * GROUPS)
    sk.collect(tmp_path, keep=1)
    assert made.read_attachment("model") == b"abc"


def test_a_second_copy_of_a_task_never_removes_a_pack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system of fsspec that cannot rename over a file."""
    from fsspec.implementations.memory import MemoryFileSystem

    class Plain(MemoryFileSystem):  # type: ignore[misc]
        protocol = "plainfs"
        store: ClassVar[dict[str, Any]] = {}
        pseudo_dirs: ClassVar[list[str]] = [""]

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            plain = path.replace("plainfs://", "memory://")
            return str(MemoryFileSystem._strip_protocol(plain))

    fsspec.register_implementation("plainfs", Plain, clobber=True)
    url = "plainfs://a/place"
    (one,) = workers(1)
    (two,) = workers(1)
    first = one.write_part(url, number=1)
    removed: list[str] = []
    real = Plain.rm_file
    monkeypatch.setattr(
        Plain, "rm_file", lambda self, path: (removed.append(path), real(self, path))
    )
    two.write_part(url, number=1)
    assert not [path for path in removed if path.endswith(".pack")]
    sk.publish(url, [first], number=1)
    assert len(content(url)) == KEYS


def test_odd_arguments_of_publish_are_told(tmp_path: Path) -> None:
    a, b = workers()
    parts = taken(tmp_path, a, b, number=1)
    good = parts[0]
    for watermark in ("x", 2**70, 1.5, True):
        bad(tmp_path, parts, ArgumentError, "is no watermark", watermark=watermark)
    attached = sk.write_attachment(tmp_path, "m", b"", number=1)
    odd: list[Any] = [None, 5, attached, [good], [attached._replace(name=5)],
                      [attached._replace(file=5)], [attached._replace(file=good.file)]]  # fmt: skip
    for attachments in odd:
        bad(tmp_path, parts, ArgumentError, "attachment", attachments=attachments)
    deep = "[" * 200_000 + "]" * 200_000
    text = good.to_json()
    assert "[[0, 8]]" in text
    groups = ("[[1e400, 8]]", '[["0", 8]]', "[[0.5, 8]]", "[[8, 0]]", "[[-1, 8]]", "[8]")
    ranges = [text.replace("[[0, 8]]", odd_one) for odd_one in groups]
    for part in (deep, *ranges, good._replace(file=5), good._replace(file=b"")):
        bad(tmp_path, [part], ArgumentError, "part")
    made = sk.publish(tmp_path, parts, number=1, watermark=7)
    assert sk.publish(tmp_path, parts, number=1).watermark == made.watermark == 7
    bad_again = pytest.raises(
        CheckpointError, match="with other metadata, attachments or watermark"
    )
    with bad_again:
        sk.publish(tmp_path, parts, number=1, watermark=8)
