"""One Spark session for all Spark tests of a process."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from session import spark_session
from streams import Job

from statekit import failpoints

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings of Spark and of what it imports are not ours to mend."""
    for item in items:
        if HERE in Path(str(item.path)).parents:
            item.add_marker(pytest.mark.filterwarnings("default"))
            if item.get_closest_marker("nightly") and not os.environ.get("STATEKIT_NIGHTLY"):
                item.add_marker(pytest.mark.skip(reason="STATEKIT_NIGHTLY=1 runs it"))


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    # Workers find the functions of the test modules here.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(HERE), os.environ.get("PYTHONPATH")))
    )
    session = spark_session("local[2,3]")  # a task may be tried three times
    yield session
    session.stop()


@pytest.fixture(autouse=True)
def failpoints_off() -> Any:
    yield
    failpoints.configure(None)


@pytest.fixture
def job(spark: Any, tmp_path: Path) -> Job:
    return Job(spark, tmp_path)
