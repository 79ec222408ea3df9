"""What callers wait for while key-groups are handed over."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from time import sleep
from typing import Any

import pytest

import statekit as sk
from statekit.migration.old_owner import OldOwnerShell
from statekit.migration.waits import Waited, Waits, total_of

SIZE: Any = {"key_groups": 16, "subgroups": 4}
KEYS = [f"k{i}" for i in range(500)]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def pair(stack: ExitStack) -> tuple[sk.KVProvider, sk.KVProvider, str]:
    old = stack.enter_context(sk.open("memory:", **SIZE))
    old.value("n", int).put_many(KEYS, range(len(KEYS)))
    return old, stack.enter_context(sk.open("memory:", owned=(), **SIZE)), old.serve().address


def test_an_own_question_waits_for_the_wire_and_for_decoding(stack: ExitStack) -> None:
    _, new, address = pair(stack)
    arrival = new.fetch_from(address, strategy="on_demand")
    assert arrival.waits.shut > 0
    assert arrival.waits[2:] == (0, 0, 0)
    assert new.value("n", int)[KEYS[3]] == 3
    before = arrival.waits
    assert before.queued == 0
    assert min(before.wire, before.decode) > 0
    assert new.value("n", int)[KEYS[3]] == 3
    assert arrival.waits == before  # it is here: nobody waits


def test_who_waits_for_the_stream_is_queued(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, address = pair(stack)
    may_send = threading.Event()
    send = OldOwnerShell._send

    def held(self: Any, *args: Any) -> Any:
        assert may_send.wait(60)
        yield from send(self, *args)

    monkeypatch.setattr(OldOwnerShell, "_send", held)
    arrival = new.fetch_from(address, strategy="order_unaware")
    reader = threading.Thread(target=lambda: new.value("n", int)[KEYS[3]])
    reader.start()
    while not arrival._waiting:
        sleep(0)  # until the reader waits for its leaf
    may_send.set()
    reader.join()
    arrival.wait(60)
    assert arrival.waits.queued > 0
    assert arrival.waits.wire == 0
    assert old.key_groups == ()


def test_steps_add_up_and_count_the_engine(stack: ExitStack) -> None:
    _, new, address = pair(stack)
    told: list[Any] = []
    steps = new.fetch_from(address, strategy="batched", step=4, on_step=told.append)
    steps.wait(60)
    assert len(told) == 4
    assert steps.waits.aligning > 0
    assert steps.waits.shut == pytest.approx(sum(one.waits.shut for one in steps.arrivals))


def test_metrics_have_the_waits_of_all_hand_overs(stack: ExitStack) -> None:
    _, new, address = pair(stack)
    assert new.metrics().moved.waited_shut_s == 0
    first = new.fetch_from(address, key_groups=range(4), strategy="fluid", on_step=lambda _: None)
    first.wait(60)
    second = new.fetch_from(address, key_groups=range(4, 8))
    second.wait(60)
    expected = total_of((first.waits, second.waits))
    moved = new.metrics().moved
    found = [getattr(moved, f"waited_{what}_s") for what in Waits._fields]
    assert found == pytest.approx([*expected], abs=1e-3)  # both read the clock
    assert sum(found) == pytest.approx(expected.total, abs=1e-3)


def test_waits_of_threads_add_up_and_own_work_does_not_count() -> None:
    waited = Waited()

    def wait() -> None:
        for _ in range(500):
            waited.add(wire=1.0, queued=0.5)
        with waited.by_itself():
            waited.add(decode=100.0)

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert waited.found == Waits(wire=2000.0, queued=1000.0)
    with pytest.raises(KeyError), waited.on("shut"):
        raise KeyError
    assert waited.found.shut > 0
