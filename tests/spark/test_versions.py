"""Versions of a state: which are kept, what they say, and the first ones."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from streams import Job, Query

import statekit as sk
from statekit.errors import StatefulOpError

# ---- What is kept


def test_old_versions_are_removed_and_the_rest_stays_readable(spark: Any, tmp_path: Path) -> None:
    job = Job(spark, tmp_path, keep=3)
    for batch in range(10):
        job.plan(batch)
        job.run(batch, "ab", tasks=1 + batch % 3)
    assert [one.number for one in sk.checkpoints(job.state)] == [8, 9, 10]
    assert [*job.state.glob("000000000001-*")] == []
    job.run(9, "ab")
    assert job.sink.calls[-1] == (9, [("a", 10), ("b", 10)])
    job.plan(10)
    job.run(10, "a")
    assert job.counts == {"a": 11, "b": 10}


# ---- The beginning


def test_a_query_goes_on_from_a_backfill_which_is_done_once(job: Job) -> None:
    history = job.frame("aaabz")
    found = job.op.backfill(history, "history", parallelism=3)
    assert sorted(map(tuple, found.collect())) == [("a", 3), ("b", 1), ("z", 1)]
    job.op.backfill(history, "history", parallelism=2)
    job.op.backfill(job.frame("z"), "more")
    job.plan(0)
    job.run(0, "ab")
    assert job.counts == Counter("aaabzzab")
    with pytest.raises(StatefulOpError, match="A backfill comes before the first batch"):
        job.op.backfill(history, "late")


def test_a_backfill_is_not_repeated_when_its_version_is_gone(spark: Any, tmp_path: Path) -> None:
    """A job that calls it at each start goes on for ever; only its output cannot be had again."""
    job = Job(spark, tmp_path, keep=2)
    job.op.backfill(job.frame("za"), "history", parallelism=1)
    job.plan(0)
    job.run(0, "a", tasks=1)
    job.plan(1)
    job.run(1, "a", tasks=1)
    sk.collect(job.state, keep=2)
    again = job.op.backfill(job.frame("za"), "history", parallelism=1)
    for act in (again.collect, again.count):
        with pytest.raises(Exception, match=r"backfill 'history' was done .* not kept any more"):
            act()
    assert job.counts == Counter("zaaa")


def test_an_initial_state_is_for_the_first_batch_of_a_query(job: Job) -> None:
    """As where the state of a running query was deleted, and its job does the backfill again."""
    job.op.backfill(job.frame("z"), "history", parallelism=1)
    job.plan(7)
    with pytest.raises(StatefulOpError, match=r"batch 7, and in .* of no batch of this query"):
        job.run(7, "a")
    job.run(7, "a", accept="gap")
    job.query = Query(job.place / "cp2")
    job.plan(3)
    before = sk.checkpoints(job.state)[-1].metadata["spark"]["query"]
    with pytest.raises(StatefulOpError, match=r"batch 3, and in .* of no batch of this query"):
        job.run(3, "a", continue_from=before)
    assert job.counts == Counter("za")


def test_a_state_that_was_written_over_by_another_program_is_refused(job: Job) -> None:
    """It does not say which batches it has; one of them would be counted twice."""
    job.plan(0)
    job.run(0, "a")  # and Spark has not recorded it
    (version,) = sk.checkpoints(job.state)
    with sk.restore(job.state) as kv:
        kv.value("count", int)["z"] = 5
        kv.checkpoint(job.state)
        before = job.counts
        with pytest.raises(StatefulOpError, match=r"version 2 in .* by another .* of batch 0 of"):
            job.run(0, "a")
        with pytest.raises(StatefulOpError, match="by another program"):
            job.op.backfill(job.frame("z"), "history")
        kv.checkpoint(job.state, metadata=version.metadata)
    job.run(0, "a")
    assert job.counts == before == {"a": 1, "z": 5}
    assert job.sink.calls[-1] == (0, [("a", 1)])


def test_a_query_goes_on_from_any_checkpoint(job: Job) -> None:
    kv = sk.open("memory:", key_groups=16, subgroups=1)
    kv.value("count", int).update({"a": 10, "q": 1})
    kv.checkpoint(job.state)
    kv.close()
    job.plan(0)
    job.run(0, "ab")
    assert job.counts == {"a": 11, "b": 1, "q": 1}


def test_the_metadata_of_a_version_say_which_batch_it_is(job: Job) -> None:
    job.plan(0)
    job.run(0, "ab")
    (version,) = sk.checkpoints(job.state)
    note = json.loads(json.dumps(version.metadata))["spark"]
    assert (note["query"], note["batch"], note["rows"]) == (job.query.id, 0, 2)


def test_a_function_of_ones_own_may_ask_for_the_output_as_often_as_it_likes(job: Job) -> None:
    job.plan(0)
    for _ in range(2):  # two actions, or two calls: the batch is applied once
        output = job.op.process(job.frame("aab"), 0, checkpoint=job.query.checkpoint, parallelism=2)
        assert sorted(map(tuple, output.collect())) == [("a", 2), ("b", 1)]
        assert output.count() == 2
    assert job.counts == Counter("aab")
