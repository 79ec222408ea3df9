"""The commands run, plan and scale: a real job, started and scaled as a user would."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import wordcount
from click.testing import CliRunner
from test_engine import TIMEOUT_S, check

from statekit.cli.app import app

JOB = str(Path(wordcount.__file__))


def call(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(one) for one in arguments])


def test_plan_shows_stages_and_processes() -> None:
    assert "[count by word]" in call("plan", JOB).output
    stages = json.loads(call("plan", JOB, "--json").output)["stages"]
    assert [stage["kind"] for stage in stages] == ["source", "keyed", "sink"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("plan", "no_such_jobs"), "there is no module 'no_such_jobs'"),
        (("run", "none.py", "--folder", "x"), "there is no file 'none.py'"),
        (("run", JOB, "--folder", "x", "--port", "70000"), "there is no such port"),
        (("scale", "count", "--folder", "nothing"), "no job runs in 'nothing'"),
    ],
)
def test_what_cannot_be_done_is_one_message(
    arguments: tuple[str, ...], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = call(*arguments)
    assert done.exit_code == 1
    assert text in done.output
    assert "Traceback" not in done.output


def test_a_job_is_run_and_scaled_from_the_command_line(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    command = [sys.executable, "-m", "statekit", "run", JOB, "--folder", str(folder)]
    command += ["--checkpoint-every", "1", "--json"]
    environment = {**os.environ, "WORDCOUNT_FOLDER": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as job:
        try:
            assert job.stdout is not None
            assert set(json.loads(job.stdout.readline())) == {"job", "url", "token"}
            assert (folder / "api.json").stat().st_mode & 0o777 == 0o600
            done = call("scale", "count", "--folder", folder)
            assert "count: 2 -> 3 workers" in done.output
            wrong = call("scale", "source", "--folder", folder)
            assert (wrong.exit_code, "only keyed stages" in wrong.output) == (1, True)
            (tmp_path / "enough").write_text("")
            assert job.wait(TIMEOUT_S) == 0
        finally:
            job.kill()
    check(tmp_path)
    assert not (folder / "api.json").exists()
