"""Random lives of providers across features (tests/lives), compared with a plain model.

Two seeds that are always the same and one that is not; hours of it in `make test-all`.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
IS_NIGHTLY = bool(os.environ.get("STATEKIT_NIGHTLY"))
STEPS = 2_000
NIGHTLY_SECONDS = 2 * 3600


@pytest.mark.parametrize("seed", [1, 2, random.Random().randrange(10**6)], ids=["1", "2", "new"])
def test_lives_agree_with_the_model(seed: int) -> None:
    length = ["--seconds", str(NIGHTLY_SECONDS)] if IS_NIGHTLY else ["--steps", str(STEPS)]
    command = [sys.executable, "-m", "tests.lives", "--seed", str(seed), *length]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"seed {seed}: {done.stdout[-5000:]}{done.stderr[-2000:]}"
