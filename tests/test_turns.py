"""Short turns of the interpreter (statekit/turns.py): as long as they are needed, and no longer."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from interrupts import Run, each_point

import statekit as sk
from statekit import turns
from statekit.turns import short_turns


@pytest.fixture(autouse=True)
def interval() -> Iterator[float]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield 0.005
    sys.setswitchinterval(before)


def now() -> float:
    return pytest.approx(sys.getswitchinterval(), rel=0.01)  # type: ignore[no-any-return]


def test_the_interval_is_short_until_the_last_user_has_ended() -> None:
    with short_turns():
        assert now() == 0.0001
        with pytest.raises(ZeroDivisionError), short_turns():
            raise ZeroDivisionError
        assert now() == 0.0001
    assert now() == 0.005


def test_an_interval_that_the_program_sets_stays() -> None:
    with short_turns():
        sys.setswitchinterval(0.02)
    assert now() == 0.02
    sys.setswitchinterval(0.00005)
    with short_turns():
        assert now() == 0.00005
    assert now() == 0.00005


def test_threads_may_come_and_go() -> None:
    def come_and_go() -> None:
        for _ in range(200):
            with short_turns():
                assert now() == 0.0001

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert now() == 0.005


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_child_of_fork_has_the_interval_of_the_program() -> None:
    """The threads that want short turns, one of which may hold the lock, are not in the child."""
    with short_turns(), turns._lock:
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            signal.alarm(20)  # ends a child that hangs
            first = sys.getswitchinterval()
            with short_turns():
                second = sys.getswitchinterval()
            os.write(writer, f"{first:.4f} {second:.4f} {sys.getswitchinterval():.4f}".encode())
            os._exit(0)
        os.close(writer)
        os.waitpid(pid, 0)
        assert os.read(reader, 100) == b"0.0050 0.0001 0.0050"
        os.close(reader)


def test_after_an_interrupt_at_any_line_the_next_user_ends_it_all() -> None:
    def take(_: None) -> None:
        with short_turns():
            pass

    def check(_: None, run: Run) -> None:
        with short_turns():
            assert now() == 0.0001
        assert now() == 0.005

    ran = list(each_point(lambda: None, take, check, files=[turns], calls=True))
    assert any(run.is_interrupted for run in ran)


def test_a_checkpoint_takes_short_turns_and_ends_them(tmp_path: Path) -> None:
    with sk.open("memory:") as kv:
        visits = kv.value("visits", int)
        visits["a"] = 1
        seen = []
        stop = threading.Event()

        def watch() -> None:
            while not stop.is_set():
                seen.append(sys.getswitchinterval())

        thread = threading.Thread(target=watch)
        thread.start()
        kv.checkpoint(str(tmp_path))
        stop.set()
        thread.join()
        assert min(seen) == pytest.approx(0.0001, rel=0.01)
        assert now() == 0.005


def test_fetching_takes_short_turns_and_ends_them() -> None:
    pytest.importorskip("grpc")
    old, new = sk.open("memory:"), sk.open("memory:", owned=())
    old.value("hits", int).put_many([f"k{at}" for at in range(100)], list(range(100)))
    migration = new.fetch_from(old.serve().address, key_groups=range(128))
    assert new.value("hits", int)["k7"] == 7
    migration.wait()
    new.close()
    old.close()
    assert now() == 0.005
