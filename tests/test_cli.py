"""The command line: what it prints, what it makes, how it ends. Oracles: dicts, other readers."""

import csv
import datetime as dt
import importlib.util
import json
import math
import os
import pty
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import click
import pyarrow.ipc
import pyarrow.parquet
import pytest
from click.testing import CliRunner, Result
from servers import redis_server

import statekit as sk
from statekit.checkpoint.reader import open_checkpoint
from statekit.cli.app import app, sections
from statekit.cli.typetext import parse_type
from statekit.errors import ArgumentError
from statekit.schema import describe

ROOT = Path(__file__).resolve().parent.parent
NOW = dt.datetime(2026, 11, 16, 12, tzinfo=dt.UTC)


@dataclass
class Click:
    url: str
    ms: int
    note: str | None = None


class Spot(NamedTuple):
    x: int
    y: float = 0.5


def run(*args: str | Path, code: int = 0) -> str:
    """The stdout of a command, which must end with this code, and without a traceback."""
    result: Result = CliRunner().invoke(app, [str(arg) for arg in args], prog_name="statekit")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.stdout


def complaint(*args: str | Path, code: int = 1) -> str:
    """What a command says on stderr; nothing may be on stdout."""
    result = CliRunner().invoke(app, [str(arg) for arg in args], prog_name="statekit")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    return result.stderr


def run_json(*args: str | Path, code: int = 0) -> Any:
    return json.loads(run(*args, "--json", code=code))


def program(*args: str | Path, **options: Any) -> "subprocess.CompletedProcess[str]":
    """The same in a process of its own."""
    command = [sys.executable, "-m", "statekit", *map(str, args)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, **options
    )


def fill(kv: sk.KVProvider) -> None:
    visits = kv.value("visits", int)
    clicks = kv.list("clicks", Click)
    prefs = kv.map("prefs", int, float, key=bytes)
    tags = kv.state("tags", set[str], key=int)
    when = kv.value("when", dt.datetime, key=tuple[str, int])
    spots = kv.value("spots", Spot)
    anything = kv.value("anything", object)
    recent = kv.value("recent", str, ttl=sk.TTL(timedelta(days=1), time="event"))
    timers = kv.timers("expiry")
    for number in range(40):
        name = f"user-{number}"
        visits[name] = number
        clicks[name].extend([Click("/a", number), Click("/b", number, 'x,\n"y"')])
        prefs[name.encode()][number] = number / 8
        tags[-number] |= {"a", str(number)}
        when[name, number] = NOW + timedelta(seconds=number)
        spots[name] = Spot(number)
        anything[name] = [None, b"\0", {1: NOW}, math.inf, {"a": number}][number % 5]
        recent[name] = f"täxt\r\n{number}"
        timers.set(name, number)
        timers.set(name, 1000)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Checkpoints 1 and 2 of the states above, and their provider's contents."""
    with sk.open("memory:") as kv:
        kv.advance_watermark(77)
        fill(kv)
        kv.checkpoint(str(tmp_path / "ck"), metadata={"offset": 9})
        kv["visits"]["user-1"] = 100
        del kv["visits"]["user-2"]
        kv["visits"]["new"] = 1
        kv.checkpoint(str(tmp_path / "ck"))
    return tmp_path / "ck"


def contents(*places: Path) -> dict[str, dict[Any, Any]]:
    with sk.restore([str(place) for place in places], lazy=False) as kv:
        kv.value("visits", int), kv.list("clicks", Click), kv.map("prefs", int, float, key=bytes)
        kv.state("tags", set[str], key=int), kv.value("when", dt.datetime, key=tuple[str, int])
        kv.value("spots", Spot), kv.value("anything", object), kv.timers("expiry")
        kv.value("recent", str, ttl=sk.TTL(timedelta(days=1), time="event"))
        return {name: dict(kv[name].items()) for name in kv.schemas}


def damage(place: Path, at: int = 200) -> Path:
    """Flips a bit of the largest pack."""
    pack = max(place.glob("*.pack"), key=lambda file: file.stat().st_size)
    data = bytearray(pack.read_bytes())
    data[at] ^= 4
    pack.write_bytes(data)
    return pack


# ---- Looking


def test_ls_lists_what_there_is(place: Path) -> None:
    first, second = run_json("ls", place)
    assert (first["number"], first["base"], first["watermark"]) == (1, None, 77)
    assert (second["number"], second["base"], second["metadata"]) == (2, 1, {})
    assert first["metadata"] == {"offset": 9}
    assert first["key_groups"] == [[0, 128]]
    assert 0 < second["new_bytes"] < first["new_bytes"]
    lines = run("ls", place).splitlines()
    assert lines[0].split() == ["number", "time", "key-groups", "states", "size", "new", "base"]
    assert len(lines) == 3
    assert lines[2].split()[0] == "2"


def test_ls_lists_workers(place: Path, tmp_path: Path) -> None:
    run("rescale", place, "--workers", "12", "--out", tmp_path / "w")
    rows = run_json("ls", tmp_path / "w")
    assert [row["worker"] for row in rows] == [f"worker-{at}" for at in range(12)]
    assert "worker-11" in run("ls", tmp_path / "w")


def test_ls_goes_on_after_a_damaged_manifest(place: Path) -> None:
    manifest = place / "000000000001.manifest"
    manifest.write_bytes(manifest.read_bytes()[:-8])
    done = program("ls", place, "--json")
    assert [row["number"] for row in json.loads(done.stdout)] == [2]
    assert "000000000001.manifest is damaged" in done.stderr
    assert done.returncode == 1


def test_inspect_counts_and_shows(place: Path) -> None:
    found = run_json("inspect", place, "--limit", "3")
    expected = contents(place)
    states = {state["name"]: state for state in found["states"]}
    assert {name: state["entries"] for name, state in states.items()} == {
        name: len(rows) for name, rows in expected.items()
    }
    assert sum(found["entries_by_key_group"].values()) == sum(map(len, expected.values()))
    for sample in states["clicks"]["sample"]:
        assert sample["value"] == [asdict(click) for click in expected["clicks"][sample["key"]]]
    assert [len(state["sample"]) for state in states.values()] == [3] * len(states)
    text = run("inspect", place)
    assert "entries per key-group" in text
    assert "list[Click]" in text
    assert "█" in text
    assert "tuple[str, int]" in text


def test_inspect_of_an_older_one_of_one_state_and_quickly(place: Path) -> None:
    found = run_json("inspect", place, "--at", "1", "--state", "visits")
    assert [state["name"] for state in found["states"]] == ["visits"]
    assert (found["number"], found["states"][0]["entries"]) == (1, 40)
    assert run_json("inspect", f"{place}@1", "--state", "visits") == found
    quick = run_json("inspect", place, "--quick")
    assert "entries" not in quick["states"][0]
    damage(place)
    assert run_json("inspect", place, "--quick") == quick  # reads no pack


def test_inspect_of_a_key_looks_into_every_state_that_can_have_it(place: Path) -> None:
    found = run_json("inspect", place, "--key", "user-7")["states"]
    assert set(found) == {"visits", "clicks", "spots", "anything", "recent", "expiry"}
    assert found["expiry"] == [7, 1000]
    assert run_json("inspect", place, "--key", "-7")["states"] == {"tags": ["7", "a"]}
    assert "visits" in run("inspect", place, "--key", "user-7")


GETS = [
    ("visits", "user-1", 100),
    ("clicks", "user-3", [asdict(Click("/a", 3)), asdict(Click("/b", 3, 'x,\n"y"'))]),
    ("prefs", "0x757365722d38", {"8": 1.0}),
    ("tags", "-5", ["5", "a"]),
    ("when", '["user-5", 5]', "2026-11-16T12:00:05+00:00"),
    ("spots", "user-5", {"x": 5, "y": 0.5}),
    ("anything", "user-1", {"$bytes": "0x00"}),
    ("anything", "user-3", {"$float": "Infinity"}),
    ("recent", "user-9", "täxt\r\n9"),
    ("expiry", "user-9", [9, 1000]),
]  # fmt: skip


@pytest.mark.parametrize(("state", "key", "value"), GETS)
def test_get_prints_one_value(place: Path, state: str, key: str, value: Any) -> None:
    out = run("get", place, state, key)
    assert json.loads(out) == value
    assert out.count("\n") == 1
    assert run_json("get", place, state, key)["value"] == value


def test_get_of_an_older_checkpoint(place: Path) -> None:
    assert run("get", f"{place}@1", "visits", "user-1") == "1\n"
    assert run("get", place, "visits", "user-1", "--at", "1") == "1\n"
    assert "nothing under 'new'" in complaint("get", f"{place}@1", "visits", "new")


def test_verify_reports_all_damage_and_orphans(place: Path) -> None:
    assert "all good" in run("verify", place)
    (place / f"{'0' * 32}.pack").write_bytes(b"x" * 100)
    (place / "000000000009.manifest.tmp-1234").write_bytes(b"y")
    found = run_json("verify", place)
    assert found["damage"] == []
    assert [Path(orphan["file"]).name for orphan in found["orphans"]] == [
        f"{'0' * 32}.pack",
        "000000000009.manifest.tmp-1234",
    ]
    one = open_checkpoint(place, 1)
    segments = one.manifest.segments
    pack = place / one.manifest.packs[0].name
    data = bytearray(pack.read_bytes())
    for at in (3, 10):
        data[segments[at].offset + 70] ^= 1
    pack.write_bytes(data)
    next(
        file for file in place.glob("*.pack") if file not in (pack,) and file.stat().st_size > 100
    ).unlink()
    done = program("verify", place, "--json")
    assert done.returncode == 3
    found = json.loads(done.stdout)
    places = {(Path(one["file"]).name, one["offset"]) for one in found["damage"]}
    assert {(pack.name, segments[3].offset), (pack.name, segments[10].offset)} <= places
    assert any("not there" in one["message"] for one in found["damage"])
    assert "damaged in 3 places" in run("verify", place, code=3)


def test_verify_of_a_damaged_manifest_calls_nothing_an_orphan(place: Path) -> None:
    (place / "000000000001.manifest").write_bytes(b"junk")
    found = run_json("verify", place, code=3)
    assert len(found["damage"]) == 1
    assert found["orphans"] == []


def test_diff_shows_what_changed(place: Path) -> None:
    found = {one["state"]: one for one in run_json("diff", f"{place}@1", place, code=1)}
    visits = found["visits"]
    assert [visits[kind] for kind in ("added", "removed", "changed", "touched")] == [1, 1, 1, 0]
    assert {"kind": "changed", "key": "user-1", "before": 1, "after": 100} in visits["first"]
    others = [one for name, one in found.items() if name != "visits"]
    assert not any(one["added"] or one["removed"] or one["changed"] for one in others)
    text = run("diff", f"{place}@1", place, code=1)
    assert '~ visits["user-1"]: 1 -> 100' in text
    assert '+ visits["new"] = 1' in text
    assert '- visits["user-2"] = 2' in text
    assert "and 2 more in visits" in run("diff", f"{place}@1", place, "--limit", "1", code=1)
    assert run("diff", place, f"{place}@2") == "no differences\n"


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["{ck}", "{ck}"], 0),
        (["{ck}@1", "{ck}"], 1),
        (["{ck}", "{ck}-not"], 2),
        (["{ck}"], 2),
        (["{ck}", "{ck}@9"], 2),
    ],
)
def test_diff_ends_as_diff_does(place: Path, args: list[str], code: int) -> None:
    done = program("diff", *(arg.format(ck=place) for arg in args))
    assert done.returncode == code
    assert "Traceback" not in done.stderr


# ---- Files


@pytest.mark.parametrize("to", ["parquet", "arrow", "jsonl", "csv"])
def test_what_export_wrote_import_reads_without_options(
    place: Path, tmp_path: Path, to: str
) -> None:
    done = run_json("export", place, "--to", to, "--out", tmp_path / "files")
    expected = contents(place)
    assert {row["state"]: row["entries"] for row in done} == {
        name: len(rows) for name, rows in expected.items()
    }
    run("import", *(row["file"] for row in done), "--into", tmp_path / "new")
    assert contents(tmp_path / "new") == expected
    assert run("diff", place, tmp_path / "new") == "no differences\n"
    one, other = open_checkpoint(place), open_checkpoint(tmp_path / "new")
    assert one.states == other.states
    assert (other.watermark, other.key_group_count, other.subgroups) == (77, 128, 16)


def test_exported_parquet_is_what_other_readers_expect(place: Path, tmp_path: Path) -> None:
    run("export", place, "--to", "parquet", "--out", tmp_path)
    expected = contents(place)
    rows = pyarrow.parquet.read_table(tmp_path / "visits.parquet").to_pydict()
    assert dict(zip(rows["key"], rows["value"], strict=True)) == expected["visits"]
    rows = pyarrow.parquet.read_table(tmp_path / "when.parquet").to_pydict()
    keys = zip(rows["key_0"], rows["key_1"], strict=True)
    assert dict(zip(keys, rows["value"], strict=True)) == expected["when"]
    rows = pyarrow.parquet.read_table(tmp_path / "clicks.parquet").to_pydict()
    assert dict(zip(rows["key"], rows["value"], strict=True)) == {
        key: [asdict(click) for click in clicks] for key, clicks in expected["clicks"].items()
    }
    table = pyarrow.parquet.read_table(tmp_path / "prefs.parquet")
    assert str(table.schema.field("value").type).startswith("map<int64, double")
    assert set(table.column_names) == {"key", "value"}
    assert pyarrow.parquet.read_schema(tmp_path / "recent.parquet").names == [
        "key",
        "value",
        "stamp",
    ]


def test_exported_text_is_what_other_readers_expect(place: Path, tmp_path: Path) -> None:
    run("export", place, "--to", "csv", "--out", tmp_path)
    run("export", place, "--to", "jsonl", "--out", tmp_path)
    expected = contents(place)
    with (tmp_path / "recent.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {row["key"]: row["value"] for row in rows} == expected["recent"]
    assert {row["stamp"] for row in rows} == {"77"}
    with (tmp_path / "clicks.csv").open(newline="", encoding="utf-8") as file:
        found = {row["key"]: json.loads(row["value"]) for row in csv.DictReader(file)}
    assert found == {key: [asdict(one) for one in rows] for key, rows in expected["clicks"].items()}
    text = (tmp_path / "when.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    found = {tuple(line["key"]): dt.datetime.fromisoformat(line["value"]) for line in lines}
    assert found == expected["when"]


def test_export_of_one_state_into_a_file(place: Path, tmp_path: Path) -> None:
    run("export", f"{place}@1", "--to", "arrow", "--state", "visits", "--out", tmp_path / "v.arrow")
    with pyarrow.OSFile(str(tmp_path / "v.arrow")) as source:
        rows = pyarrow.ipc.open_file(source).read_all().to_pydict()
    assert dict(zip(rows["key"], rows["value"], strict=True))["user-1"] == 1
    assert "is there already" in complaint(
        "export", place, "--to", "arrow", "--state", "visits", "--out", tmp_path / "v.arrow"
    )


def test_datetimes_with_and_without_a_zone_in_one_state(tmp_path: Path) -> None:
    with sk.open("memory:") as kv:
        when = kv.value("when", dt.datetime)
        when["a"], when["b"] = NOW, NOW.replace(tzinfo=None)
        kv.checkpoint(str(tmp_path / "ck"))
    run("export", tmp_path / "ck", "--to", "parquet", "--out", tmp_path)
    run("import", tmp_path / "when.parquet", "--into", tmp_path / "new")
    assert run("diff", tmp_path / "ck", tmp_path / "new") == "no differences\n"


@pytest.mark.parametrize("to", ["parquet", "arrow", "jsonl", "csv"])
def test_states_without_entries_and_without_a_watermark(tmp_path: Path, to: str) -> None:
    with sk.open("memory:", key_groups=8, subgroups=2) as kv:
        kv.list("empty", Click)
        recent = kv.value("recent", int, ttl=sk.TTL(timedelta(days=1), time="event"))
        recent["a"] = 1
        kv.checkpoint(str(tmp_path / "ck"))
    done = run_json("export", tmp_path / "ck", "--to", to, "--out", tmp_path / "files")
    run("import", *(row["file"] for row in done), "--into", tmp_path / "new")
    assert run("diff", tmp_path / "ck", tmp_path / "new") == "no differences\n"
    one, other = open_checkpoint(tmp_path / "ck"), open_checkpoint(tmp_path / "new")
    assert (other.key_group_count, other.subgroups) == (8, 2)
    assert [one.leaf_rows(leaf) for leaf in one.leaves()] == [
        other.leaf_rows(leaf) for leaf in other.leaves()
    ]


def test_import_of_files_of_other_programs(tmp_path: Path) -> None:
    (tmp_path / "users.csv").write_text("id,name,age\n1,Alice,31\n2,Bob,\n1,Alicia,32\n")
    run(
        "import", tmp_path / "users.csv", "--into", tmp_path / "a", "--state", "users",
        "--key", "id", "--key-type", "int", "--type", "{name: str, age: int | None}",
        "--key-groups", "4",
    )  # fmt: skip

    class User(NamedTuple):
        pass

    assert run_json("get", tmp_path / "a", "users", "1")["value"] == {"name": "Alicia", "age": 32}
    assert run_json("get", tmp_path / "a", "users", "2")["value"] == {"name": "Bob", "age": None}
    assert open_checkpoint(tmp_path / "a").key_group_count == 4
    table = pyarrow.table(
        {
            "k": ["a", "b"],
            "n": [1, 2],
            "scores": [[1.5], []],
            "m": pyarrow.array([[("x", 1)], []], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    run(
        "import", tmp_path / "t.parquet", "--into", tmp_path / "b", "--state", "scores",
        "--key", "k", "--key", "n", "--value", "scores", "--type", "list[float]",
    )  # fmt: skip
    with sk.restore(str(tmp_path / "b")) as kv:
        scores = kv.list("scores", float, key=tuple[str, int])
        assert {key: list(value) for key, value in scores.items()} == {
            ("a", 1): [1.5],
            ("b", 2): [],
        }
    run(
        "import", tmp_path / "t.parquet", "--into", tmp_path / "c", "--state", "m",
        "--key", "n", "--value", "m", "--type", "dict[str, int]",
    )  # fmt: skip
    with sk.restore(str(tmp_path / "c")) as kv:
        assert kv.map("m", str, int, key=int)[1].copy() == {"x": 1}
    (tmp_path / "x.jsonl").write_text('{"k": "a", "v": ["x", "y", "x"]}\n\n{"k": "b", "v": []}\n')
    run(
        "import", tmp_path / "x.jsonl", "--into", tmp_path / "d", "--state", "s",
        "--key", "k", "--value", "v", "--type", "set[str]",
    )  # fmt: skip
    with sk.restore(str(tmp_path / "d")) as kv:
        assert set(kv.state("s", set[str])["a"]) == {"x", "y"}


def test_state_names_that_are_no_file_names(tmp_path: Path) -> None:
    names = ["a/b", "..", "x.y", "ä ö", "-n"]
    with sk.open("memory:") as kv:
        for name in names:
            kv.value(name, int)["k"] = 1
        kv.checkpoint(str(tmp_path / "ck"))
    run("export", tmp_path / "ck", "--to", "csv", "--out", tmp_path / "out")
    files = sorted((tmp_path / "out").glob("*.csv"))
    assert len(files) == len(names)
    run("import", *files, "--into", tmp_path / "new")
    assert run("diff", tmp_path / "ck", tmp_path / "new") == "no differences\n"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("int", int),
        ("list[dict[str, float]]", list[dict[str, float]]),
        ("dict[tuple[str, int], set[bytes]]", dict[tuple[str, int], set[bytes]]),
        ("tuple[int, ...]", tuple[int, ...]),
        ("tuple[int, str]", tuple[int, str]),
        ("int | str | None", int | str | None),
        ("Optional[datetime]", dt.datetime | None),
        ("Any", Any),
    ],
)
def test_types_on_the_command_line_are_those_of_hints(text: str, hint: Any) -> None:
    assert parse_type(text) == describe(hint)


NO_TYPES = """
int[ | lst[int] | list | list[int, int] | x.y | 1 + 2 | dict[float, int] | {1: int} | f(x)
"""


@pytest.mark.parametrize("text", ["", *NO_TYPES.strip().split(" | ")])
def test_what_is_no_type_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"is no type: .* Write int, str"):
        parse_type(text)


# ---- Homes


def test_between_rocksdb_and_checkpoints(place: Path, tmp_path: Path) -> None:
    home = f"rocksdb:{tmp_path}/home"
    assert "restored 9 states" in run("restore", place, "--into", home)
    made = run_json("checkpoint", home, "--to", tmp_path / "again", "--compression", "zstd")
    assert made["number"] == 1
    assert run("diff", place, tmp_path / "again") == "no differences\n"
    assert "not empty" in complaint("restore", place, "--into", home)
    assert "restored 9 states" in run("restore", place, "--into", home, "--replace")


def test_the_position_of_a_home_goes_with_its_checkpoint(tmp_path: Path) -> None:
    home, copy = f"rocksdb:{tmp_path}/home", f"rocksdb:{tmp_path}/copy"
    with sk.open(home) as kv:
        kv.value("n", int)["a"] = 1
        kv.commit({"offset": 5})
    run("checkpoint", home, "--to", tmp_path / "ck")
    run("restore", tmp_path / "ck", "--into", copy)
    with sk.open(copy) as kv:
        assert kv.committed == {"offset": 5}


def test_between_redis_and_checkpoints(place: Path, tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        home = f"redis://127.0.0.1:{server.port}/0"
        run("restore", f"{place}@1", "--into", home)
        run("checkpoint", home, "--to", tmp_path / "again")
    assert run("diff", f"{place}@1", tmp_path / "again") == "no differences\n"


def test_workers_that_are_not_all_are_put_together_only_if_told(
    place: Path, tmp_path: Path
) -> None:
    run("rescale", place, "--workers", "3", "--out", tmp_path / "w")
    two = tmp_path / "w" / "worker-0", tmp_path / "w" / "worker-2"
    for command in (
        ("merge", *two, "--out", tmp_path / "m"),
        ("restore", *two, "--into", f"rocksdb:{tmp_path}/m"),
    ):
        assert "key-groups 42-84" in complaint(*command)
        assert not (tmp_path / "m").exists()
        run(*command, "--missing-ok")
        shutil.rmtree(tmp_path / "m")


def test_workers_are_restored_together(place: Path, tmp_path: Path) -> None:
    run("rescale", place, "--workers", "3", "--out", tmp_path / "w")
    run("restore", tmp_path / "w", "--into", f"rocksdb:{tmp_path}/home")
    run("checkpoint", f"rocksdb:{tmp_path}/home", "--to", tmp_path / "again")
    assert run("diff", place, tmp_path / "again") == "no differences\n"
    run("restore", place, "--into", f"rocksdb:{tmp_path}/half", "--key-groups", "0-63")


# ---- Changing


def test_edit_makes_a_new_checkpoint(place: Path) -> None:
    (made,) = run_json("edit", place, "clicks", "user-1", '[{"url": "/x", "ms": 5}]')
    assert made["number"] == 3
    assert made["new_bytes"] < 500
    assert contents(place)["clicks"]["user-1"] == [Click("/x", 5)]
    run("edit", place, "visits", "user-1", "-7")
    run("edit", place, "tags", "-99", '["z"]')
    run("edit", place, "when", '["x", -1]', '"2026-01-01T00:00:00Z"')
    run("edit", place, "visits", "user-5", "--delete")
    found = contents(place)
    assert found["visits"]["user-1"] == -7
    assert found["tags"][-99] == {"z"}
    assert found["when"]["x", -1] == dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    assert "user-5" not in found["visits"]
    assert run("get", f"{place}@2", "visits", "user-1") == "100\n"


def test_rescale_merge_regroup_compact_keep_the_state(place: Path, tmp_path: Path) -> None:
    expected = contents(place)
    made = run_json("rescale", place, "--workers", "3", "--out", tmp_path / "3")
    assert [one["key_groups"] for one in made] == [[[0, 42]], [[42, 85]], [[85, 128]]]
    workers = [tmp_path / "3" / f"worker-{at}" for at in range(3)]
    assert contents(*workers) == expected
    run("rescale", tmp_path / "3", "--workers", "2", "--out", tmp_path / "2")
    run("merge", *sorted((tmp_path / "2").glob("worker-*")), "--out", tmp_path / "1")
    assert run("diff", place, tmp_path / "1") == "no differences\n"
    (regrouped,) = run_json("regroup", tmp_path / "1", "--key-groups", "8192")
    assert regrouped["key_group_count"] == 8192
    assert contents(tmp_path / "1") == expected
    run("regroup", place, "--key-groups", "64", "--out", tmp_path / "r")
    assert contents(tmp_path / "r") == expected
    (compacted,) = run_json("compact", place)
    assert (compacted["number"], contents(place)) == (3, expected)
    assert run_json("compact", place) == []


def test_on_a_storage_that_is_no_directory(place: Path, tmp_path: Path) -> None:
    """memory:// stands for all storages of fsspec: nothing can be mapped there."""
    out = f"memory://{tmp_path.name}"
    run("rescale", place, "--workers", "2", "--out", f"{out}/w")
    run("merge", f"{out}/w", "--out", f"{out}/m")
    run("edit", f"{out}/m", "visits", "user-1", "5")
    run("compact", f"{out}/m")
    run("gc", f"{out}/m", "--keep", "1")
    assert "all good" in run("verify", f"{out}/m")
    assert [row["worker"] for row in run_json("ls", f"{out}/w")] == ["worker-0", "worker-1"]
    run("edit", f"{out}/m", "visits", "user-1", "100")
    run("merge", f"{out}/m", "--out", tmp_path / "back")
    assert run("diff", place, tmp_path / "back") == "no differences\n"


def test_gc_keeps_the_newest(place: Path) -> None:
    would = run_json("gc", place, "--keep", "1", "--dry-run")
    assert (would[0]["kept"], would[0]["removed"]) == ([2], [1])
    assert len(run_json("ls", place)) == 2
    assert "kept 2; removed: 1" in run("gc", place, "--keep", "1")
    assert [row["number"] for row in run_json("ls", place)] == [2]
    assert "all good" in run("verify", place)


def test_bench_measures_every_type() -> None:
    found = run_json("bench", "--keys", "100", "--seconds", "0.001")
    assert {"value[int]", "list[int]", "map[str, float]", "set[str]", "timers"} <= {
        row["state"] for row in found
    }
    assert all(row["single"] > 0 for row in found)
    assert "single/s" in run("bench", "--keys", "10", "--seconds", "0.001")


# ---- What goes wrong, as a user sees it

ERRORS: list[tuple[str, int, str]] = [
    ("ls {tmp}/nowhere", 1, "there is no checkpoint in '{tmp}/nowhere'. Check the URL"),
    ("ls {ck}/000000000001.manifest", 1, "it is no directory"),
    ("ls nosuch://x/y", 1, "nosuch"),
    ("inspect {ck}@99", 1, "has no checkpoint 99. `statekit ls` tells which it has"),
    ("inspect {ck}@1 --at 2", 1, "name two checkpoints"),
    ("inspect {ck} --state nope", 1, "has no state 'nope'. It has: anything, clicks"),
    ("inspect {ck} --key nobody", 1, "no state of checkpoint 2 of '{ck}' has the key 'nobody'"),
    ("inspect {ck} --key x --state tags", 1, "'x' is no key of type int. Write 7 or -7."),
    ("inspect {ck} --limit -1", 2, "--limit"),
    ("get {ck} vists u", 1, "has no state 'vists'. It has: anything"),
    ("get {ck} visits nobody", 1, "nothing under 'nobody' in state 'visits'"),
    ("get {ck} when user-1", 1, 'Write a JSON array: ["alice", 7]'),
    ("get {ck} prefs user-1", 1, "bytes are written in hex. Write 0x757365722d31"),
    ("get {ck} tags 1e3", 1, "'1e3' is no key of type int"),
    ("get {ck} visits", 2, "Missing argument 'KEY'"),
    ("get {ck} visits u --jsn", 2, "No such option"),
    ("edit {ck} visits u x", 1, "'x' is no JSON"),
    ("edit {ck} visits u 1.5", 1, "the value at $ is 1.5, a float; expected is int"),
    ('edit {ck} clicks u [{{"url":"/","ms":"1"}}]', 1, "$[0].ms is '1', a str; expected is int"),
    ("edit {ck} visits u", 2, "Give a VALUE or --delete"),
    ("edit {ck} visits u 7 --delete", 2, "Give a VALUE or --delete"),
    ("edit {ck} visits nobody --delete", 1, "there is nothing to delete"),
    ("edit {ck} expiry u []", 1, "a list of due times"),
    ("rescale {ck} --workers 129 --out {tmp}/o", 1, "Use 1 to 128 workers"),
    ("rescale {ck} --workers 0 --out {tmp}/o", 2, "--workers"),
    ("rescale {ck} --workers 2 --out {ck}", 1, "is not empty. Name a directory that is new"),
    ("rescale {ck} --workers 2", 2, "Missing option '--out'"),
    ("rescale {ck} --workers 2 --out {ck}/000000000001.manifest", 1, "no directory"),
    ("merge {ck} {ck} --out {tmp}/o", 1, "have the same key-groups"),
    ("merge --out {tmp}/o", 2, "Missing argument"),
    ("regroup {ck} --key-groups 100", 1, "must be a power of 2. Use 64 or 128"),
    ("regroup {ck} --key-groups x", 2, "'x' is not a valid integer"),
    ("gc {ck} --keep 0", 2, "--keep"),
    ("gc {tmp}/nowhere --keep 1", 1, "there is no checkpoint"),
    ("verify {tmp}/nowhere", 1, "there is no checkpoint"),
    ("export {ck} --to xml --out {tmp}/o", 2, "'xml' is not one of"),
    ("export {ck} --to csv --out {ck}/000000000001.manifest", 1, "000000000001.manifest"),
    ("export {ck} --to csv --out {tmp}/o --state nope", 1, "has no state 'nope'"),
    ("import {tmp}/no.csv --into {tmp}/o", 1, "No such file"),
    ("import {ck}/000000000001.manifest --into {tmp}/o", 1, "does not end in .parquet"),
    ("import {tmp}/f.csv --into {tmp}/o", 1, "--state, --key, --type are missing"),
    ("import {tmp}/f.csv --into {ck} --state s --key id --type str --value n", 1, "is not empty"),
    ("{foreign} --key id --type str", 1, "row 1 has no 'value'; it has id, n"),
    ("{foreign} --key no --type str --value n", 1, "row 1 has no 'no'"),
    ("{foreign} --key id --type int --value n", 1, "row 1: 'a' is no int"),
    ("{foreign} --key id --key-type int --type str --value n", 1, "row 2: 'x' is no key"),
    ("{foreign} --key id --key-type float --type str --value n", 1, "no key type"),
    ("{foreign} --key id --type str --value n --form list", 1, "Write list[...]"),
    ("{foreign} --key id --type str --value n --key-groups 100", 1, "Use 64 or 128"),
    ("{foreign} --key id --type [\"frob\"]", 1, "frob"),
    ("import {tmp}/bad.parquet --into {tmp}/o", 1, "is no parquet file"),
    ("import {tmp}/bad.arrow --into {tmp}/o", 1, "is no arrow file"),
    ("import {tmp}/bad.jsonl --into {tmp}/o --state s --key a --type int", 1, "line 1 is no JSON"),
    ("import {tmp}/bin.csv --into {tmp}/o --state s --key id --type str", 1, "no CSV in UTF-8"),
    ("checkpoint memory: --to {tmp}/o", 1, "has nothing in it"),
    ("checkpoint rocksdb:{tmp}/none --to {tmp}/o", 1, "there is no directory '{tmp}/none'"),
    ("checkpoint nosuch:x --to {tmp}/o", 1, "which is not installed"),
    ("restore {ck} --into memory:", 1, "Name a home that stays"),
    ("restore {ck} --into rocksdb:{tmp}/h --key-groups 0-x", 1, "Write 0-63"),
    ("restore {ck} --into rocksdb:{tmp}/h --key-groups 0-200", 1, "key-group"),
    ("restore {ck}@1 {ck}@2 --into rocksdb:{tmp}/h", 1, "different numbers"),
    ("restore {tmp}/nowhere --into rocksdb:{tmp}/h", 1, "there is no checkpoint"),
    ("frobnicate", 2, "No such command 'frobnicate'"),
    ("completion tcsh", 2, "'tcsh' is not one of"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "code", "message"), ERRORS, ids=[line for line, _, _ in ERRORS])
def test_errors_are_one_message_and_an_exit_code(
    place: Path, tmp_path: Path, line: str, code: int, message: str
) -> None:
    (tmp_path / "f.csv").write_text("id,n\n1,a\nx,b\n")
    (tmp_path / "bin.csv").write_bytes(b"id,n\n1,\xff\xfe\n")
    for name in ("bad.parquet", "bad.arrow", "bad.jsonl"):
        (tmp_path / name).write_text('{"a"\n')
    line = line.replace("{foreign}", "import {tmp}/f.csv --into {tmp}/o --state s")
    args = [part.format(ck=place, tmp=tmp_path) for part in line.split()]
    text = complaint(*args, code=code)
    assert message.format(ck=place, tmp=tmp_path) in text
    assert "Traceback" not in text
    assert not list((tmp_path).glob("o/*.manifest"))
    assert len(list(place.glob("*.manifest"))) == 2


def test_a_damaged_checkpoint_is_told_with_file_and_offset(place: Path, tmp_path: Path) -> None:
    pack = damage(place)
    export = ["export", place, "--to", "csv", "--out", tmp_path / "x"]
    for args in (["inspect", place], export, ["merge", place, "--out", tmp_path / "m"]):
        text = complaint(*args)
        assert pack.name in text
        assert re.search(r"is damaged at byte \d+", text)
    assert not list(tmp_path.glob("x/*.csv"))


@pytest.mark.parametrize(
    "line",
    [
        "ls {tmp}/no",
        "get {ck} visits nobody",
        "frobnicate",
        "edit {ck} visits u x",
        "--version",
        "verify {ck}",
    ],
)
def test_processes_end_with_the_same_codes_and_no_traceback(
    place: Path, tmp_path: Path, line: str
) -> None:
    args = [part.format(ck=place, tmp=tmp_path) for part in line.split()]
    done = program(*args)
    expected = CliRunner().invoke(app, args, prog_name="statekit")
    assert (done.returncode, done.stdout, done.stderr) == (
        expected.exit_code,
        expected.stdout,
        expected.stderr,
    )
    assert "Traceback" not in done.stderr


def test_a_directory_that_cannot_be_written_is_told(place: Path, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    (tmp_path / "locked").mkdir(mode=0o500)
    assert "locked" in complaint("merge", place, "--out", tmp_path / "locked" / "x")


def test_a_reader_that_has_had_enough_is_no_error(place: Path) -> None:
    command = f"{sys.executable} -m statekit.cli inspect {place} --limit 1000 | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("checkpoint 2 of")
    assert "Traceback" not in done.stderr


# ---- Terminals, completion, packaging


def on_a_terminal(*args: str | Path) -> str:
    """What a terminal gets."""
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "statekit.cli", *map(str, args)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen(command, stdout=child, stderr=child, env=environment) as process:
        os.close(child)
        parts = []
        while True:
            try:
                part = os.read(parent, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            parts.append(part)
        process.wait(60)
    os.close(parent)
    return b"".join(parts).decode()


def test_a_terminal_gets_colours_and_a_pipe_does_not(place: Path) -> None:
    shown = on_a_terminal("ls", place)
    assert "\x1b[1m" in shown
    assert "key-groups" in shown
    assert "\x1b" not in program("ls", place).stdout
    assert "copying" in on_a_terminal("merge", place, "--out", place.parent / "m")


def test_json_has_no_colours_on_a_terminal_either(place: Path) -> None:
    assert [row["number"] for row in json.loads(on_a_terminal("ls", place, "--json"))] == [1, 2]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_name_the_program(shell: str) -> None:
    script = run("completion", shell)
    assert "_STATEKIT_COMPLETE" in script
    assert f"{shell}_complete" in script


def test_completion_completes_commands_and_options() -> None:
    environment = {**os.environ, "_STATEKIT_COMPLETE": "bash_complete", "COMP_CWORD": "1"}
    code = "import sys; sys.argv[0] = 'statekit'; from statekit.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "COMP_WORDS": "statekit re"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = {"plain,regroup", "plain,rescale", "plain,rescales", "plain,restore"}
    assert set(done.stdout.split()) == found


def test_without_click_the_program_says_what_to_install() -> None:
    code = "import sys; sys.modules['click'] = None; from statekit.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        "statekit: the command line needs the package 'click'. "
        "Install it with: pip install 'statekit[cli]'\n"
    )


def test_without_pyarrow_export_to_parquet_says_what_to_install(
    place: Path, tmp_path: Path
) -> None:
    code = "import sys; sys.modules['pyarrow'] = None; from statekit.cli import main; main()"
    line = ["export", str(place), "--to", "parquet", "--out", str(tmp_path / "o")]
    done = subprocess.run(
        [sys.executable, "-c", code, *line], capture_output=True, text=True, check=False
    )
    assert (done.returncode, "statekit[arrow]" in done.stderr) == (1, True)
    assert "Traceback" not in done.stderr


def commands() -> list[click.Command]:
    return [command for group in sections().values() for command in group]


@pytest.mark.parametrize("command", commands(), ids=lambda command: command.name)
def test_every_command_has_help_with_an_example(command: click.Command) -> None:
    text = run(str(command.name), "--help")
    assert "Example:" in text
    assert f"statekit {command.name}" in text
    if command.name not in ("completion", "worker"):  # they have nothing to tell
        assert "--json" in text


def test_version_is_that_of_the_package() -> None:
    assert run("--version") == f"statekit {sk.__version__}\n"


def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs/make_cli_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_what_the_commands_say() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert page == reference().page(), "run: python docs/make_cli_reference.py"
