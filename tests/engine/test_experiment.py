"""The experiment: its figures against plain loops, and a whole run from the command line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from statekit.cli.app import app
from statekit.engine.experiment.figures import CALM_S, measure
from statekit.engine.experiment.report import middle, table
from statekit.engine.experiment.run import ALL, parse_strategies, parse_value, show
from statekit.engine.histogram import SUB, Histogram
from statekit.engine.strategies import RESTART, STRATEGIES, How
from statekit.errors import ArgumentError, EngineError


def call(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(one) for one in arguments])


def records(stall: tuple[float, float], strategy: str = "seamless") -> Any:
    """A record each millisecond from -5 to 5, each taking 10 ms; but for a stall of some keys."""
    due = np.arange(-5, 5, 0.001)
    moved = np.arange(len(due)) % 2 == 0
    held = moved & (due >= stall[0]) & (due < stall[1])
    arrived = np.where(held, stall[1], due) + 0.010
    return measure(How(strategy), strategy, due, arrived, moved, 1.5)


def test_a_stall_shows_in_the_keys_that_move_and_in_nothing_else() -> None:
    found = records((1.0, 2.0))
    assert found.peak_ms == pytest.approx(1010, abs=2)
    assert found.moved["during"].longest == pytest.approx(1010, abs=2)
    assert found.stayed["during"].longest == pytest.approx(10, abs=0.1)
    for phase in ("before", "after"):
        assert found.moved[phase].p99 == pytest.approx(10, abs=0.1)
    assert found.normal_after == pytest.approx(2.0, abs=0.1)
    # A triangle of a second and 1,000 ms, for every other record.
    assert found.excess_ms_s == pytest.approx(250, rel=0.02)
    assert found.worst_second == pytest.approx(0.5, abs=0.02)
    assert found.records_per_second == pytest.approx(1000, rel=0.01)


def test_without_a_stall_it_is_over_when_it_is_done() -> None:
    found = records((9.0, 9.0))
    assert found.normal_after == pytest.approx(1.5, abs=0.06)
    assert found.worst_second == pytest.approx(1.0, abs=0.02)
    assert found.excess_ms_s == pytest.approx(0, abs=0.1)
    assert CALM_S < 5


def test_the_middle_of_several_runs_is_shown() -> None:
    runs = [records((1.0, 1.0 + n / 10)) for n in (5, 1, 3)] + [records((1.0, 1.2), RESTART)]
    shown = middle(runs)
    assert [(one.strategy, round(one.peak_ms, -2)) for one in shown] == [
        ("seamless", 300), (RESTART, 200),
    ]  # fmt: skip
    lines = table(shown).splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("seamless")


@pytest.mark.parametrize("seed", range(10))
def test_a_histogram_knows_percentiles_to_a_few_percent(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = (10 ** rng.uniform(0, 12, 5000)).astype(np.int64)
    whole, parts = Histogram(), [Histogram(), Histogram()]
    whole.add(values)
    for part, some in zip(parts, (values[:2000], values[2000:]), strict=True):
        part.add(some)
    parts[0].merge(parts[1])
    assert (parts[0].counts == whole.counts).all()
    assert whole.records == len(values)
    for percent in (1, 50, 87.5, 99, 100):
        exact = np.percentile(values, percent, method="inverted_cdf")
        assert exact <= whole.percentile(percent) <= exact * (1 + 1 / SUB) + 1
    assert whole.percentile(100) == whole.longest == values.max()
    empty = Histogram()
    empty.add(np.array([]))
    assert empty.percentile(99) == 0.0
    empty.add(np.array([-5]))
    assert (empty.records, empty.percentile(50)) == (1, 0.0)


def test_strategies_are_written_with_their_parameters() -> None:
    assert [show(how) for how in parse_strategies("all")] == [*ALL]
    assert {*ALL} == {*STRATEGIES, RESTART}
    (one, two) = parse_strategies("batched:step=4:gap_s=0.5,seamless")
    assert (one, two) == (How("batched", step=4, gap_s=0.5), How("seamless"))
    assert show(one) == "batched:step=4:gap_s=0.5"
    assert parse_value("keys=1_000") == ("keys", 1000)
    assert parse_value("input=/data/x") == ("input", "/data/x")
    assert parse_value("is_filled=true") == ("is_filled", True)
    for wrong in ("magic", "batched:pepper=1", "batched:step"):
        with pytest.raises((ArgumentError, EngineError)):
            parse_strategies(wrong)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--strategies", "magic"), "There are seamless"),
        (("--workload", "none"), "There are key_count"),
        (("--set", "colour=1"), "unknown field `colour`"),
        (("--set", "keys"), "write NAME=VALUE"),
        (("--set", "rate=0"), "needs a load"),
        (("--before", "0"), "at least a second"),
        (("--rounds", "0"), "pass 1 or more"),
    ],
)
def test_an_experiment_that_cannot_be_is_one_message(
    arguments: tuple[str, ...], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = call("experiment", "rescale", *arguments)
    assert done.exit_code == 1, done.output
    assert text in done.output
    assert not [*tmp_path.iterdir()]


def test_an_experiment_runs_checks_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sets = [f"--set={one}" for one in ("rate=1000", "rows=20", "keys=2000", "sources=1")]
    done = call(
        "experiment", "rescale", "--strategies", "seamless", *sets, "--set=is_filled=true",
        "--before", 1, "--after", 1, "--out", tmp_path,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "All results of 1 runs are exact" in done.output
    (run,) = json.loads((tmp_path / "rescale.json").read_text())["runs"]
    assert run["strategy"] == "seamless"
    assert run["fault"] == ""
    phases = [run["all"][name]["records"] for name in ("before", "during", "after")]
    kinds = [run[kind][name]["records"] for kind in ("moved", "stayed") for name in run[kind]]
    assert sum(phases) == sum(kinds) > 1000
    assert run["rescale"]["moved"] > 0
    for name in ("rescale.png", "times.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
