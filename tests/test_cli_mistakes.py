"""What a user may do wrong, and what may go wrong around a command: what it says, how it ends.

No command that fails may change anything: the files are compared before and after.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
from test_cli import complaint, run, run_json
from test_cli_looking import take_two
from test_looking import files

import statekit as sk
from statekit.checkpoint.reader import open_checkpoint
from statekit.checkpoint.writer import Attempt
from statekit.cli.options import parse_float, parse_json
from statekit.live.job import CheckpointJob

WAIT_S = 120


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ground = tmp_path_factory.mktemp("ground")
    place = take_two(ground / "ck")
    run("restore", place, "--into", f"rocksdb:{ground}/h")
    for to in ("csv", "parquet"):
        run("export", place, "--to", to, "--out", ground / "files")
    make_files(ground)
    run("rescale", place, "--workers", "2", "--out", ground / "job")
    (ground / "job" / "worker-2").mkdir()
    (ground / "empty").mkdir()
    return ground


def make_files(ground: Path) -> None:
    texts = {
        "ok.csv": "id,n\n1,5\n",
        "short.csv": "id,n\n1,5\n2\n",
        "long.csv": "id,n\n1,2,3\n",
        "twice.csv": "id,id\n1,2\n",
        "nothing.csv": "",
        "huge.csv": "id,n\n1,1e999\n",
        "huge.jsonl": '{"id": 1, "n": 1e999}\n',
        "array.jsonl": "[1]\n",
        "null.jsonl": '{"id": null, "n": 1}\n',
        "mixed.jsonl": '{"id": "a", "n": 1}\n{"id": 5, "n": 2}\n',
        "surrogate.jsonl": '{"id": "\\ud800", "n": 1}\n',
        "token": "no token",
        "junk.parquet": "PAR1 and so on PAR1",
    }
    for name, text in texts.items():
        (ground / name).write_text(text)
    for name, text in {
        "junk": "junk",
        "none": "{}",
        "newer": '{"statekit": 99}',
        "form": '{"statekit": 1, "schema": {"name": "s", "form": "x", "key": "s", "type": "int"}, '
        '"key_groups": 4, "subgroups": 1, "watermark": null}',
        "groups": '{"statekit": 1, "schema": {"name": "s", "form": "value", "key": "s", '
        '"type": "int"}, "key_groups": "x", "subgroups": 1, "watermark": null}',
    }.items():
        (ground / f"{name}.csv").write_text("key,value\na,1\n")
        (ground / f"{name}.csv.statekit.json").write_text(text)
    damaged = bytearray((ground / "files" / "clicks.parquet").read_bytes())
    damaged[4:60] = bytes(byte ^ 255 for byte in damaged[4:60])
    (ground / "damaged.parquet").write_bytes(damaged)


MISTAKES: list[tuple[str, int, str]] = [
    # Places
    ("ls ck@x", 1, "'ck@x' names no checkpoint. Write ck@7 for checkpoint 7 of ck"),
    ("ls ck@", 1, "`statekit ls ck` tells which there are"),
    ("ls ck@-1", 1, "names no checkpoint"),
    ("get ck@1/ visits user-1", 1, "names no checkpoint"),
    ("merge ck@1@2 --out o", 1, "'ck@1@2' names no checkpoint"),
    ("inspect job@x", 1, "`statekit ls job`"),
    ("ls nowhere@x", 1, "there is no checkpoint"),
    ("ls ok.csv", 1, "it is no directory"),
    ("ls ''", 1, "names no storage"),
    ("ls s3:/x", 1, "Use s3://..."),
    ("inspect :7000", 1, "':7000' is no address"),
    ("get unix: a b", 1, "'unix:' is no address"),
    ("inspect 127.0.0.1:0", 1, "has no port"),
    ("fetch ck --discard", 1, "'ck' is no address"),
    ("get job visits user-1", 1, "there is no checkpoint in '{ground}/job/worker-2'"),
    ("serve job", 1, "job/worker-2"),
    ("compact job", 1, "has the checkpoints of 3 workers. Name one of them"),
    # States, keys, values
    ("inspect ck --state ''", 1, "has no state ''"),
    ("export ck --to csv --state '' --out o", 1, "has no state ''"),
    ("get ck visits ''", 1, "nothing under ''"),
    ("get ck tags 99999999999999999999", 1, "does not fit into 64 bits"),
    ("get ck when '[\"a\"]'", 1, 'Write a JSON array: ["alice", 7]'),
    ("get ck prefs 0xzz", 1, "bytes are written in hex"),
    ("get ck visits a b", 2, "unexpected extra argument"),
    ("edit ck visits user-1 99999999999999999999", 1, "expected is int of 64 bits"),
    ("edit ck visits user-1 true", 1, "is True, a bool; expected is int"),
    ("edit ck visits user-1 null", 1, "is null; expected is int"),
    ("edit ck prefs 0x61 '{\"1\": 1e999}'", 1, "1e999 is too large for a float"),
    ("edit ck anything user-1 '[1e999]'", 1, "1e999 is too large for a float"),
    ("edit ck tags 5 '[1]'", 1, "$[0] is 1, an int; expected is str"),
    ("edit ck when '[\"a\", 1]' '\"yesterday\"'", 1, "expected is a datetime"),
    # Numbers
    ("regroup ck --key-groups 4194304", 1, "Use a power of 2, 1048576 at most"),
    ("regroup ck --key-groups 0", 1, "there cannot be 0 key-groups"),
    ("restore ck --into rocksdb:o --key-groups 5-3", 1, "'5-3' is no range. Write 0-63"),
    ("restore ck --into rocksdb:o --key-groups 1-2-3", 1, "'1-2-3' is no range"),
    ("restore ck --into rocksdb:o --key-groups 1,,2", 1, "'' is no range"),
    ("restore ck --into rocksdb:o --key-groups -5", 1, "'-5' is no range"),
    ("serve ck --key-groups 200", 1, "there is no key-group 200"),
    ("gc ck --keep x", 2, "--keep"),
    ("fetch 127.0.0.1:1 --discard --timeout 0", 2, "--timeout"),
    # Homes
    ("checkpoint rocksdb:ck --to o", 1, "'ck' is no RocksDB home"),
    ("checkpoint rocksdb:empty --to o", 1, "'empty' is no RocksDB home"),
    ("serve rocksdb:ck", 1, "'ck' is no RocksDB home"),
    ("checkpoint ck --to o", 1, "'ck' is no URL of a home"),
    ("restore ck --into o", 1, "'o' is no URL of a home"),
    ("restore ck --into rocksdb:h?look=1", 1, "is a copy to look at, which is gone"),
    ("restore ck --into rocksdb:ok.csv", 1, "it is no directory"),
    ("checkpoint rocksdb:h?foo=1 --to o", 1, "does not know: foo"),
    # Files to write
    ("export ck --to parquet --state visits --out v.csv", 1, "ends in .csv, and what is written"),
    ("export ck --to csv --out all.csv", 1, "Name the state with --state, or a directory"),
    ("export ck --to csv --out ok.csv/x", 1, "Not a directory"),
    ("export ck --to csv --state visits --out ''", 1, "names no storage"),
    ("export ck --to csv --out bogus://x/y", 1, "Protocol not known: bogus"),
    ("export ck --to csv --out token", 1, "'token' is a file. Name a directory"),
    # Files to read
    ("import - --into o", 1, "import reads files, not stdin"),
    ("import files --into o", 1, "does not end in .parquet"),
    ("{foreign}long.csv", 1, "row 1 has more cells than there are columns: id, n"),
    ("{foreign}short.csv", 1, "row 2: the row has fewer cells than columns"),
    ("{foreign}twice.csv", 1, "has the column 'id' twice"),
    ("{foreign}nothing.csv", 1, "is empty: the first line of a CSV has the names"),
    ("{foreign}huge.csv", 1, "row 1: '1e999' is no float"),
    ("{foreign}huge.jsonl", 1, "line 1 is no JSON (1e999 is too large for a float)"),
    ("{foreign}array.jsonl", 1, "line 1 is no JSON object"),
    ("{foreign}null.jsonl", 1, "the column 'id' of 'null.jsonl' holds no keys"),
    ("{foreign}mixed.jsonl", 1, "row 2: the key 5 is of type int, not str"),
    ("{foreign}surrogate.jsonl", 1, "has no UTF-8 form"),
    ("import junk.parquet --into o", 1, "is no parquet file"),
    ("import damaged.parquet --into o", 1, "'damaged.parquet' is no parquet file"),
    ("import junk.csv --into o", 1, "says about its state cannot be read (Expecting value"),
    ("import none.csv --into o", 1, "it has no 'statekit'"),
    ("import newer.csv --into o", 1, "is of a newer statekit"),
    ("import form.csv --into o", 1, "of form 'x'"),
    ("import groups.csv --into o", 1, "x key-groups of 1"),
    ("import files/visits.csv --into o --key id", 1, "Leave --key out"),
    ("import files/visits.csv files/when.csv --into o --state s", 1, "Import files of one export"),
    # Processes
    ("serve ck --token-file token", 1, "'token' holds no token: the token must be"),
    ("serve ck --token-file nowhere", 1, "'nowhere': No such file"),
    ("serve ck --tls-cert token --tls-key token", 1, "statekit: TLS.cert: 'token' hold no cert"),
    ("serve ck --address 127.0.0.1", 1, "'127.0.0.1' is no address"),
    ("inspect 127.0.0.1:1 --tls-cert token", 2, "go together"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "code", "message"), MISTAKES, ids=[line for line, _, _ in MISTAKES]
)
def test_a_mistake_is_told_and_changes_nothing(
    ground: Path, monkeypatch: pytest.MonkeyPatch, line: str, code: int, message: str
) -> None:
    monkeypatch.chdir(ground)
    before = files(ground)
    line = line.replace("{foreign}", "import --into o --state s --key id --value n --type float ")
    text = complaint(*shlex.split(line), code=code)
    assert message.format(ground=ground) in text
    assert "Traceback" not in text
    assert files(ground) == before


def test_a_mark_at_the_start_of_a_text_file_is_passed_over(tmp_path: Path) -> None:
    """Some programs write a BOM, by which others recognize UTF-8."""
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfid,n\n1,5\n")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"id": "1", "n": 5}\n')
    for name in ("a.csv", "b.jsonl"):
        place = tmp_path / f"from-{name}"
        args = ["--state", "s", "--key", "id", "--value", "n", "--type", "int"]
        run("import", tmp_path / name, "--into", place, *args)
        assert run("get", place, "s", "1") == "5\n"


@pytest.mark.parametrize("text", ["1.5", "-2e300", "1e308", "inf", "-Infinity", "nan"])
def test_floats_that_there_are_are_read(text: str) -> None:
    assert str(parse_float(text)) == str(float(text))


@pytest.mark.parametrize("text", ["1e309", "-1e999", "9" * 400 + ".0"])
def test_floats_that_there_are_not_are_refused(text: str) -> None:
    for parse in (parse_float, parse_json):
        with pytest.raises(ValueError, match="too large for a float"):
            parse(text)


def test_many_key_groups_for_few_entries_take_little_time(tmp_path: Path) -> None:
    """With a million new leaves, slices are made only for those that have entries."""
    place = take_two(tmp_path / "ck")
    run("regroup", place, "--key-groups", str(1 << 20), "--out", tmp_path / "many")
    assert open_checkpoint(tmp_path / "many").key_group_count == 1 << 20
    assert run("diff", place, tmp_path / "many") == "no differences\n"


def test_what_cannot_be_read_is_damage_among_other(tmp_path: Path) -> None:
    place = take_two(tmp_path / "ck")
    first, second = open_checkpoint(place, 2).manifest.packs
    (place / first.name).unlink()
    (place / first.name).mkdir()  # like on a failing disk, it cannot be read
    (place / second.name).unlink()
    found = run_json("verify", place, code=3)
    assert [one["checkpoints"] for one in found["damage"]] == [[1, 2], [2]]
    assert "cannot be read" in found["damage"][0]["message"]
    assert "it is not there (checkpoint 2)" in run("verify", place, code=3)


def test_a_file_with_much_damage_does_not_fill_the_screen(tmp_path: Path) -> None:
    place = take_two(tmp_path / "ck")
    pack = max(place.glob("*.pack"), key=lambda file: file.stat().st_size)
    pack.write_bytes(pack.read_bytes()[:1000])
    damage = run_json("verify", place, code=3)["damage"]
    lines = run("verify", place, code=3).splitlines()
    assert len(damage) > 50
    assert len(lines) < 20
    assert f"and {len(damage) - 10:,} more in {pack}; --json shows all" in "\n".join(lines)


def test_an_export_that_fails_leaves_none_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = take_two(tmp_path / "ck")
    for out in (str(tmp_path / "o"), f"memory://{tmp_path.name}/o"):
        fs, path = fsspec.core.url_to_fs(out)
        fs.makedirs(path, exist_ok=True)
        fs.pipe_file(f"{path}/mine.txt", b"mine")
        with monkeypatch.context() as patch:
            patch.setattr("statekit.cli.files._write_csv", fails_at(4))
            complaint("export", place, "--to", "csv", "--out", out)
        assert [name.rpartition("/")[2] for name in fs.find(path)] == ["mine.txt"]
        assert len(run_json("export", place, "--to", "csv", "--out", out)) == 9


def fails_at(call: int) -> Any:
    from statekit.cli import files as module

    write, left = module._write_csv, [call]

    def fail(*args: Any) -> int:
        left[0] -= 1
        if not left[0]:
            raise OSError(28, "No space left on device")
        return write(*args)

    return fail


def test_a_full_disk_is_told_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = take_two(tmp_path / "ck")
    monkeypatch.setattr("statekit.cli.files._write_csv", fails_at(1))
    text = complaint("export", place, "--to", "csv", "--state", "visits", "--out", tmp_path / "o")
    assert f"'{tmp_path}/o/visits.csv': No space left on device. Free some space" in text


# ---- Around a process: pipes, full disks, closed descriptors, signals


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state whose text is larger than a pipe's buffer, as a checkpoint and as a home."""
    ground = tmp_path_factory.mktemp("wide")
    with sk.open("memory:", key_groups=4, subgroups=1) as kv:
        names = kv.value("names", str)
        names.put_many([f"user-{n}" for n in range(5000)], ["x" * 100] * 5000)
        kv.checkpoint(ground / "ck")
        names["user-1"] = "y"
        kv.checkpoint(ground / "ck")
    run("restore", ground / "ck", "--into", f"rocksdb:{ground}/h")
    return ground


def shell(line: str, place: Path) -> "subprocess.CompletedProcess[str]":
    line = line.replace("statekit", f"{sys.executable} -m statekit").replace("CK", f"{place}/ck")
    command = ["bash", "-o", "pipefail", "-c", line]
    # Without a buffer, Python takes a partial write for a complete one. The program must not.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=WAIT_S, env=environment
    )


@pytest.mark.parametrize(
    ("line", "codes"),
    [
        # More than a pipe holds: it cannot be written without a reader.
        ("statekit inspect CK --limit 5000 | head -1", {141}),
        ("statekit inspect CK --limit 5000 --json | head -1", {141}),
        ("statekit export CK --to csv --state names --out - | head -1", {141}),
        # One line: a pipe may accept it before its reader ends. Then the exit code is as usual.
        ("statekit diff CK@1 CK | true", {141, 1}),
        ("statekit diff CK CK | true", {141, 0}),
        ("statekit verify CK | true", {141, 0}),
    ],
)
def test_a_reader_that_has_gone_is_told_by_the_code_alone(
    wide: Path, line: str, codes: set[int]
) -> None:
    done = shell(line, wide)
    assert done.returncode in codes
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("statekit ls CK", 1),
        ("statekit get CK names user-1 --json", 1),
        ("statekit diff CK CK", 2),
        ("statekit export CK --to csv --state names --out -", 1),
        ("statekit --help", 1),
        ("statekit --version", 1),
        ("statekit completion bash", 1),
    ],
)
def test_a_result_that_cannot_be_written_is_a_failure(wide: Path, line: str, code: int) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    done = shell(f"{line} > /dev/full", wide)
    assert done.returncode == code
    assert "cannot be written to stdout: No space left on device" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_closed_stdout_is_told_before_anything_is_done(wide: Path) -> None:
    done = shell("statekit edit CK names user-1 '\"z\"' >&-", wide)
    assert (done.returncode, done.stderr) == (
        1,
        "statekit: stdout is closed. Give it a file, or /dev/null.\n",
    )
    assert run("get", wide / "ck", "names", "user-1") == '"y"\n'


def test_a_closed_stderr_does_no_harm(wide: Path, tmp_path: Path) -> None:
    done = shell(f"statekit export CK --to csv --out {tmp_path} 2>&-", wide)
    assert (done.returncode, (tmp_path / "names.csv").exists()) == (0, True)
    assert shell("statekit ls nowhere 2>&-", wide).returncode == 1


def test_text_is_utf_8_whatever_the_locale_says(tmp_path: Path) -> None:
    with sk.open("memory:") as kv:
        kv.value("names", str)["ä"] = "→"
        kv.checkpoint(tmp_path / "ck")
    for settings in ("PYTHONIOENCODING=ascii", "LC_ALL=C"):
        done = shell(f"{settings} statekit get CK names ä", tmp_path)
        assert done.stdout == '"→"\n'
        assert done.returncode == 0
        assert shell(f"{settings} statekit inspect CK", tmp_path).returncode == 0


def _hear_interrupts() -> None:
    """If the tests were started in the background, SIGINT may be ignored, which is inherited."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def started(*args: str | Path, aside: Path) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-m", "statekit", *map(str, args)]
    environment = {**os.environ, "TMPDIR": str(aside)}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        preexec_fn=_hear_interrupts,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


SIGNALS = [(signal.SIGINT, 130, b"statekit: interrupted\n"), (signal.SIGTERM, 143, b"")]


@pytest.mark.parametrize(("number", "code", "message"), SIGNALS)
def test_a_command_that_is_interrupted_leaves_nothing_behind(
    wide: Path, tmp_path: Path, number: int, code: int, message: bytes
) -> None:
    """It is interrupted in the middle of writing to stdout, a pipe that is full."""
    before = files(wide)
    home = f"rocksdb:{wide}/h"
    args = ["export", home, "--to", "csv", "--state", "names", "--out", "-"]
    with started(*args, aside=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        assert list(tmp_path.iterdir()), "a copy of the home, and the file"
        process.send_signal(number)
        _, stderr = process.communicate(timeout=WAIT_S)
    assert (process.returncode, stderr) == (code, message)
    assert list(tmp_path.iterdir()) == []
    assert files(wide) == before


@pytest.mark.parametrize(("number", "code", "message"), SIGNALS)
def test_an_import_that_is_interrupted_publishes_nothing(
    tmp_path: Path, number: int, code: int, message: bytes
) -> None:
    """It is interrupted in the middle of reading a file: a pipe that never ends."""
    (tmp_path / "aside").mkdir()
    os.mkfifo(tmp_path / "rows.csv")
    args = ["import", tmp_path / "rows.csv", "--into", tmp_path / "new", "--state", "s"]
    args += ["--key", "id", "--value", "n", "--type", "int", "--key-type", "str"]
    with started(*args, aside=tmp_path / "aside") as process:
        with (tmp_path / "rows.csv").open("w") as rows:
            rows.write("id,n\n")
            for at in range(50_000):
                rows.write(f"user-{at},{at}\n")
            rows.flush()  # now all has been read, except what a pipe holds
            process.send_signal(number)
            _, stderr = process.communicate(timeout=WAIT_S)
        assert (process.returncode, stderr) == (code, message)
    assert not list(tmp_path.glob("new/*.manifest"))


def test_a_checkpoint_that_is_interrupted_is_not_published(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_cancelled = threading.Event()
    cancel, publish = CheckpointJob.cancel, Attempt.publish

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def tell(job: CheckpointJob) -> None:
        cancel(job)
        is_cancelled.set()

    def publish_later(*args: Any, **options: Any) -> Any:
        assert is_cancelled.wait(WAIT_S)
        return publish(*args, **options)

    shutil.copytree(wide / "h", tmp_path / "h")
    monkeypatch.setattr(CheckpointJob, "wait", interrupt)
    monkeypatch.setattr(CheckpointJob, "cancel", tell)
    monkeypatch.setattr(Attempt, "publish", publish_later)
    text = complaint("checkpoint", f"rocksdb:{tmp_path}/h", "--to", tmp_path / "new", code=130)
    assert text == "statekit: interrupted\n"
    assert not list(tmp_path.glob("new/*.manifest"))
