"""A state that has grown gets more leaves, in the middle of a stream; nobody else notices."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from streams import Job
from test_due import KEYS, Stream
from test_task import GROUPS, batch, counts, publish_reports, run_tasks

import statekit as sk
from statekit.errors import StatefulOpError
from statekit.spark import geometry
from statekit.spark.geometry import LARGE_BYTES, subgroups_of


class OfSize:
    """As much of a checkpoint as is asked."""

    def __init__(self, size: int, subgroups: int) -> None:
        self.bytes, self.subgroups = size, subgroups


@pytest.mark.parametrize(
    ("size", "before", "after"),
    [
        (0, 1, 1),
        (128 * LARGE_BYTES, 1, 1),
        (128 * LARGE_BYTES + 1, 1, 2),
        (900 * LARGE_BYTES, 1, 8),
        (10, 4, 4),  # it is never joined
        (1 << 60, 1, 512),  # and never cut without end
    ],
)
def test_leaves_follow_the_size(size: int, before: int, after: int) -> None:
    base: Any = OfSize(size, before)
    assert subgroups_of(base, None, 128) == after
    assert subgroups_of(base, 16, 128) == 16
    assert subgroups_of(None, None, 128) == 1


def test_counts_are_exact_while_leaves_are_cut_beside_readers_and_collectors(
    tmp_path: Path,
) -> None:
    rng = random.Random(3)
    base, total = None, Counter[str]()
    reader, seen = None, Counter[str]()
    shapes = []
    for number in range(1, 13):
        users = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.choice((0, 5, 60))))
        subgroups = 1 if number < 4 else 2 if number < 9 else 16
        one = batch(tmp_path, base, number, tasks=rng.choice((1, 2, 5)), subgroups=subgroups)
        run_tasks(one, users[::-1] + "z")  # an attempt that is lost, with another outcome
        base = publish_reports(tmp_path, one, run_tasks(one, users))
        total.update(users)
        shapes.append(base.subgroups)
        assert counts(tmp_path) == total
        if number in (3, 8):  # a reader of the last version of each geometry: lazy, so it needs it
            if reader is not None:
                assert dict(reader.value("count", int).items()) == seen
                reader.close()
            reader, seen = sk.restore(base, background=False), Counter(total)
        sk.collect(tmp_path, keep=1)
    assert reader is not None
    assert dict(reader.value("count", int).items()) == seen
    reader.close()
    assert shapes == [1] * 3 + [2] * 5 + [16] * 4
    assert list(sk.checkpoints(tmp_path)[-1].verify()) == []


def test_only_the_batch_that_cuts_writes_everything(tmp_path: Path) -> None:
    users = [f"user-{n}" for n in range(3000)]
    base, written = None, []
    for number, (some, subgroups) in enumerate(
        ((users, 1), (users[:10], 1), (users[:10], 4), (users[:10], 4)), 1
    ):
        one = batch(tmp_path, base, number, subgroups=subgroups)
        base = publish_reports(tmp_path, one, run_tasks(one, some))  # type: ignore[arg-type]
        written.append(base.new_bytes)
    assert written[1] < written[0] / 4 < written[2]
    assert written[3] < written[2] / 4
    assert counts(tmp_path) == Counter(users) + Counter(users[:10] * 3)


def test_timers_fire_as_if_nothing_had_been_cut(tmp_path: Path) -> None:
    stream = Stream(tmp_path)
    stream.run([(key, 100 + at) for at, key in enumerate(KEYS)], 0, 2)
    stream.changes["subgroups"] = 8
    assert stream.run([(KEYS[0], 50)], 60, 3) == [(KEYS[0], 50)]
    assert stream.run([], 99, 2) == []
    assert stream.read[-1] == 0
    assert stream.run([], 130, 5) == sorted((key, 100 + at) for at, key in enumerate(KEYS[:31]))
    assert stream.base.subgroups == 8


def test_a_stream_cuts_its_leaves_replays_and_goes_back(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(geometry, "LARGE_BYTES", 10)
    for number, users in enumerate(("abcdefgh" * 3, "ab", "cd")):
        job.plan(number)
        job.run(number, users, tasks=(2, 5, 3)[number])
    shapes = [one.subgroups for one in sk.checkpoints(job.state)]
    assert shapes[0] == 1 < shapes[1]
    before = job.counts
    job.run(2, "cd")  # Spark had not recorded it
    assert job.counts == before == Counter("abcdefgh" * 3 + "abcd")
    job.plan(1, stamp=7)  # Spark's checkpoint was rolled back
    job.run(1, "zz", accept="rollback")
    assert job.counts == Counter("abcdefgh" * 3 + "zz")


def test_a_geometry_that_the_user_chose_is_not_changed(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(geometry, "LARGE_BYTES", 10)
    job = Job(spark, tmp_path, subgroups=2)
    for number in range(2):
        job.plan(number)
        job.run(number, "abcdefgh")
    assert [one.subgroups for one in sk.checkpoints(job.state)] == [2, 2]
    other = Job(spark, tmp_path / "other", subgroups=4)
    other.op.path, other.query = job.op.path, job.query
    job.plan(2)
    with pytest.raises(StatefulOpError, match=r"subgroups=2 \(or leave that out\)"):
        other.run(2, "a")


def test_more_subgroups_than_there_can_be_are_refused(tmp_path: Path) -> None:
    one = batch(tmp_path, None, 1)
    publish_reports(tmp_path, one, run_tasks(one, "ab"))
    for wrong in (0, 3, -4, "2", 1 << 20):
        with pytest.raises(sk.errors.ArgumentError, match=f"in each of {GROUPS} key-groups"):
            sk.restore(tmp_path, subgroups=wrong)  # type: ignore[arg-type]
