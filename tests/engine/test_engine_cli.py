"""The commands run, plan and scale: a real job, started and scaled as a user would."""

import json
import os
import select
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
        (("worker", "--join", "nothing"), "no job runs in 'nothing'"),
        (("rescales", "--folder", "nothing"), "no job runs in 'nothing'"),
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


def children(pid: int) -> list[int]:
    found = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for text in found for child in text.split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_coordinator_is_killed_and_the_job_goes_on_when_it_is_run_again(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    command = [sys.executable, "-m", "statekit", "run", JOB, "--folder", str(folder)]
    command += ["--checkpoint-every", "0.2"]
    environment = {**os.environ, "WORDCOUNT_FOLDER": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as job:
        try:
            while not [*folder.glob("job-*.json")]:
                assert job.poll() is None
                select.select([], [], [], 0.05)
            tasks = children(job.pid)
            assert len(tasks) >= 5
        finally:
            job.kill()
    while any(map(is_alive, tasks)):  # none is left behind: they notice by themselves
        select.select([], [], [], 0.05)
    (tmp_path / "enough").write_text("")
    for _ in range(2):  # the second time it has ended already
        assert call_in_process(command, environment) == 0
        check(tmp_path)


def call_in_process(command: list[str], environment: dict[str, str]) -> int:
    return subprocess.run(command, env=environment, check=False, timeout=TIMEOUT_S).returncode


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
            moved = call(
                "move", "count", "--key-groups", "0-1", "--to", "count-0", "--folder", folder
            )
            assert "count: 3 -> 3 workers" in moved.output
            drained = call("drain", "count-1", "--strategy", "pause", "--folder", folder, "--json")
            assert json.loads(drained.output)["after"] == 2
            shown = call("rescales", "--folder", folder).output
            assert "1  count: 2 -> 3 workers (3 workers; asked), seamless: done" in shown
            none = call("abort-rescale", "--folder", folder)
            assert (none.exit_code, "no rescale is under way" in none.output) == (1, True)
            wrong = call("scale", "source", "--folder", folder)
            assert (wrong.exit_code, "only keyed stages" in wrong.output) == (1, True)
            (tmp_path / "enough").write_text("")
            assert job.wait(TIMEOUT_S) == 0
        finally:
            job.kill()
    check(tmp_path)
    assert not (folder / "api.json").exists()
