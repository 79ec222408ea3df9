"""Jobs in real processes, for several files of tests."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import wordcount

from statekit.engine.running import Running, start

HERE = Path(__file__).resolve().parent
JOB = str(Path(wordcount.__file__))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("STATEKIT_NIGHTLY"):
        return
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("nightly"):
            item.add_marker(pytest.mark.skip(reason="STATEKIT_NIGHTLY=1 runs it"))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Running]]:
    """Starts the job; a second call starts it again, in the same folder."""
    monkeypatch.setenv("WORDCOUNT_FOLDER", str(tmp_path))
    jobs: list[Running] = []

    def begin() -> Running:
        jobs.append(start(JOB, tmp_path / "job"))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.stop()
