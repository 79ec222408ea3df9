"""Periodic checkpoints: taken between records, failures reported, older ones removed."""

import errno
import gc
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import statekit as sk
from statekit.checkpoint import writer
from statekit.errors import (
    ArgumentError,
    CheckpointCancelledError,
    FencedError,
    StateKitError,
    StorageError,
)
from statekit.format.manifest import manifest_name
from statekit.live import checkpointer, periodic
from statekit.storage import local

SECONDS_MAX = 60.0


def small(**values: int) -> sk.KVProvider:
    kv = sk.open("memory:", key_groups=4, subgroups=2)
    kv.value("counts", int, default=0).update(values)
    return kv


def counts(kv: sk.KVProvider) -> Any:
    return kv.value("counts", int, default=0)


def restored(place: Path, **options: Any) -> dict[str, int]:
    with sk.restore(place, **options) as kv:
        return dict(counts(kv).items())


def numbers(place: Path) -> list[int]:
    return [one.number for one in sk.checkpoints(place)]


class Clock:
    """A clock that these tests set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(periodic, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Gate:
    """Holds checkpoints up before they are written, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self._open = threading.Semaphore(0), threading.Event()
        write = checkpointer._Run.write

        def wait_first(run: Any) -> Any:
            self.reached.release()
            assert self._open.wait(SECONDS_MAX)
            return write(run)

        monkeypatch.setattr(checkpointer._Run, "write", wait_first)

    def wait(self) -> None:
        assert self.reached.acquire(timeout=SECONDS_MAX)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    found = Gate(monkeypatch)
    yield found
    found.open()


def no_space(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


# ---- One after the other


def test_a_second_checkpoint_waits_for_the_one_that_runs(tmp_path: Path, gate: Gate) -> None:
    kv = small(a=1)
    first = kv.checkpoint_async(tmp_path)
    gate.wait()
    second: list[sk.Checkpoint] = []
    thread = threading.Thread(target=lambda: second.append(kv.checkpoint(tmp_path)))
    thread.start()
    assert not second
    gate.open()
    thread.join()
    assert first.wait(SECONDS_MAX).number == 1
    assert [one.number for one in second] == [2]
    assert second[0].manifest.base == 1


def test_many_at_once_are_taken_one_by_one(tmp_path: Path) -> None:
    kv = small(a=1)
    jobs: list[Any] = []

    def take(at: int) -> None:
        jobs.append(kv.checkpoint_async(tmp_path, metadata={"at": at}))

    threads = [threading.Thread(target=take, args=(at,)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken = [job.wait(SECONDS_MAX) for job in jobs]
    assert sorted(one.number for one in taken) == list(range(1, 9))
    assert not kv._checkpointer._writing


def test_one_that_waits_can_be_cancelled_and_the_running_one_goes_on(
    tmp_path: Path, gate: Gate
) -> None:
    kv = small(a=1)
    first = kv.checkpoint_async(tmp_path)
    gate.wait()
    waiting: list[Any] = []
    made = threading.Event()
    init = checkpointer.CheckpointJob.__init__

    def note(job: Any, *args: Any) -> None:
        init(job, *args)
        waiting.append(job)
        made.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointer.CheckpointJob, "__init__", note)
        failures: list[Any] = []

        def take() -> None:
            try:
                kv.checkpoint_async(tmp_path)
            except CheckpointCancelledError as error:
                failures.append(error)

        thread = threading.Thread(target=take)
        thread.start()
        assert made.wait(SECONDS_MAX)
    waiting[0].cancel()
    thread.join()
    assert len(failures) == 1
    gate.open()
    assert first.wait(SECONDS_MAX).number == 1
    assert kv.checkpoint(tmp_path).number == 2


def test_different_places_do_not_wait_for_each_other(tmp_path: Path, gate: Gate) -> None:
    kv = small(a=1)
    jobs = [kv.checkpoint_async(tmp_path / name) for name in "ab"]
    for _ in jobs:
        gate.wait()
    gate.open()
    assert [job.wait(SECONDS_MAX).number for job in jobs] == [1, 1]


# ---- Keeping


@pytest.mark.parametrize("is_async", [True, False])
def test_keep_removes_older_ones_when_the_new_one_is_there(tmp_path: Path, is_async: bool) -> None:
    kv = small()
    for value in range(1, 6):
        counts(kv)["a"] = value
        if is_async:
            kv.checkpoint_async(tmp_path, keep=2).wait(SECONDS_MAX)
        else:
            kv.checkpoint(tmp_path, keep=2)
        assert numbers(tmp_path) == list(range(max(1, value - 1), value + 1))
    assert restored(tmp_path) == {"a": 5}
    assert restored(tmp_path, at=4) == {"a": 4}


@pytest.mark.parametrize("keep", [0, -1, "3", 1.5, True])
def test_what_is_no_number_to_keep_is_refused_before_anything_is_written(
    tmp_path: Path, keep: Any
) -> None:
    kv = small(a=1)
    for take in (kv.checkpoint, kv.checkpoint_async):
        with pytest.raises(ArgumentError, match="Keep 1 or more"):
            take(tmp_path, keep=keep)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_whose_predecessors_cannot_be_removed_is_taken_and_that_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kv = small(a=1)
    kv.checkpoint(tmp_path)
    fault = StorageError("no gc today.")

    def fail(*_: Any) -> None:
        raise fault

    monkeypatch.setattr(checkpointer, "collect", fail)
    for number in (2, 3, 4):
        job = kv.checkpoint_async(tmp_path, keep=1)
        assert job.wait(SECONDS_MAX).number == number
        assert job.cleanup_error is fault
    said = [record.getMessage() for record in caplog.records if record.name == "statekit"]
    assert len(said) == 1
    assert "no gc today" in said[0]
    monkeypatch.undo()
    assert kv.checkpoint_async(tmp_path, keep=1).wait(SECONDS_MAX).number == 5
    assert numbers(tmp_path) == [5]


# ---- Between records


def test_poll_takes_one_when_it_is_due_and_never_by_itself(tmp_path: Path, clock: Clock) -> None:
    kv = small(a=1)
    every = kv.checkpoint_every(tmp_path, seconds=30, background=False)
    assert "statekit-periodic" not in {thread.name for thread in threading.enumerate()}
    assert not every.due
    assert every.poll() is None
    clock.now += 29.9
    assert every.poll() is None
    clock.now += 0.2
    assert every.due
    assert numbers(tmp_path) == []
    job = every.poll()
    assert job is not None
    assert job.wait(SECONDS_MAX).number == 1
    assert every.poll() is None
    assert (every.taken, every.last, every.errors) == (1, job.wait(), every.errors)
    clock.now += 30
    assert every.poll() is not None
    every.stop()
    assert (every.taken, numbers(tmp_path)) == (2, [1, 2])
    clock.now += 1000
    assert not every.due
    assert every.poll() is None


def test_every_polled_checkpoint_is_of_one_record_and_has_its_offset(
    tmp_path: Path, clock: Clock
) -> None:
    """A record changes two states and then its offset: no checkpoint has only half of that."""
    kv = small()
    first, second = kv.value("first", int, default=0), kv.value("second", int, default=0)
    offset = 0
    with kv.checkpoint_every(
        tmp_path, seconds=3, keep=1000, background=False, metadata=lambda: {"offset": offset}
    ) as every:
        for record in range(100):
            job = every.poll()
            first[f"k{record % 7}"] += 1
            clock.now += 1
            second[f"k{record % 7}"] += 1
            offset += 1
            if job is not None:
                job.wait(SECONDS_MAX)
    found = sk.checkpoints(tmp_path)
    assert len(found) == 33
    for one in found:
        with sk.restore(tmp_path, at=one.number) as back:
            ones = dict(back.value("first", int).items())
            assert ones == dict(back.value("second", int).items())
            assert sum(ones.values()) == one.metadata["offset"]


def test_poll_does_not_wait_for_one_that_is_being_written(
    tmp_path: Path, clock: Clock, gate: Gate
) -> None:
    kv = small(a=1)
    every = kv.checkpoint_every(tmp_path, seconds=10, background=False)
    clock.now += 10
    job = every.poll()
    assert job is not None
    gate.wait()
    clock.now += 100
    assert not every.due
    assert every.poll() is None
    gate.open()
    job.wait(SECONDS_MAX)
    assert every.due  # it is late
    assert every.poll() is not None
    every.stop()
    assert every.taken == 2


def test_poll_is_for_those_that_say_when(tmp_path: Path) -> None:
    kv = small(a=1)
    with (
        kv.checkpoint_every(tmp_path, seconds=1000) as every,
        pytest.raises(ArgumentError, match="background=False"),
    ):
        every.poll()


def test_older_ones_are_removed_as_they_are_taken(tmp_path: Path, clock: Clock) -> None:
    kv = small(a=1)
    with kv.checkpoint_every(tmp_path, seconds=1, keep=2, background=False) as every:
        for value in range(5):
            counts(kv)["a"] = value
            clock.now += 1
            job = every.poll()
            assert job is not None
            job.wait(SECONDS_MAX)
    assert numbers(tmp_path) == [4, 5]


def test_a_provider_that_owns_nothing_takes_none(tmp_path: Path, clock: Clock) -> None:
    kv = small(a=1)
    kv.split([range(4)])
    with kv.checkpoint_every(tmp_path, seconds=1, background=False) as every:
        clock.now += 1
        assert every.poll() is None
        assert not every.errors
        assert every.failed == 0


def test_closing_waits_for_the_one_that_was_begun(tmp_path: Path, clock: Clock) -> None:
    kv = small(a=1)
    every = kv.checkpoint_every(tmp_path, seconds=1, background=False)
    clock.now += 1
    every.poll()
    kv.close()
    assert every.taken == 1
    assert restored(tmp_path) == {"a": 1}


def test_a_base_that_is_gone_makes_the_next_one_full_at_once(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = small(a=1)
    kv.checkpoint(tmp_path)
    write = checkpointer._Run.write
    pending = [1]

    def remove_base(run: Any) -> Any:
        if pending:
            pending.pop()
            (tmp_path / manifest_name(1)).unlink()
        return write(run)

    monkeypatch.setattr(checkpointer._Run, "write", remove_base)
    with kv.checkpoint_every(tmp_path, seconds=100, background=False) as every:
        clock.now += 100
        job = every.poll()
        assert job is not None
        assert job._done.wait(SECONDS_MAX)
        assert every.poll() is not None  # though it is not time for it
    assert (every.taken, every.failed, list(every.errors)) == (1, 0, [])
    assert restored(tmp_path) == {"a": 1}


# ---- Failures


def take(every: sk.PeriodicCheckpoints, clock: Any) -> None:
    """Takes the next one, and looks at its outcome."""
    clock.now = max(clock.now, every._due)
    if (job := every.poll()) is not None:
        assert job._done.wait(SECONDS_MAX)
    assert every.poll() is None  # it is not time for another


def test_a_failure_is_logged_once_for_each_cause_and_given_to_on_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kv = small(a=1)
    told: list[Exception] = []
    faults: list[OSError] = []

    def fsync(_: int) -> None:
        if faults:
            raise faults[0]

    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(patch)
        patch.setattr(local.os, "fsync", fsync)
        every = kv.checkpoint_every(tmp_path, seconds=1, background=False, on_error=told.append)
        faults.append(OSError(errno.ENOSPC, "No space left on device"))
        for _ in range(3):
            take(every, clock)
        faults[0] = OSError(errno.EIO, "Input/output error")
        take(every, clock)
        assert (every.taken, every.failed) == (0, len(told))
        assert list(every.errors) == told
        assert {type(error) for error in told} == {StorageError}
        failed = kv.metrics().checkpoints.failed
        assert failed == every.failed == 4
        errors = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert [record.name for record in errors] == ["statekit"] * 2
        assert "No space left" in errors[0].getMessage()
        assert "Input/output" in errors[1].getMessage()
        assert str(tmp_path) in errors[0].getMessage()
        faults.clear()
        caplog.clear()
        take(every, clock)
        assert ["taken again" in record.getMessage() for record in caplog.records] == [True]
        assert kv.metrics().checkpoints.taken == 1
        faults.append(OSError(errno.ENOSPC, "No space left on device"))
        take(every, clock)
        assert "No space left" in caplog.records[-1].getMessage()  # the cause was gone in between
        faults.clear()
        every.stop()
    assert restored(tmp_path) == {"a": 1}


def test_what_on_error_raises_comes_out_of_poll_and_polling_can_go_on(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StopNowError(Exception):
        pass

    def give_up(error: Exception) -> None:
        raise StopNowError from error

    kv = small(a=1)
    every = kv.checkpoint_every(tmp_path, seconds=1, background=False, on_error=give_up)
    with monkeypatch.context() as patch:
        patch.setattr(writer.Attempt, "publish", no_space)
        clock.now += 1
        job = every.poll()
        assert job is not None
        assert job._done.wait(SECONDS_MAX)
        with pytest.raises(StopNowError):
            every.poll()
    clock.now += 1
    job = every.poll()
    assert job is not None
    assert job.wait(SECONDS_MAX).number == 1
    every.stop()


def test_on_error_may_stop_them(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer.Attempt, "publish", no_space)
    kv = small(a=1)
    every = kv.checkpoint_every(
        tmp_path, seconds=1, background=False, on_error=lambda _: every.stop()
    )
    take(every, clock)
    clock.now += 100
    assert every.poll() is None
    assert every.failed == 1


def test_a_thread_that_takes_them_tells_too_and_survives_what_on_error_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told = threading.Semaphore(0)

    def fail_too(error: Exception) -> None:
        told.release()
        raise KeyError("oops")

    monkeypatch.setattr(writer.Attempt, "publish", no_space)
    kv = small(a=1)
    with kv.checkpoint_every(tmp_path, seconds=0.001, on_error=fail_too) as every:
        for _ in range(3):
            assert told.acquire(timeout=SECONDS_MAX)
        monkeypatch.undo()
        while not every.taken:
            time.sleep(0)
    assert every.failed >= 3
    messages = [record.getMessage() for record in caplog.records]
    assert sum("a checkpoint to" in message for message in messages) == 1
    assert any("on_error" in message for message in messages)


def test_a_replaced_process_is_told_so(tmp_path: Path, clock: Clock) -> None:
    kv = small(a=1)
    told: list[Exception] = []
    every = kv.checkpoint_every(tmp_path, seconds=1, background=False, on_error=told.append)
    take(every, clock)
    with sk.restore(tmp_path) as new:
        new.checkpoint(tmp_path)
    take(every, clock)
    every.stop()
    assert {type(error) for error in told} == {FencedError}


def test_metadata_that_fail_are_a_failure_like_any_other(tmp_path: Path, clock: Clock) -> None:
    kv = small(a=1)

    def metadata() -> dict[str, Any]:
        raise LookupError("no offset yet")

    every = kv.checkpoint_every(tmp_path, seconds=1, background=False, metadata=metadata)
    clock.now += 1
    assert every.poll() is None
    assert [type(error) for error in every.errors] == [LookupError]
    assert not isinstance(every.errors[0], StateKitError)
    every.stop()


def test_what_is_no_function_is_no_on_error(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="on_error"):
        small().checkpoint_every(tmp_path, seconds=1, on_error="log")  # type: ignore[arg-type]


def test_one_that_was_stopped_keeps_nothing(tmp_path: Path, clock: Clock) -> None:
    kv = small(a=1)
    every = kv.checkpoint_every(tmp_path, seconds=1, background=False)
    take(every, clock)
    every.stop()
    del every
    gc.collect()
    assert not kv._checkpointer._periodic
    assert not [one for one in gc.get_objects() if isinstance(one, sk.PeriodicCheckpoints)]
