"""Two commits are compared by rules checked by hand here; no row of the docs is left out."""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from before_after import interval, judge  # noqa: E402
from before_after_workloads import (  # noqa: E402
    CHECKPOINTS,
    FIGURES,
    MEASURED,
    MIGRATION,
    NOT_MEASURED,
    STORE,
    WORKLOADS,
)

sys.path.remove(str(ROOT / "benchmarks"))

ONES = [1.0] * 9


def test_of_nine_rounds_the_second_and_the_eighth_bound_the_median() -> None:
    assert interval([9.0, 1.0, 8.0, 2.0, 7.0, 3.0, 6.0, 4.0, 5.0]) == (2.0, 8.0)


# The ranks that tables of the sign test give for 95 %.
@pytest.mark.parametrize(
    ("rounds", "rank"), [(6, 1), (8, 1), (9, 2), (11, 2), (12, 3), (15, 4), (20, 6), (25, 8)]
)
def test_rank_of_the_bounds_is_that_of_the_sign_test(rounds: int, rank: int) -> None:
    low, high = interval([float(at) for at in range(1, rounds + 1)])
    assert (low, high) == (rank, rounds + 1 - rank)


@pytest.mark.parametrize(
    ("after", "time", "rate"),
    [
        (ONES, "same", "same"),
        ([1.06] * 9, "worse", "better"),
        ([0.94] * 9, "better", "worse"),
        ([1.05] * 9, "same", "same"),  # 5 % is not beyond 5 %
        ([1.0, 1.06, *[1.2] * 7], "worse", "better"),  # one round of nine does not count
        ([1.0, 1.0, *[1.2] * 7], "same", "same"),  # two do
        ([*[0.8] * 7, 0.94, 1.3], "better", "worse"),
        ([*[0.8] * 7, 0.96, 1.3], "same", "same"),
        ([0.5, 0.6, 0.7, 0.8, 1.2, 1.3, 1.4, 1.5, 1.6], "same", "same"),  # too noisy to tell
    ],
)
def test_worse_is_an_interval_that_lies_beyond_the_margin(
    after: list[float], time: str, rate: str
) -> None:
    assert judge(ONES, after, more_is_better=False).verdict == time
    assert judge(ONES, after, more_is_better=True).verdict == rate


def test_ratios_are_of_the_sides_of_one_round() -> None:
    slow_spells = [1.0, 2.0, 1.0, 4.0, 1.0, 2.0, 8.0, 1.0, 1.0]
    judged = judge(slow_spells, [2 * one for one in slow_spells], more_is_better=False)
    assert (judged.ratio, judged.low, judged.high, judged.verdict) == (2.0, 2.0, 2.0, "worse")
    assert (judged.before, judged.after, judged.rounds) == (1.0, 2.0, 9)


def test_too_few_rounds_say_nothing() -> None:
    assert judge([1.0] * 5, [2.0] * 5, more_is_better=False).verdict == "unsure"
    assert judge([1.0] * 6, [2.0] * 6, more_is_better=False).verdict == "worse"


def measured_rows(page: str) -> list[str]:
    """The first cells of the tables that have a column `measured`."""
    tables = re.findall(r"(?:^\|.*\n)+", (ROOT / page).read_text(), re.MULTILINE)
    rows = []
    for head, _, *lines in (table.splitlines() for table in tables):
        if "measured" in [cell.strip() for cell in head.split("|")]:
            rows += [line.split("|")[1].strip() for line in lines]
    return rows


def rows_of(page: str) -> list[str]:
    if page != STORE:
        return measured_rows(page)
    results = ROOT / "benchmarks" / "results" / "store.json"
    if not results.exists():
        pytest.skip("results are not part of an sdist")
    return measured_rows(page) + [row["what"] for row in json.loads(results.read_text())["rows"]]


@pytest.mark.parametrize("page", [MEASURED, STORE, CHECKPOINTS, MIGRATION])
def test_every_row_of_a_page_has_a_figure_or_a_reason_why_not(page: str) -> None:
    rows = rows_of(page)
    assert len(rows) >= 8
    figures = [figure for figure in FIGURES if figure.page == page]
    left_out = [re.escape(what) for of, what in NOT_MEASURED if of == page]
    known = [figure.rows for figure in figures] + left_out
    forgotten = [row for row in rows if not any(re.match(one, row) for one in known)]
    assert not forgotten, "declare a figure in benchmarks/before_after_workloads.py"
    stale = [one.name for one in figures if not any(re.match(one.rows, row) for row in rows)]
    assert not stale, "no row begins so any more"


def test_figures_have_names_of_their_own_and_workloads_that_exist() -> None:
    assert len({figure.name for figure in FIGURES}) == len(FIGURES)
    assert {figure.workload for figure in FIGURES} == set(WORKLOADS)
