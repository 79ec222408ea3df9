"""The API of a running job: who may ask, and what.

The job is a stand-in that notes what it is asked; jobs themselves are in test_engine.py.
"""

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest

from statekit.engine.http import Api
from statekit.engine.scaling import Rescale
from statekit.errors import EngineError


class Job:
    """What the API asks of a Running."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, str]] = []
        self.rescales: list[Rescale] = []

    def scale(self, stage: str, workers: int, strategy: str) -> Rescale:
        if stage != "count":
            raise EngineError(f"job 'j' has no stage {stage!r}.")
        self.asked.append((stage, workers, strategy))
        self.rescales.append(Rescale(stage, 2, workers, strategy, 43))
        return self.rescales[-1]

    def workers(self, stage: str) -> int:
        return 2


@pytest.fixture
def job() -> Job:
    return Job()


@pytest.fixture
def api(job: Job) -> Iterator[Api]:
    with Api(job) as found:  # type: ignore[arg-type]
        yield found


def ask(api: Api, method: str, path: str, **headers: str) -> tuple[int, Any]:
    made = http.client.HTTPConnection("127.0.0.1", api.port)
    try:
        made.putrequest(method, path, skip_host="Host" in headers)
        for name, value in {"Authorization": f"Bearer {api.token}", **headers}.items():
            made.putheader(name, value)
        made.endheaders()
        reply = made.getresponse()
        return reply.status, json.loads(reply.read())
    finally:
        made.close()


def test_a_stage_is_scaled_and_the_history_shows_it(api: Api, job: Job) -> None:
    status, done = ask(api, "POST", "/scale?stage=count&workers=4&strategy=all_at_once")
    assert (status, done["before"], done["after"]) == (200, 2, 4)
    assert ask(api, "POST", "/scale?stage=count")[0] == 200
    assert job.asked == [("count", 4, "all_at_once"), ("count", 3, "prioritised")]
    assert [one["after"] for one in ask(api, "GET", "/rescales")[1]] == [4, 3]


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/scale", 400, "stage is missing"),
        ("/scale?stage=count&workers=", 400, "no number of workers"),
        ("/scale?stage=count&workers=-1", 400, "no number of workers"),
        ("/scale?stage=count&workers=1&workers=2", 400, "each once"),
        ("/scale?stage=count&worker=1", 400, "'worker'"),
        ("/scale?stage=x&workers=1", 400, "no stage 'x'"),
        ("/other", 404, "POST /scale"),
    ],
)
def test_what_cannot_be_done_says_why(
    api: Api, job: Job, path: str, status: int, text: str
) -> None:
    found, answer = ask(api, "POST", path)
    assert found == status
    assert text in answer["error"]
    assert job.asked == []


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": ""}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Bearer \xe4"}, 401),
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1:1"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
def test_only_who_has_the_token_and_is_on_this_machine(
    api: Api, job: Job, headers: dict[str, str], status: int
) -> None:
    for method, path in (("POST", "/scale?stage=count&workers=4"), ("GET", "/rescales")):
        assert ask(api, method, path, **headers)[0] == status
    assert job.asked == []


def test_a_page_of_the_job_itself_may_ask(api: Api) -> None:
    assert ask(api, "GET", "/rescales", Origin=f"http://localhost:{api.port}")[0] == 200
