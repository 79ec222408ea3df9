"""Ctrl-C at any line of taking or restoring a checkpoint leaves no trace: all works after it.

No job or lock is left, no file is open, no snapshot makes writers wait, and the next checkpoint and
the next restore are right.
"""

import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from interrupts import NIGHTLY, Run, each_point

import statekit
import statekit as sk
import statekit.uninterrupted as uninterrupted_module
from statekit.storage import open_storage
from statekit.uninterrupted import uninterrupted

ENTRIES = {f"k{i}": i for i in range(50)}
EVERY = 1 if NIGHTLY else 5  # every fifth place is tried
SECONDS_MAX = 60.0


class Scene(NamedTuple):
    """What is there before a step."""

    kv: sk.KVProvider
    place: Path
    files: set[str]  # those that the process has open
    made: list[Any]  # what the step returned


def open_files() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except OSError:
            continue  # the descriptor of the listing itself
    return found


_threads_before: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _note_threads() -> None:
    """What a test before has left behind must not fail those that come after it."""
    _threads_before.clear()
    _threads_before.update(threading.enumerate())


def quiet() -> None:
    """Waits until all threads of statekit that end by themselves have ended."""
    for thread in {*threading.enumerate()} - _threads_before:
        if thread.name.startswith("statekit-") and thread is not threading.current_thread():
            thread._started.wait(SECONDS_MAX)  # type: ignore[attr-defined]  # it may just begin
            thread.join(SECONDS_MAX)
            assert not thread.is_alive(), f"{thread.name} does not end"


def scenes(tmp_path: Path, home: str = "memory:", taken: int = 1) -> Callable[[], Scene]:
    def make() -> Scene:
        for name in ("place", "home", "other"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
        kv = sk.open(home.format(tmp_path / "home"), key_groups=2, subgroups=2)
        kv.value("counts", int).update(ENTRIES)
        for _ in range(taken):
            kv.checkpoint(tmp_path / "place")
        kv.value("counts", int)["k1"] = 100
        quiet()
        return Scene(kv, tmp_path / "place", open_files(), [])

    return make


def contents(kv: sk.KVProvider) -> dict[str, int]:
    return dict(kv.value("counts", int).items())


def restored(place: Path) -> dict[str, int]:
    with sk.restore(place, lazy=False) as kv:
        return contents(kv)


NOW = ENTRIES | {"k1": 100}


def check_untouched(scene: Scene, run: Run) -> None:
    """Nothing is left of an interrupted step, and everything can be done again."""
    quiet()
    kv, place = scene.kv, scene.place
    checkpointer = kv._checkpointer
    assert not checkpointer._jobs
    assert not checkpointer._writing
    assert not kv._residence._frozen
    assert open_files() <= scene.files, "a file is still open"
    assert not list(place.glob("*.tmp-*"))
    storage = open_storage(place)
    assert not any(storage.is_pinned(one.manifest.name) for one in sk.checkpoints(place))
    assert not sk.collect(place, keep=10).is_busy
    assert contents(kv) == NOW
    kv.value("counts", int)["new"] = 1
    before = len(sk.checkpoints(place))
    taken = kv.checkpoint(place)
    assert taken.number == before + 1
    assert restored(place) == NOW | {"new": 1}
    assert sk.collect(place, keep=1).kept == (taken.number,)
    kv.close()


@pytest.mark.parametrize("home", ["memory:", "rocksdb:{}?memory=16MiB"])
@pytest.mark.parametrize("taken", [0, 1])
def test_an_interrupted_checkpoint_leaves_no_trace(tmp_path: Path, home: str, taken: int) -> None:
    def step(scene: Scene) -> None:
        scene.kv.checkpoint(scene.place)

    runs = list(
        each_point(
            scenes(tmp_path, home, taken),
            step,
            check_untouched,
            files=[statekit],
            calls=True,
            every=EVERY,
        )
    )
    assert len(runs) > 30 // EVERY - 1
    assert sum(run.is_interrupted for run in runs) > 0.9 * len(runs)


def test_an_interrupted_start_in_the_background_leaves_no_trace(tmp_path: Path) -> None:
    def step(scene: Scene) -> None:
        scene.kv.checkpoint_async(scene.place, keep=2)

    runs = list(
        each_point(
            scenes(tmp_path), step, check_untouched, files=[statekit], every=EVERY, calls=True
        )
    )
    assert sum(run.is_interrupted for run in runs) > 0.9 * len(runs) > 20 // EVERY


def test_an_interrupted_poll_leaves_no_trace(tmp_path: Path) -> None:
    def step(scene: Scene) -> None:
        with scene.kv.checkpoint_every(
            scene.place, seconds=1e-9, background=False, metadata=lambda: {"offset": 1}
        ) as every:
            every.poll()
            every.poll()

    def check(scene: Scene, run: Run) -> None:
        for every in [*scene.kv._checkpointer._periodic]:
            every.stop()  # it was interrupted before the `with` had it
        check_untouched(scene, run)

    runs = list(each_point(scenes(tmp_path), step, check, files=[statekit], every=EVERY))
    assert sum(run.is_interrupted for run in runs) > 0.9 * len(runs) > 20 // EVERY


@pytest.mark.parametrize("lazy", [True, False])
def test_an_interrupted_restore_leaves_no_trace(tmp_path: Path, lazy: bool) -> None:
    def step(scene: Scene) -> None:
        scene.made.append(sk.restore(scene.place, lazy=lazy))

    def check(scene: Scene, run: Run) -> None:
        for made in scene.made:
            assert contents(made) == ENTRIES
            made.close()
        check_untouched(scene, run)

    runs = list(
        each_point(scenes(tmp_path), step, check, files=[statekit], every=EVERY, calls=True)
    )
    assert sum(run.is_interrupted for run in runs) > 0.9 * len(runs) > 15 // EVERY


def test_an_interrupted_restore_into_a_home_can_be_done_again_at_once(tmp_path: Path) -> None:
    other = f"rocksdb:{tmp_path / 'other'}"

    def step(scene: Scene) -> None:
        scene.made.append(sk.restore(scene.place, home=other))

    def check(scene: Scene, run: Run) -> None:
        for made in scene.made:
            made.close()
        with sk.restore(scene.place, home=other, replace=True) as kv:
            assert contents(kv) == ENTRIES
        check_untouched(scene, run)

    runs = list(
        each_point(scenes(tmp_path), step, check, files=[statekit], every=EVERY, calls=True)
    )
    assert sum(run.is_interrupted for run in runs) > 0.9 * len(runs) > 15 // EVERY


def test_waiting_for_a_job_may_be_interrupted_and_the_job_goes_on(tmp_path: Path) -> None:
    def step(scene: Scene) -> None:
        job = scene.kv.checkpoint_async(scene.place)
        scene.made.append(job)
        job.wait()

    def check(scene: Scene, run: Run) -> None:
        for job in scene.made:
            assert job.wait(SECONDS_MAX).number == 2
        check_untouched(scene, run)

    list(each_point(scenes(tmp_path), step, check, files=[statekit], every=EVERY))


# ---- The tool


def test_what_was_made_for_somebody_who_is_gone_is_undone() -> None:
    made: list[int] = []
    undone: list[int] = []

    def make() -> int:
        made.append(len(made))
        return made[-1]

    def check(_: None, run: Run) -> None:
        quiet()
        if run.is_interrupted:
            assert made == undone
        made.clear()
        undone.clear()

    def step(_: None) -> int:
        return uninterrupted(lambda _: make(), undone.append)

    files = [Path(statekit.__file__).with_name("uninterrupted.py")]
    runs = list(each_point(lambda: None, step, check, files=files, calls=True))
    assert sum(run.is_interrupted for run in runs) > 5


def test_work_that_takes_long_learns_that_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()
    seen: list[bool] = []

    def work(is_abandoned: Callable[[], bool]) -> None:
        begun.set()
        while not is_abandoned():
            time.sleep(0)
        seen.append(True)
        raise InterruptedError

    def interrupt(task: Any) -> None:
        assert begun.wait(SECONDS_MAX)
        raise KeyboardInterrupt

    monkeypatch.setattr(uninterrupted_module._Task, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        uninterrupted(work)
    assert seen == [True]  # and it has ended


def test_other_threads_work_directly() -> None:
    names: list[str] = []
    thread = threading.Thread(
        target=lambda: uninterrupted(lambda _: names.append(threading.current_thread().name)),
        name="mine",
    )
    thread.start()
    thread.join()
    assert names == ["mine"]
    uninterrupted(lambda _: names.append(threading.current_thread().name))
    assert names[1] == "statekit-uninterrupted"


def test_errors_of_the_work_are_raised() -> None:
    def fail(_: Callable[[], bool]) -> None:
        raise LookupError("x")

    with pytest.raises(LookupError, match="x"):
        uninterrupted(fail)
