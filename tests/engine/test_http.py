"""The API of a running job: who may ask, and what.

The job is a stand-in that notes what it is asked; jobs themselves are in test_engine.py.
"""

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from statekit.engine.http import Api
from statekit.engine.metrics import Figures
from statekit.engine.rescales import Rescale
from statekit.engine.strategies import DEFAULT, How
from statekit.errors import EngineError


class Job:
    """What the API asks of a Running. strategy: None is that of the job's settings."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.rescales: list[Rescale] = []

    def scale(self, stage: str, workers: int, strategy: str | None, **how: Any) -> Rescale:
        if stage != "count":
            raise EngineError(f"job 'j' has no stage {stage!r}.")
        return self._note(f"{workers} workers", workers, "scale", strategy, how)

    def drain(self, worker: str, strategy: str | None, **how: Any) -> Rescale:
        return self._note(f"without {worker}", 1, "drain", strategy, how)

    def move(
        self, stage: str, groups: list[int], to: str, strategy: str | None, **how: Any
    ) -> Rescale:
        return self._note(f"key-groups {groups} to {to}", 2, "move", strategy, how)

    def abort_rescale(self, number: int | None) -> Rescale:
        return self._note(f"abort {number}", 2, "abort", "seamless", {})

    def workers(self, stage: str) -> int:
        return 2

    figures = Figures("j", {"count-0": {"records_in": 7.0}}, {"count": 2}, {"checkpoints": 3}, {})

    def _note(self, goal: str, after: int, what: str, strategy: str | None, how: Any) -> Rescale:
        given = {name: value for name, value in how.items() if value is not None}
        self.asked.append((what, goal, strategy, given))
        self.rescales.append(Rescale(1, "count", goal, "asked", How(strategy or DEFAULT), 2, after))
        return self.rescales[-1]


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
        data = reply.read()
        is_json = reply.getheader("Content-Type") == "application/json"
        return reply.status, json.loads(data) if is_json else data.decode()
    finally:
        made.close()


def test_a_stage_is_scaled_and_the_history_shows_it(api: Api, job: Job) -> None:
    status, done = ask(api, "POST", "/scale?stage=count&workers=4&strategy=fluid&step=3&gap=0.5")
    assert (status, done["before"], done["after"], done["strategy"]) == (200, 2, 4, "fluid")
    assert ask(api, "POST", "/scale?stage=count&pace=99")[0] == 200
    assert job.asked == [
        ("scale", "4 workers", "fluid", {"step": 3, "gap_s": 0.5}),
        ("scale", "3 workers", None, {"pace": 99}),
    ]
    assert [one["after"] for one in ask(api, "GET", "/rescales")[1]] == [4, 3]


def test_workers_are_drained_key_groups_moved_and_rescales_aborted(api: Api, job: Job) -> None:
    for path in (
        "/drain?worker=count-0",
        "/move?stage=count&key-groups=1,3-5&to=count-1&strategy=pause",
        "/abort-rescale",
        "/abort-rescale?number=2",
    ):
        assert ask(api, "POST", path)[0] == 200
    assert job.asked == [
        ("drain", "without count-0", None, {}),
        ("move", "key-groups [1, 3, 4, 5] to count-1", "pause", {}),
        ("abort", "abort None", "seamless", {}),
        ("abort", "abort 2", "seamless", {}),
    ]


def test_prometheus_reads_the_figures(api: Api) -> None:
    status, text = ask(api, "GET", "/metrics")
    assert status == 200
    assert text.splitlines()[:3] == [
        "# HELP statekit_engine_records_in_total Records that were taken from channels",
        "# TYPE statekit_engine_records_in_total counter",
        'statekit_engine_records_in_total{job="j",stage="count",task="count-0"} 7',
    ]
    families = {one.name: one for one in text_string_to_metric_families(text)}
    assert families["statekit_engine_checkpoints"].samples[0].value == 3
    assert families["statekit_engine_workers"].samples[0].labels == {"job": "j", "stage": "count"}


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/scale", 400, "stage is missing"),
        ("/scale?stage=count&workers=", 400, "no number"),
        ("/scale?stage=count&workers=-1", 400, "no number"),
        ("/scale?stage=count&workers=1&workers=2", 400, "each once at most"),
        ("/scale?stage=count&worker=1", 400, "'worker'"),
        ("/scale?stage=x&workers=1", 400, "no stage 'x'"),
        ("/scale?stage=count&step=x", 400, "step='x' is no number"),
        ("/scale?stage=count&gap=x", 400, "no number of seconds"),
        ("/drain", 400, "worker is missing"),
        ("/drain?worker=a&stage=b", 400, "'stage'"),
        ("/move?stage=count&key-groups=1", 400, "to is missing"),
        ("/move?stage=count&to=a&key-groups=1-x", 400, "names no key-groups"),
        ("/move?stage=count&to=a&key-groups=9-1", 400, "there is no key-group in"),
        ("/abort-rescale?number=-1", 400, "no number"),
        ("/other", 404, "/scale, /drain, /move, /abort-rescale"),
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
    for method, path in (
        ("POST", "/scale?stage=count&workers=4"),
        ("GET", "/rescales"),
        ("GET", "/metrics"),
    ):
        assert ask(api, method, path, **headers)[0] == status
    assert job.asked == []


def test_a_page_of_the_job_itself_may_ask(api: Api) -> None:
    assert ask(api, "GET", "/rescales", Origin=f"http://localhost:{api.port}")[0] == 200


def test_a_port_in_use_is_a_clear_error(api: Api, job: Job) -> None:
    with pytest.raises(EngineError, match=f"cannot listen at port {api.port}: .*in use"):
        Api(job, api.port)  # type: ignore[arg-type]
