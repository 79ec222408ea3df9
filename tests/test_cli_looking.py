"""What commands can look at: checkpoints by number, workers together, homes, processes.

The oracle is one checkpoint with everything in it, which tests/test_cli.py compares with dicts.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.ipc
import pyarrow.parquet
import pytest
import redis
from servers import HOST, RedisServer, S3Server, child, redis_server
from servers import s3 as s3  # a fixture
from test_cli import complaint, contents, fill, program, run, run_json
from test_looking import files

import statekit as sk
from statekit.checkpoint.reader import open_checkpoint
from statekit.errors import NotOwnedError

GETS = [
    ("visits", "user-1"), ("clicks", "user-3"), ("prefs", "0x757365722d38"), ("tags", "-5"),
    ("when", '["user-5", 5]'), ("spots", "user-5"), ("anything", "user-3"), ("recent", "user-9"),
    ("expiry", "user-9"),
]  # fmt: skip


def take_two(place: Path) -> Path:
    """Checkpoints 1 and 2 of all kinds of states."""
    with sk.open("memory:", key_groups=128, subgroups=2) as kv:
        kv.advance_watermark(77)
        fill(kv)
        kv.checkpoint(place)
        kv["visits"]["user-1"] = 100
        kv.checkpoint(place)
    return place


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return take_two(tmp_path / "ck")


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For commands that must not change anything: ck, a home h, an empty one, some files."""
    ground = tmp_path_factory.mktemp("ground")
    place = take_two(ground / "ck")
    run("restore", place, "--into", f"rocksdb:{ground}/h")
    run("export", place, "--to", "csv", "--state", "visits", "--out", ground)
    sk.open(f"rocksdb:{ground}/empty").close()
    (ground / "file").write_text("x")
    return ground


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as one:
        yield one


@pytest.fixture
def redis_url(server: RedisServer, tmp_path: Path) -> str:
    return f"redis://{HOST}:{server.port}/0?prefix={tmp_path.name}"


@pytest.fixture(params=["workers", "rocksdb", "redis", "process"])
def other(request: pytest.FixtureRequest, place: Path, tmp_path: Path) -> Iterator[str]:
    """The state of checkpoint 2 somewhere else."""
    match request.param:
        case "workers":
            run("rescale", place, "--workers", "3", "--out", tmp_path / "job")
            yield str(tmp_path / "job")
        case "process":
            with sk.restore(place) as kv, kv.serve() as one:
                yield one.address
        case kind:
            home = f"rocksdb:{tmp_path}/home"
            if kind == "redis":
                home = request.getfixturevalue("redis_url")
            run("restore", place, "--into", home)
            yield home


# ---- The same answers from everywhere


def test_get_finds_the_same_values_everywhere(place: Path, other: str) -> None:
    for state, key in GETS:
        assert run("get", other, state, key) == run("get", place, state, key)
    assert "nothing under 'nobody'" in complaint("get", other, "visits", "nobody")
    assert "has no state 'nope'. It has: " in complaint("get", other, "nope", "x")
    assert "'x' is no key of type int" in complaint("get", other, "tags", "x")


def test_inspect_counts_the_same_everywhere(place: Path, other: str) -> None:
    expected, found = run_json("inspect", place), run_json("inspect", other)
    for state in (*expected["states"], *found["states"]):
        state["sample"].sort(key=str)  # any five
        assert len(state.pop("sample")) == 5
    # A process may have its states in another order.
    assert sorted(found["states"], key=str) == sorted(expected["states"], key=str)
    assert found["entries_by_key_group"] == expected["entries_by_key_group"]
    for name in ("key_groups", "key_group_count", "subgroups"):
        assert found[name] == expected[name]
    text = run("inspect", other, "--limit", "100")
    assert "entries per key-group" in text
    assert '"2026-11-16T12:00:05+00:00"' in text
    assert "entries" not in run_json("inspect", other, "--quick")["states"][0]
    assert run_json("inspect", other, "--key", "user-7") == run_json(
        "inspect", place, "--key", "user-7"
    )


def test_export_writes_the_same_rows_from_everywhere(
    place: Path, other: str, tmp_path: Path
) -> None:
    run("export", place, "--to", "jsonl", "--out", tmp_path / "a")
    done = run_json("export", other, "--to", "jsonl", "--out", tmp_path / "b")
    assert len(done) == 9
    for row in done:
        file = Path(row["file"])
        lines = file.read_text(encoding="utf-8").splitlines()
        expected = (tmp_path / "a" / file.name).read_text(encoding="utf-8").splitlines()
        assert sorted(lines) == sorted(expected)
        assert row["entries"] == len(lines)
    run("import", *(row["file"] for row in done), "--into", tmp_path / "new")
    assert contents(tmp_path / "new") == contents(place)


def test_diff_compares_all_with_all(place: Path, other: str) -> None:
    assert run("diff", place, other) == "no differences\n"
    assert run("diff", other, other) == "no differences\n"
    found = {one["state"]: one for one in run_json("diff", other, f"{place}@1", code=1)}
    assert found["visits"]["first"] == [
        {"kind": "changed", "key": "user-1", "before": 100, "after": 1}
    ]
    assert all(not one["changed"] for name, one in found.items() if name != "visits")


# ---- Workers


def test_edit_changes_the_worker_that_has_the_key(place: Path, tmp_path: Path) -> None:
    run("rescale", place, "--workers", "3", "--out", tmp_path / "job")
    with sk.open("memory:") as kv:
        workers = [kv.key_group_of(f"user-{number}") * 3 // 128 for number in range(40)]
    for number in (workers.index(0), workers.index(2)):
        (made,) = run_json("edit", tmp_path / "job", "visits", f"user-{number}", "-7")
        assert made["url"].endswith(f"worker-{workers[number]}")
        assert made["number"] == 2
        assert run("get", tmp_path / "job", "visits", f"user-{number}") == "-7\n"
    found = {one["state"]: one for one in run_json("diff", place, tmp_path / "job", code=1)}
    assert (found["visits"]["changed"], found["visits"]["added"]) == (2, 0)
    run("edit", tmp_path / "job", "visits", f"user-{workers.index(1)}", "--delete")
    assert [row["number"] for row in run_json("ls", tmp_path / "job")] == [1, 2, 1, 2, 1, 2]


def test_a_key_that_is_another_workers_is_not_said_to_be_missing(
    place: Path, tmp_path: Path
) -> None:
    run("rescale", place, "--workers", "2", "--out", tmp_path / "job")
    with sk.open("memory:") as kv:
        key = next(f"user-{n}" for n in range(40) if kv.key_group_of(f"user-{n}") >= 64)
    one = tmp_path / "job" / "worker-0"
    for args in (["get", one, "visits", key], ["edit", one, "visits", key, "1"]):
        assert "key-group" in complaint(*args)
        assert "has 0-63" in complaint(*args)
    assert "has 0-63" in complaint("inspect", one, "--key", key)
    (tmp_path / "job" / "worker-1").rename(tmp_path / "elsewhere")
    assert "has 0-63" in complaint("get", tmp_path / "job", "visits", key)
    with sk.restore(one) as kv, kv.serve() as server:
        assert "has 0-63" in complaint("get", server.address, "visits", key)
        with sk.connect(server.address) as remote, pytest.raises(NotOwnedError):
            remote.value("visits", int).get(key)


def test_workers_that_do_not_go_together_are_told(place: Path, tmp_path: Path) -> None:
    for number in range(2):
        run("merge", place, "--out", tmp_path / "job" / f"worker-{number}")
    for args in (["inspect"], ["get", "visits", "x"], ["edit", "visits", "x", "1"]):
        command, *rest = args
        assert "have the same key-groups" in complaint(command, tmp_path / "job", *rest)


def test_a_worker_without_checkpoints_is_named(place: Path, tmp_path: Path) -> None:
    run("rescale", place, "--workers", "2", "--out", tmp_path / "job")
    (tmp_path / "job" / "worker-2").mkdir()
    assert "worker-2" in complaint("get", tmp_path / "job", "visits", "user-1")


# ---- Homes are not changed


def test_looking_changes_no_byte_of_a_home(place: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    run("restore", place, "--into", f"rocksdb:{home}")
    before = files(home)
    run("inspect", f"rocksdb:{home}")
    run("get", f"rocksdb:{home}", "visits", "user-1")
    run("export", f"rocksdb:{home}", "--to", "csv", "--out", tmp_path / "csv")
    run("diff", f"rocksdb:{home}?memory=64MiB", f"rocksdb:{home}")
    complaint("get", f"rocksdb:{home}", "visits", "nobody")
    assert files(home) == before


def test_looking_changes_no_key_of_a_server(
    place: Path, redis_url: str, server: RedisServer, tmp_path: Path
) -> None:
    run("restore", place, "--into", redis_url)

    def everything(client: redis.Redis) -> dict[bytes, Any]:
        keys = sorted(client.keys("*"))
        return {key: client.dump(key) for key in keys}

    with server.client() as client:
        before = everything(client)
        run("inspect", redis_url)
        run("get", redis_url, "visits", "user-1")
        run("export", redis_url, "--to", "csv", "--out", tmp_path / "csv")
        run("diff", redis_url, f"{redis_url}&memory=64MiB")
        assert everything(client) == before


def test_a_home_that_is_open_elsewhere_is_told(tmp_path: Path) -> None:
    home = f"rocksdb:{tmp_path}/home"
    code = f"""
import sys, statekit as sk
kv = sk.open({home!r})
kv.value("visits", int)["a"] = 1
kv.flush()
print("ready", flush=True)
sys.stdin.read()
"""
    with child(code) as process:
        for args in (
            ["inspect", home],
            ["get", home, "visits", "a"],
            ["export", home, "--to", "csv", "--out", tmp_path / "csv"],
        ):
            assert f"is open already, in process {process.pid}" in complaint(*args)
        assert "is open already" in complaint("diff", home, home, code=2)
        for args in (["checkpoint", home, "--to", tmp_path / "ck"], ["serve", home]):
            assert "It is open already" in complaint(*args)
    assert run("get", home, "visits", "a") == "1\n"


HOME_ERRORS = [
    ("inspect rocksdb:{tmp}/nowhere", "'{tmp}/nowhere' cannot be looked into: No such file"),
    ("inspect rocksdb:{tmp}/ck", "'{tmp}/ck' is no RocksDB home"),
    ("inspect rocksdb:{tmp}/file", "Not a directory"),
    ("inspect rocksdb:{tmp}/empty", "holds no states"),
    ("inspect rocksdb:{tmp}/empty?x=1", "options that home 'rocksdb' does not know: x"),
    ("inspect redis://127.0.0.1:1/0", "Check that the server runs"),
    ("inspect memory:", "has nothing in it"),
    ("get nosuch:x visits a", "'nosuch:x' is no URL of a storage"),
    ("get rocksdb:{tmp}/empty visits a --at 1", "--at 1 is the number of a checkpoint"),
    ("edit rocksdb:{tmp}/empty visits a 1", "is a home, and this is about checkpoints"),
    ("ls rocksdb:{tmp}/empty", "`statekit checkpoint rocksdb:{tmp}/empty --to DIR` makes one"),
    ("verify redis://me:secret@host/0", "'redis://...@host/0' is a home"),
    ("gc rocksdb:{tmp}/empty --keep 1", "is a home"),
    ("merge rocksdb:{tmp}/empty --out {tmp}/o", "is a home"),
    ("merge {tmp}/ck --out rocksdb:{tmp}/o", "is a home"),
    ("compact memory:", "is a home"),
    ("ls 127.0.0.1:1", "is the address of a process"),
    ("edit 127.0.0.1:1 visits a 1", "For a directory of that name write ./127.0.0.1:1"),
]


@pytest.mark.parametrize(("line", "message"), HOME_ERRORS, ids=[line for line, _ in HOME_ERRORS])
def test_what_is_no_home_or_no_checkpoint_is_told(ground: Path, line: str, message: str) -> None:
    before = files(ground)
    text = complaint(*(part.format(tmp=ground) for part in line.split()))
    assert message.format(tmp=ground) in text
    assert "secret" not in text
    assert files(ground) == before


# ---- Processes


def test_a_process_that_asks_for_a_token_gets_one(place: Path, tmp_path: Path) -> None:
    token = "a-token-of-some-length"
    (tmp_path / "token").write_text(token)
    (tmp_path / "other").write_text("another-token-of-some-length")
    with sk.restore(place) as kv, kv.serve(token=token) as server:
        get = ["get", server.address, "visits", "user-1"]
        assert run(*get, "--token-file", tmp_path / "token") == "100\n"
        assert "refuses this process" in complaint(*get)
        assert "refuses this process" in complaint(*get, "--token-file", tmp_path / "other")
        access = ["--token-file", tmp_path / "token"]
        assert run("diff", place, server.address, *access) == "no differences\n"
        run("inspect", server.address, *access)
        run("export", server.address, "--to", "csv", "--out", tmp_path / "csv", *access)


def test_a_process_that_is_not_there_or_has_nothing_is_told(tmp_path: Path) -> None:
    short = ["--timeout", "0.2"]
    assert "nobody listens at 127.0.0.1:1" in complaint("inspect", "127.0.0.1:1", *short)
    assert "asked who it is" in complaint("diff", "127.0.0.1:1", "[::1]:1", *short, code=2)
    assert "asked who it is" in complaint("get", f"unix:{tmp_path}/no", "a", "b", *short)
    assert "no address" in complaint("get", "127.0.0.1:70000", "a", "b")
    assert "--at 1" in complaint("inspect", "127.0.0.1:1", "--at", "1")
    with sk.open("memory:") as kv, kv.serve() as server:
        assert "has no states" in complaint(
            "export", server.address, "--to", "csv", "--out", tmp_path / "o"
        )
        assert run_json("inspect", server.address)["states"] == []


def test_a_process_goes_on_while_it_is_looked_at(place: Path) -> None:
    with sk.restore(place) as kv, kv.serve() as server:
        visits = kv.value("visits", int)
        visits["user-1"] = 5
        assert run("get", server.address, "visits", "user-1") == "5\n"
        assert (
            run_json("inspect", server.address, "--state", "visits")["states"][0]["entries"] == 40
        )
        visits["user-1"] += 1
        assert kv.key_groups == (range(128),)
        assert kv.metrics().moved.migrations == 0


# ---- @N, by every command

NUMBERED: list[tuple[str, int, str]] = [
    ("ls {ck}@9", 1, "has no checkpoint 9"),
    ("ls {ck}@9 --json", 1, "has no checkpoint 9"),
    ("ls {tmp}/nowhere --json", 1, "there is no checkpoint in '{tmp}/nowhere'"),
    ("verify {ck}@9", 1, "has no checkpoint 9"),
    ("verify {ck}@9 --json", 1, "has no checkpoint 9"),
    ("inspect {ck}@9", 1, "has no checkpoint 9"),
    ("get {ck}@9 visits user-1", 1, "has no checkpoint 9"),
    ("diff {ck}@9 {ck}", 2, "has no checkpoint 9"),
    ("export {ck}@9 --to csv --out {tmp}/o", 1, "has no checkpoint 9"),
    ("edit {ck}@9 visits user-1 7", 1, "has no checkpoint 9"),
    ("edit {ck}@1 visits user-1 7", 1, "made of it would override what 2 changed. Give --force"),
    ("edit {ck}@1 visits user-1 --delete", 1, "Give --force"),
    ("compact {ck}@1", 1, "checkpoint 1 of '{ck}' is not the newest"),
    ("compact {ck}@9", 1, "has no checkpoint 9"),
    ("regroup {ck}@1 --key-groups 64", 1, "Give --force"),
    ("regroup {ck}@9 --key-groups 64 --out {tmp}/o", 1, "has no checkpoint 9"),
    ("rescale {ck}@9 --workers 2 --out {tmp}/o", 1, "has no checkpoint 9"),
    ("rescale {ck} --workers 2 --out {tmp}/o@3", 1, "Leave @3 out"),
    ("merge {ck}@9 --out {tmp}/o", 1, "has no checkpoint 9"),
    ("merge {ck} --out {tmp}/o@3", 1, "'{tmp}/o@3' is checkpoint 3"),
    ("regroup {ck} --key-groups 64 --out {tmp}/o@3", 1, "Leave @3 out"),
    ("gc {ck}@1 --keep 1", 1, "this is about the whole directory '{ck}'. Leave @1 out"),
    ("restore {ck}@9 --into rocksdb:{tmp}/home", 1, "has no checkpoint 9"),
    ("checkpoint rocksdb:{tmp}/h --to {tmp}/o@3", 1, "Leave @3 out"),
    ("import {tmp}/visits.csv --into {tmp}/o@3", 1, "Leave @3 out"),
    ("serve {ck}@9", 1, "has no checkpoint 9"),
    ("fetch 127.0.0.1:1 --into {tmp}/o@3", 1, "Leave @3 out"),
    ("fetch 127.0.0.1:1@3 --into {tmp}/o", 1, "is no address"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "code", "message"), NUMBERED, ids=[line for line, _, _ in NUMBERED]
)
def test_a_number_is_honoured_or_refused(ground: Path, line: str, code: int, message: str) -> None:
    before = files(ground)
    names = {"ck": ground / "ck", "tmp": ground}
    text = complaint(*(part.format(**names) for part in line.split()), code=code)
    assert message.format(**names) in text
    assert files(ground) == before


def test_commands_that_read_take_the_number(place: Path, tmp_path: Path) -> None:
    assert [row["number"] for row in run_json("ls", f"{place}@1")] == [1]
    assert "read 1 checkpoint," in run("verify", f"{place}@1")
    run("merge", f"{place}@1", "--out", tmp_path / "m")
    assert run("get", tmp_path / "m", "visits", "user-1") == "1\n"
    run("rescale", f"{place}@1", "--workers", "2", "--out", tmp_path / "job")
    assert run("get", f"{tmp_path}/job@1", "visits", "user-1") == "1\n"
    assert [row["number"] for row in run_json("ls", f"{tmp_path}/job@1")] == [1, 1]
    run("regroup", f"{place}@1", "--key-groups", "64", "--out", tmp_path / "r")
    assert run("get", tmp_path / "r", "visits", "user-1") == "1\n"
    run("restore", f"{place}@1", "--into", f"rocksdb:{tmp_path}/home")
    assert run("get", f"rocksdb:{tmp_path}/home", "visits", "user-1") == "1\n"


def test_a_number_that_one_worker_has_not_fails(place: Path, tmp_path: Path) -> None:
    run("rescale", place, "--workers", "2", "--out", tmp_path / "job")
    run("edit", tmp_path / "job", "visits", "user-1", "5")
    done = program("ls", f"{tmp_path}/job@2", "--json")
    assert len(json.loads(done.stdout)) == 1
    assert "has no checkpoint 2" in done.stderr
    assert done.returncode == 1
    assert "has no checkpoint 2" in complaint("get", f"{tmp_path}/job@2", "visits", "user-1")
    assert "has no checkpoint 2" in complaint("verify", f"{tmp_path}/job@2")


def test_with_force_an_older_checkpoint_becomes_the_newest(place: Path) -> None:
    run("edit", f"{place}@1", "visits", "user-3", "33", "--force")
    assert run("get", place, "visits", "user-1") == "1\n"
    assert run("get", place, "visits", "user-3") == "33\n"
    assert run("get", f"{place}@2", "visits", "user-1") == "100\n"
    (made,) = run_json("regroup", f"{place}@2", "--key-groups", "64", "--force")
    assert made["number"] == 4
    (made,) = run_json("compact", f"{place}@3", "--force")
    assert made["number"] == 5
    assert run("get", place, "visits", "user-3") == "33\n"
    run("edit", f"{place}@5", "visits", "user-3", "34")  # the newest, by its number


# ---- Damage


def flip(file: Path, offset: int) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 4
    file.write_bytes(data)


@pytest.fixture
def line(tmp_path: Path) -> Path:
    """Checkpoints 1 to 4 of two leaves: both in 1, one changed in 2 and 3, all anew in 4."""
    with sk.open("memory:", key_groups=2, subgroups=1) as kv:
        counts = kv.value("counts", str)
        counts.put_many([f"k{n}" for n in range(200)], ["x" * 50] * 200)
        kv.checkpoint(tmp_path / "line")
        for round_ in range(2):
            key = next(f"k{n}" for n in range(200) if kv.key_group_of(f"k{n}") == 1)
            counts[key] = str(round_)
            kv.checkpoint(tmp_path / "line")
        kv.checkpoint(tmp_path / "line", base=None)
    return tmp_path / "line"


def test_damage_names_every_checkpoint_that_has_it(line: Path) -> None:
    first = open_checkpoint(line, 1)
    pack = line / first.manifest.packs[0].name
    segments = {segment.leaf: segment for segment in first.manifest.segments}
    flip(pack, segments[0].offset + 80)
    found = run_json("verify", line, code=3)
    (damage,) = found["damage"]
    assert damage["checkpoints"] == [1, 2, 3]
    assert found["whole"] == [{"url": str(line), "numbers": [4]}]
    text = run("verify", line, code=3)
    assert "(checkpoints 1, 2, 3)" in text
    assert f"the newest checkpoint, 4, is whole. `statekit gc {line} --keep 1`" in text
    assert "all good" in run("verify", f"{line}@4")
    assert run_json("verify", f"{line}@2", code=3)["damage"][0]["checkpoints"] == [2]


def test_advice_is_about_the_checkpoints_that_are_whole(line: Path) -> None:
    last = open_checkpoint(line, 4)
    flip(line / last.manifest.packs[0].name, last.manifest.segments[0].offset + 80)
    text = run("verify", line, code=3)
    assert "(checkpoint 4)" in text
    assert f"whole is 1, 2, 3. Restore {line}@3" in text
    third = open_checkpoint(line, 3)
    own = [ref for ref in third.manifest.packs if ref.number == 3]
    (line / own[0].name).unlink()
    text = run("verify", line, code=3)
    assert "it is not there (checkpoint 3)" in text
    assert f"Restore {line}@2" in text
    (line / third.manifest.packs[0].name).write_bytes(b"x")
    text = run("verify", line, code=3)
    assert "(checkpoints 1, 2, 3)" in text
    assert "no checkpoint is whole" in text
    assert "gc" not in text


def test_a_pack_that_is_cut_off_concerns_those_who_need_its_end(line: Path) -> None:
    first = open_checkpoint(line, 1)
    pack = line / first.manifest.packs[0].name
    segments = sorted(first.manifest.segments, key=lambda segment: segment.offset)
    pack.write_bytes(pack.read_bytes()[: segments[1].offset])
    concerned = [one["checkpoints"] for one in run_json("verify", line, code=3)["damage"]]
    users = [
        number
        for number in (1, 2, 3)
        if any(
            segment.offset == segments[1].offset
            and open_checkpoint(line, number).manifest.packs[segment.pack]
            == first.manifest.packs[0]
            for segment in open_checkpoint(line, number).manifest.segments
        )
    ]
    assert concerned
    assert all(one == users for one in concerned)


def test_damage_of_a_manifest_names_its_checkpoint(line: Path) -> None:
    flip(line / "000000000002.manifest", 100)
    found = run_json("verify", line, code=3)
    assert [one["checkpoints"] for one in found["damage"]] == [[2]]
    assert found["whole"][0]["numbers"] == [1, 3, 4]
    assert found["checkpoints"] == 4
    assert run_json("verify", f"{line}@2", code=3)["whole"][0]["numbers"] == []
    assert "all good" in run("verify", f"{line}@3")


def test_damage_that_no_checkpoint_has_is_told_as_such(line: Path) -> None:
    """compact() refers to segments that it need not fold, so a pack may be used only in part."""
    run("compact", f"{line}@3", "--force")
    made = open_checkpoint(line, 5)
    first = open_checkpoint(line, 1)
    used = {segment.offset for segment in made.manifest.segments if segment.pack == 0}
    assert made.manifest.packs[0] == first.manifest.packs[0]
    (unused,) = [one for one in first.manifest.segments if one.offset not in used]
    for number in (1, 2, 3, 4):
        (line / f"{number:012}.manifest").unlink()
    flip(line / made.manifest.packs[0].name, unused.offset + 80)
    found = run_json("verify", line, code=3)
    assert [one["checkpoints"] for one in found["damage"]] == [[]]
    assert found["whole"][0]["numbers"] == [5]
    text = run("verify", line, code=3)
    assert "(no checkpoint needs it)" in text
    assert "all checkpoints are whole" in text
    assert "all good" in run("verify", f"{line}@5")


@pytest.mark.parametrize(
    "args",
    [
        ["compact", "{ck}"],
        ["merge", "{ck}", "--out", "{tmp}/o"],
        ["rescale", "{ck}", "--workers", "2", "--out", "{tmp}/o"],
        ["regroup", "{ck}", "--key-groups", "8192", "--out", "{tmp}/o"],
        ["export", "{ck}", "--to", "csv", "--out", "{tmp}/o"],
        ["restore", "{ck}", "--into", "rocksdb:{tmp}/home"],
    ],
    ids=lambda args: args[0],
)
def test_what_fails_over_damage_says_so_and_publishes_nothing(
    place: Path, tmp_path: Path, args: list[str]
) -> None:
    newest = open_checkpoint(place)
    for ref in newest.manifest.packs:
        pack = place / ref.name
        data = bytearray(pack.read_bytes())
        for at in range(100, len(data), 64):
            data[at] ^= 1
        pack.write_bytes(data)
    before = sorted(place.glob("*.manifest"))
    text = complaint(*(arg.format(ck=place, tmp=tmp_path) for arg in args))
    assert "is damaged at byte" in text
    assert "statekit verify" in text
    assert sorted(place.glob("*.manifest")) == before
    assert not list(tmp_path.glob("o/**/*.manifest"))
    assert not list(tmp_path.glob("o/*.csv"))


# ---- Where export writes to


def test_export_writes_to_any_url_and_import_reads_from_there(place: Path, tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/tables"
    done = run_json("export", place, "--to", "csv", "--out", url)
    assert {row["file"] for row in done} >= {f"{url}/visits.csv", f"{url}/clicks.csv"}
    fs = fsspec.filesystem("memory")
    data = fs.cat_file(f"/{tmp_path.name}/tables/visits.csv")
    run("export", place, "--to", "csv", "--out", tmp_path / "here")
    assert data == (tmp_path / "here" / "visits.csv").read_bytes()
    run("import", *(row["file"] for row in done), "--into", tmp_path / "new")
    assert run("diff", place, tmp_path / "new") == "no differences\n"
    assert "is there already" in complaint("export", place, "--to", "csv", "--out", url)
    one = f"memory://{tmp_path.name}/one.parquet"
    run("export", place, "--to", "parquet", "--state", "visits", "--out", one)
    assert "is there already" in complaint(
        "export", place, "--to", "parquet", "--state", "visits", "--out", one
    )
    run("import", one, "--into", tmp_path / "one")
    assert run_json("inspect", tmp_path / "one")["states"][0]["entries"] == 40
    run("export", place, "--to", "csv", "--state", "visits", "--out", f"file://{tmp_path}/f.csv")
    assert (tmp_path / "f.csv").read_bytes() == data
    assert "no file" in complaint("import", f"{url}/nope.csv", "--into", tmp_path / "o")


def test_export_to_s3(
    place: Path, tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    s3.make_bucket("exports")
    out = f"s3://exports/{tmp_path.name}"
    names = [row["file"] for row in run_json("export", place, "--to", "parquet", "--out", out)]
    assert f"{out}/visits.parquet" in names
    run("import", *names, "--into", tmp_path / "new")
    assert run("diff", place, tmp_path / "new") == "no differences\n"
    export = ["export", place, "--to", "csv", "--state", "visits", "--out"]
    assert "Check that the bucket" in complaint(*export, "s3://exports-not/x")
    assert "names no storage" in complaint(*export, "s3://")


@pytest.mark.parametrize("to", ["csv", "jsonl", "parquet", "arrow"])
def test_export_to_stdout_is_the_file_and_nothing_else(
    place: Path, tmp_path: Path, to: str
) -> None:
    args = ["export", place, "--to", to, "--state", "visits", "--out"]
    command = [sys.executable, "-m", "statekit", *map(str, args), "-"]
    done = subprocess.run(command, capture_output=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")
    (tmp_path / f"x.{to}").write_bytes(done.stdout)
    run(*args, tmp_path / f"y.{to}")
    if to in ("csv", "jsonl"):
        assert done.stdout == (tmp_path / f"y.{to}").read_bytes()
        return
    found = []
    for name in ("x", "y"):
        file = tmp_path / f"{name}.{to}"
        if to == "parquet":
            found.append(pyarrow.parquet.read_table(file))
        else:
            found.append(pyarrow.ipc.open_file(file.read_bytes()).read_all())
    assert found[0].equals(found[1])
    run("import", tmp_path / f"x.{to}", "--into", tmp_path / "new")


def test_export_to_stdout_takes_one_state_and_no_json(place: Path) -> None:
    export = ["export", place, "--to", "csv", "--out", "-"]
    assert "Name it with --state" in complaint(*export)
    assert "Leave --json out" in complaint(*export, "--state", "visits", "--json", code=2)
