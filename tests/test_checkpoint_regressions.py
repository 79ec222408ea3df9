"""Faults of checkpoints that a review has proved, each with the property that did not hold.

Nothing here waits for time to pass: if two things must happen in an order, one waits for an event
of the other.
"""

import errno
import gc
import shutil
import tempfile
import threading
import traceback
import tracemalloc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fsspec
import pytest
from test_residence import DictHome
from test_residence import home as home  # a fixture

import statekit as sk
from statekit.checkpoint import writer
from statekit.errors import (
    ArgumentError,
    CheckpointError,
    HomeError,
    StateKitError,
    StorageError,
)
from statekit.format.pack import PackBuilder
from statekit.live import checkpointer
from statekit.residence import freeze as freeze_module
from statekit.residence.loading import Loading
from statekit.residence.residence import Residence
from statekit.storage import fsspec as remote
from statekit.storage import local, open_storage

SECONDS_MAX = 60  # how long an event may take before the test fails


def small(**entries: int) -> sk.KVProvider:
    kv = sk.open("memory:", key_groups=4, subgroups=1)
    counts = kv.value("counts", int)
    for key, count in entries.items():
        counts[key] = count
    return kv


def restored(place: Any) -> dict[str, int]:
    with sk.restore(place, lazy=False) as kv:
        return dict(kv.value("counts", int).items())


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return str(tmp_path / "place")
    return f"memory://{tmp_path.name}-{id(tmp_path)}"


def wipe(place: str) -> None:
    if place.startswith("memory:"):
        fsspec.filesystem("memory").rm(place, recursive=True)
    else:
        shutil.rmtree(place)


def before_write(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Does something once, after a state was frozen and before anything of it is written."""
    write = checkpointer._Run.write
    pending = [act]

    def act_first(run: Any) -> Any:
        while pending:
            pending.pop()()
        return write(run)

    monkeypatch.setattr(checkpointer._Run, "write", act_first)


# ---- Bases


def later(place: str, **values: int) -> sk.KVProvider:
    """A provider whose generation is later than any stranger's in a place that was wiped."""
    small(**values).checkpoint(place)
    kv = sk.restore(place, lazy=False)
    kv.value("counts", int)
    return kv


def use(place: str) -> None:
    """A stranger takes checkpoints 1 and 2."""
    stranger = small(z=1)
    for _ in range(2):
        stranger._checkpointer.start(place, None).wait(SECONDS_MAX)


def test_a_base_is_recognised_by_its_contents_and_not_by_its_number(place: str) -> None:
    kv = later(place, a=1, b=2)
    assert kv.checkpoint(place).number == 2
    wipe(place)
    use(place)
    taken = kv.checkpoint(place)
    assert taken.manifest.base is None
    assert restored(place) == {"a": 1, "b": 2}


def test_a_base_that_is_replaced_while_its_successor_is_written_is_noticed(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = later(place, a=1)
    kv.checkpoint(place)

    def replace() -> None:
        wipe(place)
        use(place)

    before_write(monkeypatch, replace)
    with pytest.raises(CheckpointError, match="Take it again: it will be full") as caught:
        kv.checkpoint_async(place).wait(SECONDS_MAX)
    assert type(caught.value) is CheckpointError
    assert kv.checkpoint_async(place).wait(SECONDS_MAX).manifest.base is None
    assert restored(place) == {"a": 1}


def test_a_base_that_is_gone_makes_the_next_one_full_on_any_storage(place: str) -> None:
    kv = small(a=1)
    kv.checkpoint(place)
    for take in (kv.checkpoint, lambda url: kv.checkpoint_async(url).wait(SECONDS_MAX)):
        wipe(place)
        assert take(place).manifest.base is None
        assert restored(place) == {"a": 1}


def test_a_base_that_goes_while_it_is_needed_makes_a_waiting_caller_s_one_full(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = small(a=1)
    kv.checkpoint(place)
    before_write(monkeypatch, lambda: wipe(place))
    assert kv.checkpoint(place).manifest.base is None
    assert restored(place) == {"a": 1}


def test_a_base_that_is_collected_elsewhere_at_the_last_moment_is_told_as_gone(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local.LocalStorage, "has_locks", False)
    monkeypatch.setattr(remote.RemoteStorage, "has_locks", False)
    kv = small(a=1)
    base = kv.checkpoint(place)
    publish = writer.Attempt.publish

    def collected_first(attempt: Any, **options: Any) -> Any:
        base.storage.delete([base.manifest.name])
        return publish(attempt, **options)

    monkeypatch.setattr(writer.Attempt, "publish", collected_first)
    with pytest.raises(CheckpointError, match="it will be full") as caught:
        kv.checkpoint_async(place).wait(SECONDS_MAX)
    assert type(caught.value) is CheckpointError


def test_what_a_lazy_restore_has_not_read_is_not_referred_to_once_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(a=1).checkpoint(tmp_path)
    monkeypatch.setattr(Residence, "resume_loading", lambda residence: None)
    with sk.restore(tmp_path) as back:
        shutil.rmtree(tmp_path)
        with pytest.raises(CheckpointError, match="still being restored from, is gone"):
            back.checkpoint(tmp_path, base=None)


def test_a_checkpoint_published_while_garbage_is_collected_keeps_its_packs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = small(**{f"k{i}": i for i in range(100)})
    kv.checkpoint(tmp_path)
    kv.checkpoint(tmp_path, base=None)
    old = sk.restore(tmp_path, at=1, lazy=False)
    old.value("counts", int)["k0"] = 5
    going, go = threading.Event(), threading.Event()
    publish = writer.Attempt.publish

    def publish_later(attempt: Any, **options: Any) -> Any:
        going.set()
        assert go.wait(SECONDS_MAX)
        return publish(attempt, **options)

    monkeypatch.setattr(writer.Attempt, "publish", publish_later)
    job = old.checkpoint_async(tmp_path)
    assert going.wait(SECONDS_MAX)
    storage = open_storage(tmp_path)
    real = storage.list

    def published_after_the_first_listing() -> Any:
        entries = real()
        go.set()
        job.wait(SECONDS_MAX)
        return entries

    monkeypatch.setattr(storage, "list", published_after_the_first_listing)
    assert sk.collect(storage, keep=1).removed == (1,)
    assert restored(tmp_path) == {f"k{i}": i for i in range(100)} | {"k0": 5}


# ---- Failures that must not harm others


def test_a_checkpoint_that_cannot_be_started_is_over_for_whoever_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = small(a=1)
    jobs = []

    def fail(*_: Any) -> None:
        jobs.extend(kv._checkpointer._jobs)  # as close() in another thread does
        raise StorageError("as the test wants")

    monkeypatch.setattr(kv._checkpointer, "_base", fail)
    with pytest.raises(StorageError, match="as the test wants"):
        kv.checkpoint(tmp_path)
    (job,) = jobs
    assert job.done
    with pytest.raises(StorageError, match="as the test wants"):
        job.wait(0)
    kv.close()


class Calls:
    """Metadata for periodic checkpoints that let a test wait for the next ones."""

    def __init__(self) -> None:
        self._more = threading.Condition()
        self._count = 0

    def __call__(self) -> dict[str, Any]:
        with self._more:
            self._count += 1
            self._more.notify_all()
            return {"call": self._count}

    def wait_for_more(self, calls: int = 2) -> None:
        """Waits until one was taken, and the next has begun."""
        with self._more:
            until = self._count + calls
            assert self._more.wait_for(lambda: self._count >= until, SECONDS_MAX)


def test_periodic_checkpoints_survive_any_error_and_keep_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = writer._PackWriter.__init__
    faults = [RuntimeError("can't start new thread")]

    def fail_once(self: Any, *args: Any) -> None:
        if faults:
            raise faults.pop()
        start(self, *args)

    monkeypatch.setattr(writer._PackWriter, "__init__", fail_once)
    calls = Calls()
    with small(a=1).checkpoint_every(tmp_path, seconds=0.001, metadata=calls) as periodic:
        calls.wait_for_more(3)
    assert [str(error) for error in periodic.errors] == ["can't start new thread"]
    assert periodic.taken
    assert restored(tmp_path) == {"a": 1}


def test_threads_of_an_attempt_end_if_not_all_of_them_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    packs = []

    def start_one(thread: threading.Thread) -> None:
        if thread.name == "statekit-packs":
            if packs:
                raise RuntimeError("can't start new thread")
            packs.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    with pytest.raises(RuntimeError, match="can't start"):
        small(a=1).checkpoint(tmp_path)
    assert [thread.is_alive() for thread in packs] == [False]


def no_space(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_temporary_directory_is_a_storage_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PACK_BYTES", 1 << 10)
    is_full = threading.Event()

    def full(*_: Any) -> Any:
        is_full.set()
        return no_space()

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    write = remote.RemoteStorage.write

    def slow(storage: Any, name: str, parts: Sequence[Any]) -> None:
        assert is_full.wait(SECONDS_MAX)
        write(storage, name, parts)

    monkeypatch.setattr(remote.RemoteStorage, "write", slow)
    with sk.open("memory:") as kv:
        kv.value("texts", str).put_many([f"k{i}" for i in range(500)], ["x" * 100] * 500)
        with pytest.raises(StorageError, match="No space left") as caught:
            kv.checkpoint(f"memory://{tmp_path.name}-{id(tmp_path)}")
    assert repr(tempfile.gettempdir()) in str(caught.value)


class FullFile(tempfile.SpooledTemporaryFile):  # type: ignore[type-arg]
    write = no_space


def test_rows_that_cannot_be_put_aside_fail_the_checkpoint_and_not_the_flush(
    home: DictHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("the home's client is broken")

    with sk.open("testdict:t", key_groups=4, subgroups=2) as kv:
        counts = kv.value("counts", int)
        for fault, expected, words in (
            (
                (freeze_module, "SpooledTemporaryFile", FullFile),
                StorageError,
                tempfile.gettempdir(),
            ),
            ((home, "load", broken), HomeError, "client is broken"),
        ):
            counts.put_many([f"k{i}" for i in range(100)], [1] * 100)
            kv.flush()
            kv._residence.store.evict(1 << 40)
            with monkeypatch.context() as patched:
                patched.setattr(*fault)
                with kv._residence.freeze() as frozen:
                    counts.put_many([f"k{i}" for i in range(100)], [2] * 100)
                    kv.flush()
                    for _ in range(2):
                        with pytest.raises(expected, match=words):
                            frozen.complete(0, b"")
            assert dict(counts.items()) == {f"k{i}": 2 for i in range(100)}


def test_a_close_that_fails_leaves_periodic_checkpoints_running(
    home: DictHome, tmp_path: Path
) -> None:
    kv = sk.open("testdict:t", key_groups=4, subgroups=2)
    calls = Calls()
    periodic = kv.checkpoint_every(tmp_path / "a", seconds=0.001, metadata=calls)
    stopped = kv.checkpoint_every(tmp_path / "b", seconds=1000)
    stopped.stop()
    kv.value("counts", int)["a"] = 1
    home.fails = lambda call: call == "write"
    with pytest.raises(HomeError):
        kv.close()
    home.fails = lambda call: False
    kv.value("counts", int)["a"] = 2
    calls.wait_for_more()
    assert not stopped._thread.is_alive()
    kv.close()
    assert not periodic._thread.is_alive()
    assert restored(tmp_path / "a") == {"a": 2}


# ---- What is kept in memory


def objects_of(kind: type) -> list[Any]:
    gc.collect()
    return [one for one in gc.get_objects() if isinstance(one, kind)]


def test_errors_of_checkpoints_keep_no_packs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(objects_of(PackBuilder))
    monkeypatch.setattr(local.os, "fsync", no_space)
    monkeypatch.setattr(writer, "PACK_BYTES", 1 << 10)
    kv = sk.open("memory:")
    kv.value("texts", str).put_many([f"k{i}" for i in range(500)], ["x" * 100] * 500)
    job = kv.checkpoint_async(tmp_path)
    with pytest.raises(StorageError, match="No space left") as caught:
        job.wait(SECONDS_MAX)
    calls = Calls()
    with kv.checkpoint_every(tmp_path, seconds=0.001, metadata=calls) as periodic:
        calls.wait_for_more(3)
    assert periodic.errors
    assert caught.value.__traceback__ is not None
    assert len(objects_of(PackBuilder)) == before


def test_the_error_of_a_job_tells_the_lines_and_keeps_no_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local.os, "fsync", no_space)
    job = small(a=1).checkpoint_async(tmp_path)
    assert job._done.wait(SECONDS_MAX)
    assert isinstance(job.error, StorageError)
    assert isinstance(job.error.__cause__, OSError)
    for error in (job.error, job.error.__cause__):
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        assert frames
        assert not [frame for frame in frames if frame.f_locals]


def test_an_attempt_that_was_given_up_keeps_no_pack(tmp_path: Path) -> None:
    before = len(objects_of(PackBuilder))
    attempt = writer.Attempt(open_storage(tmp_path))
    with attempt:
        attempt._room()
    assert len(objects_of(PackBuilder)) == before


def test_jobs_that_are_done_and_periods_that_were_stopped_are_not_kept(tmp_path: Path) -> None:
    kv = small(a=1)
    before = len(objects_of(writer.Attempt))
    jobs = [kv.checkpoint_async(tmp_path / str(at)) for at in range(3)]
    for job in jobs:
        assert job.wait(SECONDS_MAX).new_bytes == job.progress.bytes_written > 0
    periodic = weakref.ref(kv.checkpoint_every(tmp_path / "x", seconds=1000))
    kept = periodic()
    assert kept is not None
    kept.stop()
    del kept
    assert len(objects_of(writer.Attempt)) == before
    assert not kv._checkpointer._jobs
    assert periodic() is None


# ---- Progress, and what it costs the caller


def test_leaves_that_did_not_change_count_as_done_once_the_snapshot_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = sk.open("memory:")
    counts = kv.value("counts", int)
    counts.put_many([f"k{i}" for i in range(5000)], [1] * 5000)
    kv.checkpoint(tmp_path)
    counts["k1"] = 2
    going, go = threading.Event(), threading.Event()
    publish = writer.Attempt.publish

    def publish_later(attempt: Any, **options: Any) -> Any:
        going.set()
        assert go.wait(SECONDS_MAX)
        return publish(attempt, **options)

    monkeypatch.setattr(writer.Attempt, "publish", publish_later)
    job = kv.checkpoint_async(tmp_path)
    assert going.wait(SECONDS_MAX)
    assert job.progress.fraction == 1
    go.set()
    job.wait(SECONDS_MAX)


def test_progress_rises_while_leaves_are_copied_that_are_not_loaded_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = sk.open("memory:", key_groups=8, subgroups=4)
    kv.value("counts", int).put_many([f"k{i}" for i in range(1000)], [1] * 1000)
    kv.checkpoint(tmp_path / "one")
    monkeypatch.setattr(Residence, "resume_loading", lambda residence: None)
    begin, add = checkpointer.CheckpointJob._begin, writer.Attempt.add_frames
    jobs, fractions = [], []

    def note_job(job: Any, attempt: Any) -> None:
        jobs.append(job)
        begin(job, attempt)

    def note_progress(attempt: Any, *args: Any, **options: Any) -> None:
        fractions.append(jobs[0].progress.fraction)
        add(attempt, *args, **options)

    monkeypatch.setattr(checkpointer.CheckpointJob, "_begin", note_job)
    monkeypatch.setattr(writer.Attempt, "add_frames", note_progress)
    with sk.restore(tmp_path / "one") as back:
        back.value("counts", int)["k1"] = 2
        back.checkpoint(tmp_path / "two")
    assert len(fractions) == 31  # one per leaf, but not for the changed leaf, which is loaded
    assert fractions == sorted(fractions)
    assert fractions[0] < 0.1 < 0.9 < fractions[-1] < 1


def test_the_caller_makes_no_list_of_all_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = sk.open("memory:", key_groups=1 << 17, subgroups=1)
    kv.value("counts", int)["a"] = 1
    kv.checkpoint(tmp_path)
    go = threading.Event()
    before_write(monkeypatch, lambda: go.wait(SECONDS_MAX) and None)
    tracemalloc.start()
    try:
        job = kv.checkpoint_async(tmp_path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        go.set()
    job.wait(SECONDS_MAX)
    assert peak_bytes < 3 * 4 * (1 << 17)  # some arrays of epochs; a list of ints takes nine


# ---- Bad input


@pytest.mark.parametrize("url", [None, 123, b"/tmp/x", ["a"], 1.5])
def test_what_names_no_storage_is_refused(url: Any) -> None:
    kv = small(a=1)
    calls = (
        kv.checkpoint,
        kv.checkpoint_async,
        lambda url: kv.checkpoint_every(url, seconds=1),
        sk.checkpoints,
        sk.collect,
    )
    for call in calls:
        with pytest.raises(ArgumentError, match="names no storage"):
            call(url)


@pytest.mark.parametrize("url", [None, 123, b"/tmp/x", [None], [1]])
def test_what_names_no_checkpoints_is_not_restored(url: Any) -> None:
    with pytest.raises(ArgumentError, match="names no"):
        sk.restore(url)


@pytest.mark.parametrize("keep", ["3", None, 1.5, True])
def test_what_is_no_number_of_checkpoints_to_keep_is_refused(tmp_path: Path, keep: Any) -> None:
    kv = small(a=1)
    kv.checkpoint(tmp_path)
    with pytest.raises(ArgumentError, match="Keep 1 or more"):
        sk.collect(tmp_path, keep=keep)
    with pytest.raises(ArgumentError, match="Keep 1 or more"):
        kv.checkpoint_every(tmp_path, seconds=1, keep=keep)


@pytest.mark.parametrize("base", [True, "x", [1], 1.0])
def test_what_is_no_base_is_refused(tmp_path: Path, base: Any) -> None:
    kv = small(a=1)
    kv.checkpoint(tmp_path)
    with pytest.raises(ArgumentError, match="is no base"):
        kv.checkpoint(tmp_path, base=base)


def test_a_checkpoint_of_another_directory_is_no_base(tmp_path: Path) -> None:
    kv = small(a=1)
    kv.checkpoint(tmp_path / "a")
    other = kv.checkpoint(tmp_path / "b")
    with pytest.raises(CheckpointError, match="cannot be the base"):
        kv.checkpoint(tmp_path / "a", base=other)


@pytest.mark.parametrize(
    ("options", "words"), [({"compression": "zip"}, "zstd"), ({"metadata": [1]}, "metadata")]
)
def test_bad_options_of_periodic_checkpoints_are_refused_at_the_call(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    kv = small(a=1)
    with pytest.raises(ArgumentError, match=words):
        kv.checkpoint_every(tmp_path, seconds=1, **options)
    assert not kv._checkpointer._periodic


# ---- Periodic checkpoints


def test_metadata_of_periodic_checkpoints_are_asked_for_each_time(tmp_path: Path) -> None:
    kv = small(offset=0)
    counts = kv.value("counts", int)
    offset, calls = [0], Calls()

    def offsets() -> dict[str, Any]:
        counts["offset"] += 1  # seen by the checkpoint: it is frozen after this
        offset[0] += 1
        calls()
        return {"offset": offset[0]}

    with kv.checkpoint_every(tmp_path, seconds=0.001, keep=1000, metadata=offsets):
        calls.wait_for_more(4)
    found = sk.checkpoints(tmp_path)
    assert [taken.metadata["offset"] for taken in found] == list(range(1, len(found) + 1))
    for taken in found:
        with sk.restore(tmp_path, at=taken.number) as back:
            assert back.value("counts", int)["offset"] == taken.metadata["offset"]


def test_metadata_that_fail_or_are_none_are_errors_of_that_checkpoint_only(tmp_path: Path) -> None:
    calls = Calls()
    answers: list[Any] = [{"good": 1}, [1]]

    def metadata() -> dict[str, Any]:
        calls()
        found: dict[str, Any] = answers.pop()  # IndexError when there are no more
        return found

    kv = small(a=1)
    with kv.checkpoint_every(tmp_path, seconds=0.001, metadata=metadata) as periodic:
        calls.wait_for_more(4)
    assert [type(error) for error in periodic.errors][:2] == [ArgumentError, IndexError]
    assert not isinstance(periodic.errors[1], StateKitError)
    assert [taken.metadata for taken in sk.checkpoints(tmp_path)] == [{"good": 1}]


def test_a_dict_of_metadata_is_in_every_periodic_checkpoint(tmp_path: Path) -> None:
    kv = small(a=1)
    with kv.checkpoint_every(tmp_path, seconds=0.001, metadata={"job": "x"}) as periodic:
        while not periodic.taken:
            pass
    assert {taken.metadata["job"] for taken in sk.checkpoints(tmp_path)} == {"x"}


def test_no_periodic_checkpoint_is_taken_of_a_provider_that_owns_nothing(tmp_path: Path) -> None:
    kv = small(a=1)
    kv.checkpoint(tmp_path)
    (other,) = kv.split([range(4)])
    calls = Calls()
    with kv.checkpoint_every(tmp_path, seconds=0.001, keep=1, metadata=calls) as periodic:
        calls.wait_for_more(3)
        assert not periodic.taken
        assert not periodic.errors
        assert restored(tmp_path) == {"a": 1}
        kv.merge(other)
        calls.wait_for_more()
    assert periodic.taken
    assert restored(tmp_path) == {"a": 1}


# ---- Leaves that change hands, are cleared, or get a time to live


def test_leaves_merged_back_before_they_are_loaded_are_not_what_the_old_base_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = sk.open("memory:", key_groups=4, subgroups=1)
    values = kv.value("v", int)
    oracle = {f"k{i}": 1 for i in range(200)}
    values.put_many(list(oracle), list(oracle.values()))
    kv.checkpoint(tmp_path / "a")
    (given,) = kv.split([range(2)])
    for key in oracle:
        if kv.key_group_of(key) < 2:
            given["v"][key] = oracle[key] = 2
    given.checkpoint(tmp_path / "b")
    given.close()
    monkeypatch.setattr(Loading, "start", lambda self: None)  # nothing comes by itself
    back = sk.restore(tmp_path / "b")
    back.value("v", int)
    kv.merge(back)
    kv.checkpoint(tmp_path / "a")
    monkeypatch.undo()
    with sk.restore(tmp_path / "a", lazy=False) as restored:
        assert dict(restored.value("v", int).items()) == oracle


def test_a_merge_without_a_state_does_not_revive_what_the_base_has_of_it(tmp_path: Path) -> None:
    kv = sk.open("memory:", key_groups=4, subgroups=1)
    first, second = kv.value("v", int), kv.value("w", int)
    for i in range(100):
        first[f"k{i}"] = second[f"k{i}"] = 1
    kv.checkpoint(tmp_path)
    kv.close()
    half = sk.restore(tmp_path, key_groups=range(2), lazy=False)
    half.value("v", int)
    left = half.value("w", int)
    other = sk.open("memory:", key_groups=4, subgroups=1, owned=range(2, 4))
    other.value("v", int)
    half.merge(other)
    live = dict(left.items())
    half.checkpoint(tmp_path)
    with sk.restore(tmp_path, lazy=False) as back:
        assert dict(back.value("w", int).items()) == live


def test_a_state_cleared_while_its_entries_are_at_home_stays_cleared(tmp_path: Path) -> None:
    with sk.open(f"rocksdb:{tmp_path}/home", key_groups=4, subgroups=1) as kv:
        values = kv.value("v", str)
        for i in range(100):
            values[f"k{i}"] = str(i)
        kv.flush()
        kv.checkpoint(tmp_path / "place")
        kv._residence.store.evict(1 << 40)  # as a lack of memory does
        values.clear()
        kv.checkpoint(tmp_path / "place")
    with sk.restore(tmp_path / "place", lazy=False) as back:
        assert dict(back.value("v", str).items()) == {}


def test_a_time_to_live_that_was_added_runs_on_over_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sk.open("memory:", key_groups=4, subgroups=1) as kv:
        kv.value("v", int).put_many([f"k{i}" for i in range(50)], list(range(50)))
        kv.advance_watermark(1000)
        kv.checkpoint(tmp_path)
    start = Loading.start
    left = []
    for restart in range(1, 4):
        monkeypatch.setattr(Loading, "start", lambda self: None)  # states are declared first
        kv = sk.restore(tmp_path)
        values = kv.value("v", int, ttl=sk.TTL(10, time="event"))
        monkeypatch.setattr(Loading, "start", start)
        kv.wait_loaded()
        kv.advance_watermark(1000 + 8000 * restart)
        left.append(len(dict(values.items())))
        kv.checkpoint(tmp_path)
        kv.close()
    assert left == [50, 0, 0]


class _WordsToEnd:
    """The queue of an attempt's writers. At each None, a thread ends before the next None is put.

    And the thread that has ended is the one to be looked at next, whichever thread the None was
    meant for.
    """

    def __init__(self, attempt: Any) -> None:
        self._queue, self._threads = attempt._queue, attempt._threads
        self._ended: list[threading.Thread] = []

    def put(self, word: None) -> None:
        self._queue.put(word)
        while not (new := [one for one in self._threads if self._is_new(one)]):
            pass
        self._ended.append(new[0])
        others = [one for one in self._threads if one not in self._ended]
        self._threads[:] = [*others[:1], *self._ended, *others[1:]]

    def _is_new(self, thread: threading.Thread) -> bool:
        thread.join(0.01)
        return not thread.is_alive() and thread not in self._ended


def test_every_writer_of_an_attempt_ends_whoever_takes_the_word_for_another(tmp_path: Path) -> None:
    attempt = writer._PackWriter(lambda ref, parts: None, open_storage(tmp_path), False)
    words, threads = attempt._queue, [*attempt._threads]
    attempt._queue = _WordsToEnd(attempt)  # type: ignore[assignment]
    ending = threading.Thread(target=attempt.finish)
    ending.start()
    ending.join(SECONDS_MAX)
    is_hanging = ending.is_alive()
    for _ in threads:
        words.put(None)
    ending.join()
    assert not is_hanging
    assert not any(thread.is_alive() for thread in threads)
