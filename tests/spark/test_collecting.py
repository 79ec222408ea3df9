"""Collection beside everything else that happens in the place of a StatefulOp. No Spark.

Parts of a batch lie there unpublished, zombies write what nobody will publish, readers are in the
midst of old versions, and drivers replay: collect() may come between any two of these steps, and in
the middle of them. Leaves are 1 or 4 to a key-group.
"""

import random
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_task import batch, publish_reports, rows_of

import statekit as sk
from statekit.checkpoint.reader import open_checkpoint
from statekit.errors import StateKitError
from statekit.spark.task import run_range

USERS = "abcdefghijklmnopqrstuvwxyz"


def output_of(version: sk.Checkpoint) -> dict[str, int]:
    """What a driver that replays the batch gives to the sink."""
    found: dict[str, int] = {}
    for name in version.attachments:
        table = pq.read_table(pa.BufferReader(version.read_attachment(name)))
        found.update(zip(*table.to_pydict().values(), strict=True))
    return found


def check_all(place: Path, model: Counter[str]) -> None:
    with sk.restore(place) as kv:
        assert dict(kv.value("count", int).items()) == model


@pytest.mark.parametrize("subgroups", [1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_collecting_between_any_two_steps_takes_nothing_that_counts(
    tmp_path: Path, subgroups: int, seed: int
) -> None:
    dice = random.Random(f"{seed} {subgroups}")
    model: Counter[str] = Counter()
    models: dict[int, Counter[str]] = {}
    base: sk.Checkpoint | None = None
    readers: list[tuple[Any, Counter[str]]] = []

    def between() -> None:
        """What others do."""
        for _ in range(dice.randrange(3)):
            step = dice.choice(("collect", "open", "read", "close", "replay"))
            if step == "collect":
                sk.collect(tmp_path, keep=dice.randrange(1, 4))
            elif step == "open" and base is not None and len(readers) < 3:
                kv = sk.restore(tmp_path, background=False)
                readers.append((kv, models[base.number]))
                kv.value("count", int)
            elif step == "read" and readers:
                kv, then = dice.choice(readers)
                user = dice.choice(USERS)
                assert kv["count"].get(user) == then.get(user)
            elif step == "close" and readers:
                kv, then = readers.pop(dice.randrange(len(readers)))
                assert dict(kv["count"].items()) == then
                kv.close()
            elif step == "replay" and base is not None:
                newest = open_checkpoint(tmp_path)
                assert newest.number == base.number
                assert output_of(newest).items() <= models[newest.number].items()

    for number in range(1, 9):
        users = "".join(dice.choices(USERS, k=dice.randrange(30)))
        one = batch(tmp_path, base, number, tasks=dice.choice((1, 2, 3, 5)), subgroups=subgroups)
        reports = []
        for groups in one.ranges:
            for _ in range(dice.choice((1, 1, 2))):  # a task that is run again, or a copy of one
                between()
                report = run_range(one, groups, rows_of(users, groups))
            reports.append(report)
        between()
        previous, base = base, publish_reports(tmp_path, one, reports)
        model = model + Counter(users)
        models[number] = model
        assert output_of(base) == {user: model[user] for user in set(users)}
        between()
        if dice.random() < 0.5:  # a zombie of this batch, of which nothing may count
            zombie = batch(tmp_path, previous, number, tasks=2, subgroups=subgroups)
            groups = dice.choice(zombie.ranges)
            with suppress(StateKitError):  # its base is gone, or its number is taken
                run_range(zombie, groups, rows_of("zzz" + users, groups))
        check_all(tmp_path, model)
    for kv, then in readers:
        assert dict(kv["count"].items()) == then
        kv.close()
    sk.collect(tmp_path, keep=1)
    assert len(sk.checkpoints(tmp_path)) == 1
    check_all(tmp_path, model)


@pytest.mark.parametrize("subgroups", [1, 4])
def test_a_collector_that_never_rests_takes_nothing_that_counts(
    tmp_path: Path, subgroups: int
) -> None:
    """And readers of their own threads see whole versions."""
    stop = threading.Event()
    errors: list[BaseException] = []
    seen: list[int] = []

    def repeat(step: Any) -> threading.Thread:
        def run() -> None:
            try:
                while not stop.is_set():
                    step()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def read() -> None:
        with sk.restore(tmp_path, background=False) as kv:
            values = dict(kv.value("count", int).items())
            # Each batch counts each user once: in a whole version all have the same count.
            assert len(set(values.values())) == 1, values
            assert len(values) == len(USERS)
            seen.append(values["a"])

    base, threads = None, []
    try:
        for number in range(1, 13):
            one = batch(tmp_path, base, number, tasks=1 + number % 4, subgroups=subgroups)
            reports = [run_range(one, groups, rows_of(USERS, groups)) for groups in one.ranges]
            base = publish_reports(tmp_path, one, reports)
            if number == 1:
                threads = [repeat(read), repeat(lambda: sk.collect(tmp_path, keep=1))]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    assert seen == sorted(seen)
    check_all(tmp_path, Counter(USERS * 12))
