"""Fixtures of the fault tests: the built shim, and a place to work in that is quick to sync."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import shim

ROOT = Path(__file__).resolve().parents[2]
MEMORY = Path("/dev/shm")


@pytest.fixture(scope="session")
def library() -> Path:
    """The I/O shim, compiled."""
    return shim.build(ROOT / "build" / "faults")


@pytest.fixture(scope="session")
def testing_build() -> Path:
    """statekit with fail points and failing allocations in C; a directory for PYTHONPATH."""
    target = ROOT / "build" / "testing"
    setup = [sys.executable, "setup.py", "-q", "build", "--build-base", f"{target}-temp"]
    subprocess.run(
        [*setup, "--build-lib", str(target)],
        check=True,
        cwd=ROOT,
        env=os.environ | {"STATEKIT_CFLAGS": "-O1 -g -DSK_TESTING"},
    )
    return target


@pytest.fixture
def place() -> Iterator[Path]:
    """An empty directory, in memory if possible: no test here asks how fast a disk is."""
    parent = MEMORY if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="statekit-faults-", dir=parent)).resolve()
    yield path
    shutil.rmtree(path)
