"""State and output in an object store that Spark itself has no class to read."""

import json
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


@pytest.mark.nightly
def test_a_query_whose_state_is_in_s3_counts_exactly_over_a_restart(
    s3: S3Server,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(HERE))  # of the workers: they import streams.py
    s3.make_bucket("spark")
    source, expected, total = Files(tmp_path / "in", "user string"), [], Counter[str]()
    for users in ("aab", "bc", "d"):
        source.add(user=list(users))
        total.update(users)
        expected += [[user, total[user]] for user in {*users}]
        done = subprocess.run(
            [sys.executable, HERE / "killed_driver.py", tmp_path, "local[2]", "s3://spark/job"],
            capture_output=True,
            text=True,
            check=False,
            timeout=400,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads(done.stdout.splitlines()[-1]) == sorted(expected)
    assert contents("s3://spark/job/state", "count", int) == total
