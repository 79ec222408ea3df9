"""Rescales of a job that runs, in real processes: every strategy, and what comes between.

The oracle is that of test_engine.py: every count of every word must come out once.
"""

import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from test_engine import TIMEOUT_S, finish

from statekit.engine.rescales import Rescale
from statekit.engine.running import Running
from statekit.engine.strategies import RESTART, STRATEGIES
from statekit.errors import EngineError

Run = Callable[[], Running]
ENDLESS: Any = {"step": 1, "gap_s": 600}  # a rescale that stays between two moves


@pytest.fixture
def threads() -> Any:
    with ThreadPoolExecutor() as found:
        yield found


def wait_until(is_so: Callable[[], bool], done: "Future[Any]") -> None:
    while not is_so() and not done.done():
        wait([done], 0.01)


def is_moving(job: Running) -> bool:
    """Whether a rescale is between its first move and its last."""
    return any(one.phase == "moving" and one.moved > 0 for one in job.rescales)


def counts(job: Running) -> list[str]:
    return sorted(name for name in job.pids if name.startswith("count"))


def failure(future: "Future[Rescale]", text: str) -> None:
    with pytest.raises(EngineError, match=text):
        future.result(TIMEOUT_S)


def test_a_stage_is_scaled_out_and_in_by_all_strategies(run: Run, tmp_path: Path) -> None:
    job = run()
    for strategy in [*STRATEGIES, RESTART]:
        out = job.scale("count", 3, strategy)
        assert (out.before, out.after, out.end, out.progress) == (2, 3, "done", 1.0)
        assert len(counts(job)) == 3
        assert {*job.owners("count")} == {*counts(job)}
        job.checkpoint()
        assert job.scale("count", 2, strategy).after == 2
        assert len(counts(job)) == 2
    finish(job, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", [*STRATEGIES, RESTART])
@pytest.mark.parametrize("victim", ["count-0", "count-1", "count-2", "source-0", "sink-0"])
def test_a_process_is_killed_in_a_rescale(
    run: Run, tmp_path: Path, threads: ThreadPoolExecutor, strategy: str, victim: str
) -> None:
    kill_in_a_rescale(run(), tmp_path, threads, strategy, victim)


def test_an_old_owner_is_killed_in_a_rescale(
    run: Run, tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    kill_in_a_rescale(run(), tmp_path, threads, "seamless", "count-0")


def kill_in_a_rescale(
    job: Running, folder: Path, threads: ThreadPoolExecutor, strategy: str, victim: str
) -> None:
    first = job.checkpoint()
    how = ENDLESS if strategy != RESTART else {}
    scaling = threads.submit(job.scale, "count", 3, strategy, **how)
    wait_until(lambda: victim in job.pids and (strategy == RESTART or is_moving(job)), scaling)
    os.kill(job.pids[victim], signal.SIGKILL)
    failed = scaling.exception(TIMEOUT_S)  # None: it was done before the kill
    assert failed is None or "the job went back to checkpoint" in str(failed)
    assert job.rescales[0].end == ("done" if failed is None else "failed")
    assert job.checkpoint() > first
    assert job.scale("count", 3, strategy).end == "done"
    finish(job, folder)


# ---- A second one


def test_rescales_are_superseded_and_aborted_and_wait_for_their_turn(
    run: Run, tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    job = run()
    supersede(job, threads)
    wait_for_a_turn(job, threads)
    abort(job, threads)
    assert job.scale("count", 3).end == "done"
    finish(job, tmp_path)


def supersede(job: Running, threads: ThreadPoolExecutor) -> None:
    """From two workers by way of four to three."""
    first = threads.submit(job.scale, "count", 4, **ENDLESS)
    wait_until(lambda: is_moving(job), first)
    second = threads.submit(job.scale, "count", 3, "prioritised")
    failure(first, "rescale 1 of count was superseded: rescale 2 came: 3 workers")
    assert second.result(TIMEOUT_S).after == 3
    one, two = job.rescales
    assert (one.before, one.after, one.end) == (2, 4, "superseded")
    assert (two.before, two.after, two.end) == (4, 3, "done")
    assert {*job.owners("count")} == {*counts(job)} == {"count-0", "count-1", "count-2"}


def wait_for_a_turn(job: Running, threads: ThreadPoolExecutor) -> None:
    """From three workers to two; and key-groups are moved afterwards."""
    first = threads.submit(job.scale, "count", 2, step=8, gap_s=0.2)
    wait_until(lambda: is_moving(job), first)
    checkpoint = threads.submit(job.checkpoint)  # between two moves
    second = threads.submit(job.move, "count", range(5), "count-1")
    assert first.result(TIMEOUT_S).end == second.result(TIMEOUT_S).end == "done"
    assert checkpoint.result(TIMEOUT_S) > 0
    assert job.owners("count")[:5] == ["count-1"] * 5
    assert job.rescales[-1].seconds["waiting"] > 0


def abort(job: Running, threads: ThreadPoolExecutor) -> None:
    """From two workers on the way to four, and back."""
    with pytest.raises(EngineError, match="no rescale is under way"):
        job.abort_rescale()
    before = job.owners("count")
    first = threads.submit(job.scale, "count", 4, **ENDLESS)
    wait_until(lambda: is_moving(job), first)
    number = job.rescales[-1].number
    later = threads.submit(job.drain, "count-0")
    wait_until(lambda: len(job.rescales) > number, later)
    assert job.abort_rescale(number + 1).end == "aborted"  # it had not begun
    failure(later, f"rescale {number + 1} of count was aborted")
    aborted = job.abort_rescale()
    assert (aborted.end, aborted.number, aborted.moved, aborted.after) == ("aborted", number, 0, 2)
    assert aborted.seconds["returning"] > 0
    failure(first, f"rescale {number} of count was aborted: somebody asked for it")
    assert job.owners("count") == before
    assert counts(job) == ["count-0", "count-1"]


# ---- By hand


def test_a_worker_is_drained_and_key_groups_are_moved(run: Run, tmp_path: Path) -> None:
    job = run()
    job.checkpoint()
    refuse(job)
    moved = job.move("count", [0, 1, range(8, 12)], "count-1", "pause")
    expected = {0, 1, 8, 9, 10, 11}
    assert all(job.owners("count")[group] == "count-1" for group in expected)
    assert (moved.before, moved.after, moved.goal) == (2, 2, "key-groups 0-1, 8-11 to count-1")
    assert job.drain("count-0").end == "done"
    assert {*job.owners("count")} == {"count-1"}
    assert counts(job) == ["count-1"]
    with pytest.raises(EngineError, match="'count-1' is the last worker of its stage"):
        job.drain("count-1")
    job.scale("count", 2)
    job.move("count", range(64), "count-1")
    shares = job.owners("count")
    job.checkpoint()
    os.kill(job.pids["count-1"], signal.SIGKILL)  # what was placed by hand is so afterwards
    job.checkpoint()
    names = dict(zip(["count-1", "count-2"], ["count-0", "count-1"], strict=True))
    assert job.owners("count") == [names[name] for name in shares]
    finish(job, tmp_path)


def refuse(job: Running) -> None:
    """What cannot be done says why."""
    for ask, text in (
        (lambda: job.scale("nothing", 2), "has no stage 'nothing'. It has source, count, sink"),
        (lambda: job.scale("source", 2), "only keyed stages are scaled"),
        (lambda: job.scale("count", 0), "cannot have 0 workers"),
        (lambda: job.scale("count", 129), "It has 128 key-groups: ask for 1 to that many"),
        (lambda: job.scale("count", 2, "magic"), "There are seamless, prioritised"),
        (lambda: job.scale("count", 2, step=-1), "pass a number of key-groups"),
        (lambda: job.scale("count", 2, gap_s=float("nan")), "pass seconds"),
        (lambda: job.scale("count", 2, "fluid", pace=5), "'fluid' is none"),
        (lambda: job.scale("count", 2, pace=0), "pass bytes a second"),
        (lambda: job.scale("count", 2, RESTART, step=5), "has no step, gap or pace"),
        (lambda: job.drain("count-7"), "no worker 'count-7'. It has count-0, count-1"),
        (lambda: job.drain("nobody"), "has no stage 'nobody'"),
        (lambda: job.move("count", [128], "count-0"), "key-group 128 is none"),
        (lambda: job.move("count", [1], "sink-0"), "no worker 'sink-0'"),
        (lambda: job.move("count", [], "count-0"), "no key-groups are named"),
        (lambda: job.abort_rescale(3), "no rescale 3 is under way"),
    ):
        with pytest.raises(EngineError, match=text):
            ask()
    assert job.rescales == []
