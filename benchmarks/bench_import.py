"""What `import statekit` costs, and the first state after it, now and at an earlier commit.

    python benchmarks/bench_import.py [BEFORE]

Writes results/import.json. CPU of whole processes, less that of an interpreter that does nothing;
all take turns. BEFORE is taken out and compiled in a temporary directory, as before_after.py does.
"""

import os
import statistics
import sys
import tempfile
from pathlib import Path

from before_after import take_out
from compare import Report, Row

BEFORE = "cd61fe3"
ROUNDS = 15
PROGRAMS = {
    "nothing": "pass",
    "import statekit": "import statekit",
    "import, open, first int": "import statekit as sk; sk.open('memory:').value('n', int).add('a')",
}


def cpu_ms(program: str, side: Path) -> float:
    environment = os.environ | {"PYTHONPATH": str(side)}
    command = [sys.executable, "-P", "-c", program]  # -P: not the statekit of this directory
    process = os.spawnve(os.P_NOWAIT, sys.executable, command, environment)
    _, status, used = os.wait4(process, 0)
    if status != 0:
        raise RuntimeError(f"{program!r} failed with {side}")
    return 1000 * (used.ru_utime + used.ru_stime)


def main() -> None:
    before = sys.argv[1] if len(sys.argv) > 1 else BEFORE
    report = Report("import")
    found: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        sides = {"before": Path(folder) / "before", "now": Path(folder) / "now"}
        for name, commit in (("before", before), ("now", None)):
            sides[name].mkdir()
            take_out(commit, sides[name])
        for at in range(ROUNDS + 1):  # the first finds nothing in the caches of the system
            for side, place in sides.items():
                for name, program in PROGRAMS.items():
                    took = cpu_ms(program, place)
                    if at > 0:
                        found.setdefault((side, name), []).append(took)
    for name, bound in (("import statekit", 0.5), ("import, open, first int", None)):
        net = {
            side: [a - b for a, b in zip(found[side, name], found[side, "nothing"], strict=True)]
            for side in sides
        }
        report.add(
            Row(
                f"{name}: CPU vs commit {before}",
                statistics.median(a / b for a, b in zip(net["now"], net["before"], strict=True)),
                "x the time",
                bound,
                at_most=True,
                figures={f"{side} ms": statistics.median(net[side]) for side in sides},
            )
        )
    report.write()


if __name__ == "__main__":
    main()
