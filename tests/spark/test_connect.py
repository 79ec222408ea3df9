"""A query on Spark Connect: the function is unpickled in another process, and has nothing else.

Spark gives that process ten seconds to start, two of which it needs alone on a machine: at night.
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from streams import contents

HERE = Path(__file__).resolve().parent


@pytest.mark.nightly
def test_a_query_on_spark_connect_counts_exactly_over_a_restart(tmp_path: Path) -> None:
    pytest.importorskip("grpc_status")
    done = subprocess.run(
        [sys.executable, HERE / "connect_job.py", tmp_path],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kind"].startswith("pyspark.sql.connect")
    first, second = [["a", 2], ["b", 1], ["c", 1]], [["a", 3], ["d", 1]]
    assert found["sink"] == {"0": first, "1": second}
    assert found["output"] == sorted(first + second)
    assert contents(tmp_path / "state", "count", int) == Counter("abacad")
