"""Two commits side by side: is any figure of the docs worse than it was?

    python benchmarks/before_after.py [BEFORE [AFTER]] [--rounds N] [--only REGEX] [--quick]
        BEFORE: a commit. AFTER: a commit; the working tree unless given. Both are taken out and
        compiled in a temporary directory. Prints each figure when its rounds are over, and writes
        results/before_after.json. The exit status is 1 if a figure is worse or failed.
        --only: figures whose page, workload or name matches; others stay in the JSON as they were,
        each with the later of the two commits that it was measured at.
        --quick: small sizes, into before_after_quick.json. --dir: for scratch files (a real disk).
    python benchmarks/before_after.py --list
        which figure stands for which rows of which page, and what is not measured.

The figures and what measures them are in before_after_workloads.py. A workload runs in a fresh
process for each side and round: before, after; after, before; and so on. Its code is that of the
tree that this file is in, for both sides: only the statekit that it imports differs.

A figure is statekit's own: a time, a rate or a size, never a ratio to another contender. Each round
gives one ratio, after / before. Their median is reported with an interval of at least 95 % for it,
which rests on their order alone: from the 2nd to the 8th of 9 (96.1 %). A figure is "worse" or
"better" if all of that interval lies beyond 5 % to that side, and else the "same". Fewer than six
rounds are too few for such an interval: "unsure".
"""

import argparse
import io
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from before_after_workloads import FIGURES, NOT_MEASURED, Figure

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
BEFORE = "c800357"
SOURCES = ("csrc", "statekit", "setup.py", "pyproject.toml", "README.md", "LICENSE")
MARGIN = 0.05  # smaller differences do not count
CONFIDENCE = 0.95
ROUNDS_MIN = 6  # with fewer, even from the least to the greatest ratio is no 95 % interval
SECONDS_MAX = 900  # of one workload on one side

Row = dict[str, Any]


# ---- Statistics


@dataclass(frozen=True)
class Judged:
    before: float  # the medians of both sides
    after: float
    ratio: float  # the median of the rounds' after / before
    low: float
    high: float
    rounds: int
    verdict: str


def interval(ratios: list[float]) -> tuple[float, float]:
    """A confidence interval of the median: the k-th smallest ratio and the k-th largest.

    The median lies below the k-th smallest if fewer than k of n samples fall below the median,
    each with a chance of one half. k is the largest for which that, on either side, happens in
    1 - CONFIDENCE of all cases at most.
    """
    n, k = len(ratios), 1
    while 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n <= 1 - CONFIDENCE:
        k += 1
    ordered = sorted(ratios)
    return ordered[k - 1], ordered[-k]


def judge(before: list[float], after: list[float], more_is_better: bool) -> Judged:
    ratios = [b / a for a, b in zip(before, after, strict=True)]
    low, high = interval(ratios)
    verdict = "same"
    if len(ratios) < ROUNDS_MIN:
        verdict = "unsure"
    elif low > 1 + MARGIN:
        verdict = "better" if more_is_better else "worse"
    elif high < 1 - MARGIN:
        verdict = "worse" if more_is_better else "better"
    median = statistics.median
    return Judged(median(before), median(after), median(ratios), low, high, len(ratios), verdict)


# ---- Two commits


def git(*arguments: str) -> bytes:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout


def name_of(commit: str | None) -> str:
    """The commit's hash; of the working tree, that of HEAD, with a + if something has changed."""
    found = git("rev-parse", "--verify", f"{commit or 'HEAD'}^{{commit}}").decode().strip()
    has_changed = commit is None and git("status", "--porcelain", "--", *SOURCES)
    return f"{found}+" if has_changed else found


def take_out(commit: str | None, target: Path) -> None:
    """The sources of a commit, or of the working tree, compiled."""
    if commit is not None:
        with tarfile.open(fileobj=io.BytesIO(git("archive", commit, *SOURCES))) as archive:
            archive.extractall(target, filter="data")
    else:
        listed = git("ls-files", "-z", "-co", "--exclude-standard", "--", *SOURCES).decode()
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).exists():  # else it was deleted, but the deletion is not committed yet
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, target / name)
    for command in (["setup.py", "-q", "build_ext", "--inplace"], ["-m", "compileall", "-q", "."]):
        subprocess.run([sys.executable, *command], cwd=target, check=True)


# ---- Taking turns


class Comparison:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        # Names of one length: the size of the environment moves the stack, which changes some
        # figures.
        self.sides = (folder / "side-0", folder / "side-1")
        self.names = (name_of(options.before), name_of(options.after))
        for commit, name, side in zip(
            (options.before, options.after), self.names, self.sides, strict=True
        ):
            print(f"     compiling {name} ...", flush=True)
            side.mkdir()
            take_out(commit, side)
        # A copy: an edit in the next hour must not change what is measured.
        self.benchmarks = folder / "benchmarks"
        shutil.copytree(HERE, self.benchmarks, ignore=shutil.ignore_patterns("__pycache__"))

    def run(self, figures: list[Figure]) -> list[Row]:
        rows: list[Row] = []
        for workload in dict.fromkeys(figure.workload for figure in figures):
            of_it = [figure for figure in figures if figure.workload == workload]
            rows += self._judge(workload, of_it)
            self._write(rows)  # at once, so that a run that is ended early keeps its figures
        return rows

    def _judge(self, workload: str, figures: list[Figure]) -> list[Row]:
        try:
            before, after = self._take_turns(workload)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"failed {workload}: {error}", flush=True)
            return [asdict(figure) | {"verdict": "failed"} for figure in figures]
        rows = []
        for figure in figures:
            old, new = ([found[figure.name] for found in side] for side in (before, after))
            rows.append(asdict(figure) | asdict(judge(old, new, figure.more_is_better)))
            print(line_of(rows[-1]), flush=True)
        return rows

    def _take_turns(self, workload: str) -> tuple[list[dict[str, float]], ...]:
        """What each side gave, round by round."""
        found: tuple[list[dict[str, float]], ...] = ([], [])
        for at in range(self.options.rounds):
            began = time.monotonic()
            for which in (0, 1) if at % 2 == 0 else (1, 0):
                found[which].append(self._measure(workload, self.sides[which], at))
            took = time.monotonic() - began
            print(f"     {workload} {at + 1}/{self.options.rounds}: {took:.0f} s", flush=True)
        return found

    def _measure(self, workload: str, side: Path, at: int) -> dict[str, float]:
        """One workload on one side, in a process of its own."""
        script = self.benchmarks / "before_after_workloads.py"
        quick = ["--quick"] if self.options.quick else []
        environment = {
            "PYTHONPATH": str(side),
            "PYTHONHASHSEED": str(at),  # both sides of a round hash strings alike
            "TMPDIR": str(self.options.dir.resolve()),
        }
        done = subprocess.run(
            [sys.executable, str(script), workload, *quick],
            cwd=side.parent,  # no statekit lies there that could be imported by accident
            env=os.environ | environment,
            timeout=SECONDS_MAX,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise RuntimeError(f"exit {done.returncode} at {side.name}\n{done.stderr}")
        found = json.loads(done.stdout.splitlines()[-1])
        if not Path(found["statekit"]).is_relative_to(side):
            raise RuntimeError(f"{found['statekit']} was imported, not that of {side}")
        figures: dict[str, float] = found["figures"]
        return figures

    def _write(self, rows: list[Row]) -> None:
        name = "before_after_quick.json" if self.options.quick else "before_after.json"
        path = HERE / "results" / name
        document: dict[str, Any] = {
            "before": self.names[0],
            "rule": f"{CONFIDENCE:.0%} interval of the median ratio, all beyond {MARGIN:.0%}",
            "machine": {
                "python": platform.python_version(),
                "platform": platform.platform(),
                "cores": os.cpu_count(),
            },
        }
        rows = [{**row, "commit": self.names[1]} for row in rows]
        if self.options.only and path.exists():
            earlier = json.loads(path.read_text())
            if earlier["before"] == self.names[0]:
                fresh = {row["name"] for row in rows}
                rows = [row for row in earlier["rows"] if row["name"] not in fresh] + rows
        path.write_text(json.dumps(document | {"rows": rows}, indent=2) + "\n")


def line_of(row: Row) -> str:
    medians = " ".join(f"{short(row[side]):>12}" for side in ("before", "after"))
    ratio = f"{row['ratio']:.3f}x [{row['low']:.3f}, {row['high']:.3f}]"
    return f"{row['verdict']:<6} {row['name']:<34} {medians} {row['unit']:<4} {ratio}"


def short(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("before", nargs="?", default=BEFORE)
    parser.add_argument("after", nargs="?")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", metavar="REGEX")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    figures = [
        one for one in FIGURES if re.search(options.only, f"{one.page} {one.workload} {one.name}")
    ]
    if not figures:
        parser.error(f"--only {options.only!r} names no figure. --list shows them all.")
    for commit in filter(None, (options.before, options.after)):
        try:
            name_of(commit)
        except subprocess.CalledProcessError:
            parser.error(f"{commit!r} is no commit of {ROOT}. git log shows them.")
    if options.list:
        for one in figures:
            print(f"{one.workload:<16} {one.name:<34} {one.unit:<4} {one.page}: {one.rows}")
        for (page, what), why in NOT_MEASURED.items():
            print(f"not measured     {page}: {what} ({why})")
        return 0
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=options.dir.resolve()) as folder:
        rows = Comparison(options, Path(folder)).run(figures)
    counts = Counter(row["verdict"] for row in rows)
    told = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    print(f"{told}; {(time.monotonic() - began) / 60:.0f} min")
    return 1 if counts["worse"] or counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
