"""Every example runs, quietly, and finds its own result right: it exits with 0 only then."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ("wordcount", "sessions", "leaderboard", "restart")
TIMEOUT_S = 60  # they take a second or two; machines are shared


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_finds_its_result_right(name: str) -> None:
    path = ROOT / "examples" / f"{name}.py"
    command = [sys.executable, "-W", "error", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert 2 <= len(done.stdout.splitlines()) <= 10


def test_demo_scales_kills_and_finds_every_count_right(tmp_path: Path) -> None:
    path = ROOT / "examples" / "demo.py"
    plot = tmp_path / "plots" / "demo.png"
    command = [sys.executable, "-W", "error", str(path), "--quick", "--plot", str(plot)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10 * TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("no counts differ") == 2
    assert "first result after the kill" in done.stdout
    for row in ("restart 2 to 3", "restart 3 to 2", "seamless 2 to 3", "seamless 3 to 2"):
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(row)]
        assert len(line.removeprefix(row).split()) == 12
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert str(plot) in done.stdout


@pytest.mark.parametrize("mode", ["homes", "checkpoints"])
def test_kafka_totals_are_exact_though_workers_are_killed_at_random(mode: str) -> None:
    pytest.importorskip("confluent_kafka", reason="pip install confluent-kafka")
    seed = random.randrange(2**32)
    path = ROOT / "examples" / "kafka_counts.py"
    command = [sys.executable, "-W", "error", str(path), "--demo", str(seed)]
    command += ["--checkpoints"] * (mode == "checkpoints")
    print(f"seed {seed}")  # pytest shows it if the test fails
    done = subprocess.run(command, capture_output=True, text=True, timeout=10 * TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    killed, _, compared = done.stdout.splitlines()
    assert killed.startswith(f"seed {seed}: ")
    assert int(killed.split()[2]) > 0, "no worker was killed"
    assert compared.endswith(": 0 differ")


def test_sensors_on_spark_are_exact_though_the_job_is_rescaled_and_killed(tmp_path: Path) -> None:
    pytest.importorskip("pyspark", reason="pip install statekit[spark]")
    path = ROOT / "examples" / "spark" / "demo.py"
    plot = tmp_path / "demo.png"
    command = [sys.executable, str(path), "--quick", "--plot", str(plot)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20 * TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 of 1,800 rows differ" in done.stdout
    assert "which was in the state already: not computed again" in done.stdout
    assert [line.split()[:2] for line in done.stdout.splitlines() if line.endswith("s")] == [
        ["2", "2"],
        ["5", "2"],
        ["3", "2"],
    ]
    assert plot.read_bytes().startswith(b"\x89PNG")
