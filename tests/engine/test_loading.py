"""Jobs from TOML files, with parameters and settings; what is wrong with one is said."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from test_workloads import run, write_job

from statekit.cli.app import app
from statekit.engine.collector import Collector
from statekit.engine.loading import load_job
from statekit.engine.settings import Settings
from statekit.errors import ArgumentError, EngineError, StateKitError

MODULE = """
from statekit.engine.job import Job, KeyedOperator

def make(rows: int, folder: str = "out") -> Job:
    return Job(f"rows{rows}").source(lambda a, b, c: iter(())).sink(folder)

job = make(1)
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    (tmp_path / "mine.py").write_text(MODULE)

    def write(text: str) -> str:
        path = tmp_path / "job.toml"
        path.write_text(text)
        return str(path)

    return write


def test_a_file_gives_a_job_its_parameters_and_settings(write: Any) -> None:
    job = load_job(
        write('job = "mine.py:make"\n[parameters]\nrows = 7\n[settings]\nbatch_rows = 50\n')
    )
    assert (job.name, job.settings.batch_rows) == ("rows7", 50)
    assert job.settings == Settings(batch_rows=50)
    assert load_job(write('job = "mine.py"')).name == "rows1"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("job = ", "is no TOML"),
        ("", "names no job"),
        ('job = "mine.py"\n[knobs]\n', "says 'knobs', which is nothing of a job"),
        ('job = "mine.py:make"', "needs rows"),
        ('job = "mine.py:make"\n[parameters]\ncolour = 1', "no parameter 'colour'. It has rows"),
        ('job = "mine.py"\n[parameters]\nrows = 1', "takes no"),
        ('job = "mine.py"\nparameters = 1', "is a table"),
        ('job = "none.py"', "there is no file"),
        ('job = "no_such_module:job"', "there is no module"),
        ('job = "mine.py"\n[settings]\ncolour = 1', "unknown field `colour`.*There are watermark_"),
        ('job = "mine.py"\n[settings]\nbatch_rows = "x"', "Expected `int`"),
        ('job = "mine.py"\n[settings]\ngrace_ms = -1', "grace_ms = -1: pass 0 or more"),
        ('job = "mine.py"\n[settings]\nbuffer_bytes = 1', "pass at least 1024"),
        ('job = "mine.py"\n[settings]\nstrategy = "magic"', "There are seamless"),
        ('job = "mine.py"\n[settings]\nstate = "disk"', "Invalid enum value 'disk'"),
        ('job = "statekit.engine.workloads:key_count"\n[parameters]\nfolder="x"\nhue=1', "hue"),
    ],
)
def test_what_is_wrong_in_a_file_is_said(write: Any, text: str, match: str) -> None:
    with pytest.raises(StateKitError, match=match):
        load_job(write(text))
    done = CliRunner().invoke(app, ["plan", write(text)])
    assert done.exit_code == 1
    assert "Traceback" not in done.output


def test_a_file_that_is_not_there_is_said() -> None:
    with pytest.raises(EngineError, match=r"there is no file 'none.toml'"):
        load_job("none.toml")


# ---- What settings do


@pytest.mark.parametrize(
    "settings",
    [
        "state = 'rocksdb'\nstate_memory = '8MiB'\nstrategy = 'prioritised'\nbatch_rows = 300",
        pytest.param("batch_rows = 50\nbatch_timeout_ms = 20", marks=pytest.mark.nightly),
        pytest.param("buffer_bytes = 2048\nstrategy = 'batched'", marks=pytest.mark.nightly),
        pytest.param("is_fixed = true\nstrategy = 'restart'", marks=pytest.mark.nightly),
    ],
)
def test_results_are_exact_with_other_settings(settings: str, tmp_path: Path) -> None:
    _, results, records = run(
        tmp_path, "key_count", {"rate": 2_000, "keys": 500, "zipf": 1.0}, f"[settings]\n{settings}"
    )
    assert results.num_rows == records
    if "rocksdb" in settings:
        assert [*(tmp_path / "job" / "homes").iterdir()]


# ---- The collector


def batch(*numbers: int, name: str = "n") -> pa.RecordBatch:
    return pa.record_batch({name: pa.array(numbers, pa.int64())})


def plain(taken: Any) -> list[tuple[str, list[int]]]:
    return [(to, some.column(0).to_pylist()) for to, some in taken]


def test_batches_are_collected_by_size_and_time() -> None:
    now = [0.0]
    some = Collector(3, 50, lambda: now[0])
    assert some.left is None
    assert plain(some.add("a", batch(1))) == []
    now[0] = 0.02
    assert plain(some.add("b", batch(2, 3))) == []
    assert some.left == pytest.approx(0.03)
    assert plain(some.take_due()) == []
    assert plain(some.add("a", batch(4, 5))) == [("a", [1, 4, 5])]
    assert plain(some.add("b", batch(6, name="other"))) == [("b", [2, 3])]
    now[0] = 0.05
    assert plain(some.take_due()) == [("b", [6])]
    assert some.left is None
    assert plain(some.add("a", batch(7))) == []
    assert plain(some.take()) == [("a", [7])]
    assert plain(some.take()) == []


def test_without_a_size_nothing_is_collected() -> None:
    some = Collector(0, 5)
    assert plain(some.add("a", batch(1))) == [("a", [1])]
    assert some.left is None


def test_the_parameters_of_a_job_are_checked_when_it_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="keys >= 1"):
        load_job(str(write_job(tmp_path, "key_count", {"keys": 0})))
