"""A task without Spark: what dead, slow and late attempts leave behind."""

import random
import shutil
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import statekit as sk
from statekit.checkpoint.parts import Part, publish
from statekit.checkpoint.reader import open_checkpoint
from statekit.errors import StatefulOpError, StateKitError
from statekit.spark import State, Timers
from statekit.spark.output import attachments_of
from statekit.spark.task import Batch, Functions, Report, run_range

GROUPS = 16
OUTPUT = pa.schema([("user", pa.string()), ("n", pa.int64())])


def count(key: Any, rows: Any, st: Any) -> Any:
    yield key, st.count.add(len(rows))


def batch(place: Path, base: Any, number: int, tasks: int = 2, **changes: Any) -> Batch:
    found = Batch(
        functions=Functions(on_key=count),
        states={"count": State(int)},
        key=("user",),
        key_type="s",
        output=OUTPUT,
        place=str(place),
        number=number,
        base=base,
        key_groups=GROUPS,
        subgroups=1,
        ranges=tuple(sk.assign(GROUPS, tasks)),
        is_empty=False,
        batch_id=number - 1,
        watermark=None,
        event_time=None,
        late="drop",
        null_keys="error",
        compression=None,
        output_path=None,
    )
    return replace(found, **changes)


def rows_of(users: str, groups: range) -> list[pa.RecordBatch]:
    """What Spark would send to the task of these key-groups."""
    mine = [user for user in users if sk.leaf_of(str, user, GROUPS, 1) in groups]
    return [pa.record_batch({"user": pa.array(mine, pa.string())})] if mine else []


def run_tasks(one: Batch, users: str) -> list[Report]:
    return [run_range(one, groups, rows_of(users, groups)) for groups in one.ranges]


def publish_reports(place: Path, one: Batch, reports: list[Report]) -> sk.Checkpoint:
    outputs = [report.output for report in reports if report.output is not None]
    parts = [Part.from_json(report.part) for report in reports]
    attachments = attachments_of(outputs)
    return publish(str(place), parts, number=one.number, attachments=attachments)


def counts(place: Path) -> dict[str, int]:
    with sk.restore(place) as kv:
        return dict(kv.value("count", int).items())


def test_attempts_of_one_task_write_the_same_files(tmp_path: Path) -> None:
    """So a retry, a speculative copy and a zombie leave nothing of their own."""
    one = batch(tmp_path, None, 1)
    run_tasks(one, "aabc")

    def files() -> set[str]:
        return {path.name for path in tmp_path.iterdir() if not path.name.endswith(".part")}

    before = files()
    reports = run_tasks(one, "aabc")
    assert files() == before
    publish_reports(tmp_path, one, reports)
    assert counts(tmp_path) == Counter("aabc")


def test_a_zombie_that_writes_after_its_batch_was_published_changes_nothing(
    tmp_path: Path,
) -> None:
    first = batch(tmp_path, None, 1)
    base = publish_reports(tmp_path, first, run_tasks(first, "ab"))
    second = batch(tmp_path, base, 2)
    published = publish_reports(tmp_path, second, run_tasks(second, "bc"))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    for groups in second.ranges:  # the same again, and something else: it is not deterministic
        for users in ("bc", "bbbccc"):
            with suppress(StateKitError):  # it may be told that its number is taken
                run_range(second, groups, rows_of(users, groups))
    for name, data in before.items():
        assert (tmp_path / name).read_bytes() == data
    assert counts(tmp_path) == Counter("abbc")
    third = batch(tmp_path, published, 3, tasks=3)
    publish_reports(tmp_path, third, run_tasks(third, "a"))
    sk.collect(tmp_path, keep=1)
    assert counts(tmp_path) == Counter("abbca")
    left = {path.name for path in tmp_path.iterdir() if path.name.startswith("000000000002")}
    assert left == set()


def test_of_two_attempts_only_one_is_published_and_the_output_is_that_of_its_own_state(
    tmp_path: Path,
) -> None:
    one = batch(tmp_path, None, 1)
    run_tasks(one, "aaa")  # of another outcome, and lost
    reports = run_tasks(one, "ab")
    version = publish_reports(tmp_path, one, reports)
    found = {}
    for name in version.attachments:
        table = pq.read_table(pa.BufferReader(version.read_attachment(name)))
        found.update(zip(*table.to_pydict().values(), strict=True))
    assert found == counts(tmp_path) == {"a": 1, "b": 1}


@pytest.mark.parametrize("winner", [0, 1])
def test_of_a_speculative_copy_and_its_original_which_run_at_once_one_counts(
    tmp_path: Path, winner: int
) -> None:
    """They give different results, and write at the same time. Spark takes the report of one."""
    first = batch(tmp_path, None, 1, tasks=1)
    base = publish_reports(tmp_path, first, run_tasks(first, "ab"))
    together = threading.Barrier(2, timeout=300)

    def attempt(name: int) -> Report:
        def on_key(key: Any, rows: Any, st: Any) -> Any:
            together.wait()
            yield key, st.count.add(10 + name)

        functions = Functions(on_key=on_key)
        one = batch(tmp_path, base, 2, tasks=1, functions=functions)
        return run_range(one, range(GROUPS), rows_of("ab", range(GROUPS)))

    with ThreadPoolExecutor(2) as pool:
        reports = [*pool.map(attempt, range(2))]
    published = publish_reports(tmp_path, batch(tmp_path, base, 2, tasks=1), [reports[winner]])
    found = {}
    for name in published.attachments:
        table = pq.read_table(pa.BufferReader(published.read_attachment(name)))
        found.update(zip(*table.to_pydict().values(), strict=True))
    assert found == counts(tmp_path) == {"a": 11 + winner, "b": 11 + winner}
    sk.collect(tmp_path, keep=1)
    assert counts(tmp_path) == found


def test_a_row_that_is_sent_to_the_wrong_task_is_refused(tmp_path: Path) -> None:
    one = batch(tmp_path, None, 1)
    there = rows_of("abcdefgh", one.ranges[1])
    with pytest.raises(sk.errors.NotOwnedError):
        run_range(one, one.ranges[0], there)


def test_a_collector_between_two_batches_takes_nothing_that_is_still_to_be_published(
    tmp_path: Path,
) -> None:
    first = batch(tmp_path, None, 1)
    base = publish_reports(tmp_path, first, run_tasks(first, "ab"))
    second = batch(tmp_path, base, 2)
    reports = run_tasks(second, "ab")
    sk.collect(tmp_path, keep=1)
    publish_reports(tmp_path, second, reports)
    assert counts(tmp_path) == Counter("abab")
    sk.collect(tmp_path, keep=1)
    assert counts(tmp_path) == Counter("abab")


def test_a_base_that_is_gone_is_reported_with_the_host_and_not_taken_for_empty(
    tmp_path: Path,
) -> None:
    first = batch(tmp_path, None, 1)
    base = publish_reports(tmp_path, first, run_tasks(first, "ab"))
    elsewhere = tempfile.mkdtemp(dir=tmp_path)
    for path in tmp_path.glob("*.pack"):
        path.rename(Path(elsewhere) / path.name)
    second = batch(tmp_path, base, 2)
    groups = next(one for one in second.ranges if rows_of("a", one))
    with pytest.raises(StateKitError) as caught:
        run_range(second, groups, rows_of("a", groups))
    assert "must be on storage" in " ".join(getattr(caught.value, "__notes__", []))


def test_a_torn_pack_is_reported_and_not_read(tmp_path: Path) -> None:
    first = batch(tmp_path, None, 1, tasks=1)
    base = publish_reports(tmp_path, first, run_tasks(first, "abcdef"))
    (pack,) = tmp_path.glob("*.pack")
    data = bytearray(pack.read_bytes())
    data[-20] ^= 1
    pack.write_bytes(data)
    second = batch(tmp_path, base, 2, tasks=1)
    with pytest.raises(sk.errors.DamagedError):
        run_tasks(second, "abcdef")


def test_whatever_file_is_torn_or_damaged_a_batch_is_refused_or_exact(tmp_path: Path) -> None:
    """Packs, manifests, parts and attachments: cut off, changed in one bit, emptied or gone."""
    whole = tmp_path / "whole"
    first = batch(whole, None, 1)
    base = publish_reports(whole, first, run_tasks(first, "aabcdef"))
    second = batch(whole, base, 2)
    publish_reports(whole, second, run_tasks(second, "abz"))
    dice = random.Random(5)
    names = sorted(path.name for path in whole.iterdir() if path.stat().st_size)
    refused = 0
    for case in range(60):
        name, place = names[case % len(names)], tmp_path / str(case)
        shutil.copytree(whole, place)
        file = place / name
        data = bytearray(file.read_bytes())
        how = dice.choice(("cut", "bit", "empty", "gone"))
        if how == "bit":
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        file.write_bytes(data[: {"cut": dice.randrange(len(data)), "empty": 0}.get(how)])
        if how == "gone":
            file.unlink()
        try:
            newest = open_checkpoint(place)
            for attached in newest.attachments:  # what a replay gives to the sink
                table = pq.read_table(pa.BufferReader(newest.read_attachment(attached)))
                assert set(zip(*table.to_pydict().values(), strict=True)) <= {
                    *Counter("aabcdef").items(), *Counter("aabcdefabz").items()
                }  # fmt: skip
            third = batch(place, newest, newest.number + 1, tasks=3)
            publish_reports(place, third, run_tasks(third, "az"))
            before = "aabcdefabz" if newest.number == 2 else "aabcdef"
            assert counts(place) == Counter(before + "az"), (name, how)
        except StateKitError:
            refused += 1
    assert 10 < refused < 60


def test_a_schema_that_has_evolved_at_a_restart_is_taken_on_and_another_is_refused(
    tmp_path: Path,
) -> None:
    @dataclass
    class Order:
        id: str

    def before(key: str, rows: Any, st: Any) -> Any:
        st.n.add(len(rows))
        st.order.set(Order(key * 2))
        st.many["x"].append(len(rows))

    states: dict[str, Any] = {"n": State(int), "order": State(Order),
                              "many": State(dict[str, list[int]])}  # fmt: skip
    first = batch(tmp_path, None, 1, states=states, functions=Functions(on_key=before))
    base = publish_reports(tmp_path, first, run_tasks(first, "aab"))

    @dataclass
    class Order:  # type: ignore[no-redef]
        id: str
        lines: list[int] = field(default_factory=list)

    seen: dict[str, Any] = {}

    def after(key: str, rows: Any, st: Any) -> Any:
        seen[key] = (st.n.add(0.5), st.order.get(), st.many["x"][:], st.new.get())
        st.many["x"].append(0.5)

    states = {"n": State(float), "order": State(Order), "many": State(dict[str, list[float]]),
              "new": State(str)}  # fmt: skip
    second = batch(tmp_path, base, 2, states=states, functions=Functions(on_key=after))
    publish_reports(tmp_path, second, run_tasks(second, "abc"))
    assert seen == {
        "a": (2.5, Order("aa"), [2.0], None),
        "b": (1.5, Order("bb"), [1.0], None),
        "c": (0.5, None, [], None),
    }
    wrong = batch(tmp_path, base, 2, states={"many": State(dict[str, list[str]])})
    with pytest.raises(sk.errors.SchemaError, match=r"'many' is stored as .*int.*asked for"):
        run_tasks(wrong, "a")


def test_timers_fire_on_a_task_without_rows_in_order_and_once(tmp_path: Path) -> None:
    states = {"end": Timers(), "count": State(int)}

    def set_timers(key: str, rows: Any, st: Any) -> Any:
        st.end.set(10)
        st.end.set(20)

    fired: list[Any] = []

    def on_timer(key: str, timer: Any, st: Any) -> Any:
        fired.append((timer.due, key))
        st.end.set(5)  # due already: it fires in the next batch, and not for ever
        yield key, st.count.add(1)

    functions = Functions(on_key=set_timers, on_timer=on_timer)
    arguments: dict[str, Any] = {"states": states, "functions": functions, "tasks": 1}
    first = batch(tmp_path, None, 1, **arguments)
    base = publish_reports(tmp_path, first, run_tasks(first, "ba"))
    assert fired == []
    second = batch(tmp_path, base, 2, watermark=15, **arguments)
    base = publish_reports(tmp_path, second, run_tasks(second, ""))
    assert fired == [(10, "a"), (10, "b")]
    third = batch(tmp_path, base, 3, watermark=20, **arguments)
    publish_reports(tmp_path, third, run_tasks(third, ""))
    assert fired[2:] == [(5, "a"), (5, "b"), (20, "a"), (20, "b")]
    assert counts(tmp_path) == {"a": 3, "b": 3}


def test_due_timers_without_a_function_are_an_error(tmp_path: Path) -> None:
    def set_timer(key: str, rows: Any, st: Any) -> Any:
        st.end.set(1)

    changes: dict[str, Any] = {
        "states": {"end": Timers()},
        "functions": Functions(on_key=set_timer),
        "watermark": 5,
        "tasks": 1,
    }
    (report,) = run_tasks(batch(tmp_path, None, 1, **changes), "a")
    assert "1 timers are due, and there is no on_timer" in (report.error or "")


def test_composite_keys_and_timers_go_together(tmp_path: Path) -> None:
    fired = []

    def set_timer(key: Any, rows: Any, st: Any) -> Any:
        st.end.set(key[1])

    def on_timer(key: Any, timer: Any, st: Any) -> Any:
        fired.append((key, timer.due, st.count.add(5)))

    one = batch(
        tmp_path,
        None,
        1,
        tasks=1,
        states={"end": Timers(), "count": State(int)},
        functions=Functions(on_key=set_timer, on_timer=on_timer),
        key=("user", "n"),
        key_type="(si)",
        watermark=2,
    )
    rows = pa.record_batch({"user": ["x", "y", "x"], "n": [2, 3, 1]})
    assert run_range(one, range(GROUPS), [rows]).error is None
    assert fired == [(("x", 1), 1, 5), (("x", 2), 2, 5)]


def test_a_class_is_closed_when_its_task_fails(tmp_path: Path) -> None:
    class Resource:
        calls: list[str] = []  # noqa: RUF012

        def open(self) -> None:
            self.calls.append("open")

        def on_key(self, key: Any, rows: Any, st: Any) -> Any:
            raise StatefulOpError("no")

        def close(self) -> None:
            self.calls.append("close")

    resource = Resource()
    functions = Functions(on_key=resource.on_key, instance=resource)
    (report,) = run_tasks(batch(tmp_path, None, 1, functions=functions, tasks=1), "a")
    assert report.error == "no"
    assert resource.calls == ["open", "close"]
