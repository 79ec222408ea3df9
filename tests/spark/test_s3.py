"""State and output in an object store that Spark itself has no class to read."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("moto")
pytest.importorskip("redis")
from servers import S3Server, s3  # noqa: F401 - s3 is a fixture
from streams import Files, contents

HERE = Path(__file__).resolve().parent


def run_driver(place: Path, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, HERE / "killed_driver.py", place, "local[2]", "s3://spark/job"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    return done.returncode, done.stdout if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.nightly
def test_a_query_whose_state_is_in_s3_counts_exactly_over_kills_of_its_driver(
    s3: S3Server,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(HERE))  # of the workers: they import streams.py
    s3.make_bucket("spark")
    source, expected, total = Files(tmp_path / "in", "user string"), [], Counter[str]()
    for users, point in (("aab", None), ("bc", "spark.computed"), ("d", "parts.published")):
        source.add(user=list(users))
        total.update(users)
        expected += [[user, total[user]] for user in {*users}]
        if point is not None:
            assert run_driver(tmp_path, STATEKIT_FAILPOINTS=f"{point}=kill")[0] == -signal.SIGKILL
        code, printed = run_driver(tmp_path)
        assert code == 0, printed
        assert json.loads(printed.splitlines()[-1]) == sorted(expected)
    assert contents("s3://spark/job/state", "count", int) == total
