"""Exactly once: what the driver does when a batch is repeated, missing, or another's."""

import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from streams import Files, Job, Query, contents, count, digest, run_all

import statekit as sk
import statekit.spark as sks
from statekit import failpoints
from statekit.errors import StatefulOpError


def test_a_batch_that_is_repeated_gives_its_stored_output_whatever_the_parallelism(
    job: Job,
) -> None:
    job.plan(0)
    job.run(0, "aab")
    before = digest(job.state)
    for tasks in (2, 5, 3):
        job.run(0, "aab", tasks)
    assert job.sink.calls == [(0, [("a", 2), ("b", 1)])] * 4
    assert digest(job.state) == before  # nothing was computed
    job.plan(1)
    job.run(1, "ac", tasks=5)
    job.run(1, "ac", tasks=1)
    assert job.counts == Counter("aabac")


@pytest.mark.parametrize("point", ["spark.base", "spark.computed", "parts.publish"])
def test_a_driver_that_fails_before_the_manifest_has_changed_nothing(job: Job, point: str) -> None:
    job.plan(0)
    job.run(0, "ab")
    before = digest(job.state)
    job.plan(1)
    failpoints.configure(f"{point}=error")
    with pytest.raises(OSError, match=point):
        job.run(1, "bb", tasks=3)
    assert digest(job.state) == before
    failpoints.configure(None)
    job.run(1, "bb", tasks=5)
    assert job.counts == Counter("abbb")
    assert job.sink.calls == [(0, [("a", 1), ("b", 1)]), (1, [("b", 3)])]


@pytest.mark.parametrize("point", ["parts.published", "spark.published", "spark.sink"])
def test_a_driver_that_fails_after_the_manifest_gives_the_output_when_it_comes_back(
    job: Job, point: str
) -> None:
    job.plan(0)
    failpoints.configure(f"{point}=error")
    with pytest.raises(OSError, match=point):
        job.run(0, "ab")
    assert job.sink.calls == []
    failpoints.configure(None)
    job.run(0, "ab", tasks=3)
    assert job.sink.calls == [(0, [("a", 1), ("b", 1)])]
    assert job.counts == Counter("ab")


def test_a_function_that_is_not_deterministic_is_applied_once(spark: Any, tmp_path: Path) -> None:
    def on_key(key: str, rows: Any, st: Any) -> Any:
        st.count.set(time.perf_counter_ns())
        yield key, st.count.get()

    job = Job(spark, tmp_path, function=on_key)
    job.plan(0)
    failpoints.configure("spark.computed=error")
    with pytest.raises(OSError, match=r"spark\.computed"):
        job.run(0, "abc")  # whose parts nobody publishes
    failpoints.configure("spark.sink=error")
    with pytest.raises(OSError, match=r"spark\.sink"):
        job.run(0, "abc")
    failpoints.configure(None)
    published = job.counts
    job.run(0, "abc")
    assert job.sink.calls == [(0, sorted(published.items()))]
    assert job.counts == published


def test_paths_with_letters_that_spark_takes_for_a_pattern_are_read(
    spark: Any, tmp_path: Path
) -> None:
    place = tmp_path / "a b{c}[d]*?%20"
    place.mkdir()
    job = Job(spark, place, output_path=place / "out")
    job.plan(0)
    job.run(0, "aab")
    assert job.sink.calls == [(0, [("a", 2), ("b", 1)])]
    found: list[Any] = []
    stream = sks.read_output(place / "out", stream=True)
    run_all(stream, lambda df, _: found.extend(map(tuple, df.collect())), tmp_path / "reader")
    assert sorted(found) == [("a", 2), ("b", 1)]


def test_empty_batches_and_partitions_make_whole_versions(job: Job) -> None:
    for batch, users in enumerate(["", "a", "", "a"]):
        job.plan(batch)
        job.run(batch, users, tasks=4)
    assert job.sink.batches == {0: [], 1: [("a", 1)], 2: [], 3: [("a", 2)]}
    for version in sk.checkpoints(job.state):
        assert version.key_groups == (range(16),)


# ---- What does not fit together


def test_a_second_query_on_the_same_state_is_refused_and_says_how_to_go_on(job: Job) -> None:
    job.plan(0)
    job.run(0, "a")
    before, old = digest(job.state), job.query
    job.query = Query(job.place / "cp2")
    job.plan(0)
    with pytest.raises(StatefulOpError, match=f"another query, {old.id}.*continue_from"):
        job.run(0, "a")
    with pytest.raises(StatefulOpError, match="another query"):
        job.run(0, "a", continue_from="some other")
    assert digest(job.state) == before
    job.run(0, "ab", continue_from=old.id)  # the checkpoint was deleted, say
    assert job.counts == Counter("aab")
    job.plan(1)
    job.run(1, "b", continue_from=old.id)  # it may stay in the program
    job.query = old
    job.plan(1)
    with pytest.raises(StatefulOpError, match="another query"):
        job.run(1, "a")  # the old one is shut out from now on
    assert job.counts == Counter("aabb")


def test_a_rolled_back_checkpoint_is_refused_or_the_state_goes_back_too(job: Job) -> None:
    for batch in range(4):
        job.plan(batch)
        job.run(batch, "ab")
    job.run(2, "ab")  # planned as it was: these are its rows
    job.plan(2, stamp=99)  # planned anew
    before = digest(job.state)
    with pytest.raises(StatefulOpError, match=r"at batch 3 of this query.*rolled back"):
        job.run(2, "bcd")
    assert digest(job.state) == before
    job.run(2, "bcd", accept="rollback")
    assert job.counts == Counter("ababbcd")
    job.run(2, "bcd")
    job.plan(2)
    with pytest.raises(StatefulOpError, match="rolled back"):
        job.run(2, "ab")  # as it was before: that version no longer counts
    job.plan(2, stamp=99)
    job.plan(3, stamp=100)
    job.run(3, "a")
    assert job.counts == Counter("ababbcda")
    assert job.sink.calls[-1] == (3, [("a", 3)])


def test_a_batch_that_was_planned_anew_and_done_elsewhere_is_not_mixed_with_this_state(
    job: Job,
) -> None:
    for batch in range(2):
        job.plan(batch)
        job.run(batch, "ab")
    before = digest(job.state)
    job.plan(1, stamp=9)  # from a copy of the checkpoint, with another path
    job.plan(2, stamp=10)
    with pytest.raises(StatefulOpError, match=r"has batch 1 of this query with other rows"):
        job.run(2, "c")
    assert digest(job.state) == before
    (job.query.checkpoint / "offsets" / "1").unlink()  # it cannot be known then
    job.run(2, "c")
    assert job.counts == Counter("ababc")


def test_a_rolled_back_checkpoint_whose_versions_are_gone_is_refused(job: Job) -> None:
    for batch in range(4):
        job.plan(batch)
        job.run(batch, "ab")
    sk.collect(job.state, keep=2)
    job.plan(1, stamp=99)
    with pytest.raises(StatefulOpError, match="cannot go back to before batch 1"):
        job.run(1, "a", accept="rollback")


def test_a_gap_in_the_batches_is_refused_unless_it_is_accepted(job: Job) -> None:
    job.plan(5)
    with pytest.raises(StatefulOpError, match=r"batch 5, and in .* there is no state"):
        job.run(5, "a")
    job.run(5, "a", accept="gap")
    job.plan(8)
    with pytest.raises(StatefulOpError, match=r"batch 8, .*newest is that of batch 5"):
        job.run(8, "a")
    job.run(8, "a", accept=["gap"])
    assert job.counts == {"a": 2}


def test_a_checkpoint_that_is_not_the_querys_is_explained(job: Job) -> None:
    with pytest.raises(StatefulOpError, match=r"offsets/0.* cannot be read.*checkpointLocation"):
        job.run(0, "a")
    job.plan(0)
    (job.query.checkpoint / "metadata").write_text("{}")
    with pytest.raises(StatefulOpError, match="no checkpoint of a query that can be understood"):
        job.run(0, "a")


def test_a_state_of_another_geometry_is_refused(job: Job) -> None:
    job.plan(0)
    job.run(0, "a")
    job.plan(1)
    job.op = sks.StatefulOp(
        count,
        key="user",
        output="user string, n long",
        state={"count": int},
        path=job.state,
        key_groups=32,
    )
    with pytest.raises(StatefulOpError, match="16 key-groups of 1 sub-groups; this op has 32"):
        job.run(1, "a")


def test_a_state_of_another_type_is_refused_and_a_new_state_is_added(job: Job) -> None:
    job.plan(0)
    job.run(0, "a")
    job.plan(1)

    def with_state(hint: Any) -> sks.StatefulOp:
        return sks.StatefulOp(
            lambda key, rows, st: [(key, st.more.add(1))],
            key="user",
            output="user string, n long",
            state={"count": hint, "more": int},
            path=job.state,
            key_groups=16,
        )

    job.op = with_state(str)
    with pytest.raises(Exception, match=r"'count' is stored as .*int.*asked for was .*str"):
        job.run(1, "a")
    job.op = with_state(int)
    job.run(1, "ab")
    assert job.counts == {"a": 1}
    assert contents(job.state, "more", int) == {"a": 1, "b": 1}


def test_the_state_goes_back_to_nothing_if_the_first_batch_is_planned_anew(job: Job) -> None:
    job.plan(0)
    job.run(0, "ab")
    job.plan(0, stamp=1)
    job.run(0, "bc", accept="rollback")
    assert job.counts == {"b": 1, "c": 1}


def test_output_that_is_kept_for_ever_is_not_rolled_back(spark: Any, tmp_path: Path) -> None:
    job = Job(spark, tmp_path, output_path=tmp_path / "out")
    job.plan(0)
    job.run(0, "ab")
    job.plan(0, stamp=1)
    with pytest.raises(StatefulOpError, match="cannot be rolled back"):
        job.run(0, "bc", accept="rollback")


# ---- Two drivers


def test_of_two_drivers_that_compute_one_batch_the_second_is_refused_at_publishing(
    job: Job,
) -> None:
    job.plan(0)
    job.run(0, "ab")
    job.plan(1)
    at_gate, go_on = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def first() -> None:
        try:
            job.run(1, "aa", tasks=2)
        except BaseException as error:
            errors.append(error)

    real = failpoints.visit

    def visit(name: str) -> str | None:
        if name == "spark.computed" and threading.current_thread() is thread:
            at_gate.set()
            assert go_on.wait(300)
        return real(name)

    thread = threading.Thread(target=first)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("statekit.spark.batches.visit", visit)
        thread.start()
        assert at_gate.wait(300)
        job.run(1, "aa", tasks=3)  # the other driver overtakes it
        go_on.set()
        thread.join(300)
    assert len(errors) == 1
    with pytest.raises(StatefulOpError, match=r"another driver has published version 2.*batch 1"):
        raise errors[0]
    assert job.counts == {"a": 3, "b": 1}
    assert job.sink.calls[1:] == [(1, [("a", 3)])]
    job.run(1, "aa")  # a restart is not refused
    assert job.sink.calls[2:] == [(1, [("a", 3)])]


def test_a_collector_that_never_rests_takes_nothing_from_batches_and_replays(
    spark: Any, tmp_path: Path
) -> None:
    job, total = Job(spark, tmp_path, subgroups=4), Counter[str]()
    stop, errors = threading.Event(), []

    def collect() -> None:
        try:
            while not stop.is_set():
                sk.collect(job.state, keep=1)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=collect)
    thread.start()
    try:
        for batch, users in enumerate(["aabc", "b", "cd"]):
            job.plan(batch)
            for tasks in (2, 5):  # the second time it is a replay
                job.run(batch, users, tasks)
            total.update(users)
            assert job.sink.batches[batch] == sorted((user, total[user]) for user in {*users})
    finally:
        stop.set()
        thread.join()
    assert errors == []
    assert job.counts == total


# ---- Workers


def test_a_worker_that_is_killed_before_or_after_its_part_is_written_changes_nothing_twice(
    spark: Any, tmp_path: Path
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()

    def once(name: str) -> bool:
        try:
            (marks / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    class Dying:
        def on_key(self, key: str, rows: Any, st: Any) -> Any:
            n = st.count.add(len(rows))
            if key == "b" and once("before"):
                os.kill(os.getpid(), signal.SIGKILL)
            if key == "c" and once("error"):
                raise RuntimeError("once")
            yield key, n

        def close(self) -> None:  # it is called when the part was written
            if (marks / "before").exists() and once("after"):
                os.kill(os.getpid(), signal.SIGKILL)

    job = Job(spark, tmp_path, function=Dying())
    for batch in range(2):
        job.plan(batch)
        job.run(batch, "abbccc")
    assert sorted(path.name for path in marks.iterdir()) == ["after", "before", "error"]
    assert job.sink.calls == [
        (0, [("a", 1), ("b", 2), ("c", 3)]),
        (1, [("a", 2), ("b", 4), ("c", 6)]),
    ]
    assert job.counts == Counter("abbccc" * 2)


def test_a_batch_that_fails_for_good_is_done_by_a_restart(spark: Any, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.touch()

    def on_key(key: str, rows: Any, st: Any) -> Any:
        n = st.count.add(len(rows))
        if key == "b" and broken.exists():
            raise RuntimeError("broken")
        yield key, n

    job = Job(spark, tmp_path, function=on_key)
    job.plan(0)
    with pytest.raises(Exception, match="broken"):
        job.run(0, "ab")
    broken.unlink()
    job.run(0, "ab")
    assert job.counts == Counter("ab")


# ---- A real query


def test_a_real_checkpoint_that_is_deleted_or_rolled_back_is_noticed(
    spark: Any, tmp_path: Path
) -> None:
    import shutil

    source = Files(tmp_path / "in", "user string")
    job = Job(spark, tmp_path / "job")
    checkpoint = tmp_path / "real"
    function = job.op.foreach_batch(job.sink, checkpoint=checkpoint, parallelism=2)
    source.add(user=["a"])
    run_all(source.stream(spark), function, checkpoint)
    shutil.copytree(checkpoint, tmp_path / "copy")
    source.add(user=["b"])
    run_all(source.stream(spark), function, checkpoint)
    shutil.rmtree(checkpoint)
    shutil.copytree(tmp_path / "copy", checkpoint)
    source.add(user=["c"])
    before = digest(job.state)
    with pytest.raises(Exception, match="rolled back"):
        run_all(source.stream(spark), function, checkpoint)
    shutil.rmtree(checkpoint)
    with pytest.raises(Exception, match="belongs to another query"):
        run_all(source.stream(spark), function, checkpoint)
    assert digest(job.state) == before
    assert job.counts == Counter("ab")
