"""What statekit is for, in a minute: a job is scaled while records flow, and a process is killed.

    python examples/demo.py [--quick] [--plot PATH]

Two workers count a stream of records that comes at a constant rate, whatever they do. They become
three, and two again: once in the usual way (stop at a checkpoint, start again from it), once with
state that moves while everybody goes on. Then a worker is killed with SIGKILL. Each time every
count of every key is compared with what it must be: 1, 2, 3, ... in the order of its records.
"""

import argparse
import os
import signal
import tempfile
from pathlib import Path
from time import monotonic_ns

import statekit as sk
from statekit.engine.experiment.figures import Figures
from statekit.engine.experiment.report import plot, table
from statekit.engine.experiment.run import Load, Plan
from statekit.engine.strategies import RESTART, How

FULL = Plan(
    parameters={"keys": 2_000_000, "rate": 10_000, "zipf": 0.8, "is_filled": True, "rows": 50},
    before_s=3.0,
    after_s=4.0,
)
QUICK = Plan(
    parameters={"keys": 10_000, "rate": 1_000, "zipf": 0.8, "is_filled": True, "rows": 20},
    before_s=1.0,
    after_s=1.0,
)


def say(text: str) -> None:
    print(f"  {text}", flush=True)


def scale_and_kill(plan: Plan, strategy: str, folder: Path, kills: bool) -> list[Figures]:
    """2 to 3 workers and back, under load; then a worker is killed, if it is to be."""
    killed = 0
    with Load(plan, folder) as load:
        say(f"counting at {load.work.rate:,.0f} records/s; state: {plan.parameters['keys']:,} keys")
        for workers in (3, 2):
            load.rescale(workers, How(strategy))
            done = load.job.rescales[-1]
            say(f"{done.before} -> {done.after} workers, {done.moved} key-groups moved")
            load.rest(plan.after_s)
        if kills:
            number = load.job.checkpoint()
            load.rest(plan.after_s / 2)
            killed = load.cut()
            victim = f"{load.work.stage}-0"
            os.kill(load.job.pids[victim], signal.SIGKILL)
            say(f"checkpoint {number}; kill -9 of {victim} ...")
            load.job.checkpoint()  # waits until the job has recovered
            load.rest(plan.after_s)
        found = load.finish()
    if found[0].fault:
        raise SystemExit(f"The results are wrong. This must not be. {found[0].fault}")
    if kills:
        say(f"first result after the kill: {load.first_after(killed):.2f} s")
    say(f"{load.records:,} results checked: no counts differ")
    for one, way in zip(found, ("2 to 3", "3 to 2"), strict=True):
        one.strategy += f" {way}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes")
    default = Path(__file__).resolve().parent.parent / "build" / "demo.png"
    parser.add_argument("--plot", type=Path, default=default, help="where the plot goes")
    options = parser.parse_args()
    plan = QUICK if options.quick else FULL
    began = monotonic_ns()
    print(f"statekit {sk.__version__}: key-count on the demo engine", flush=True)
    found = []
    with tempfile.TemporaryDirectory(prefix="statekit-") as folder:
        for number, strategy in enumerate((RESTART, "seamless"), 1):
            print(f"\n{number}. {strategy}", flush=True)
            place = Path(folder, strategy)
            found += scale_and_kill(plan, strategy, place, kills=strategy == "seamless")
    print(f"\n{table(found)}\n")
    if plot("Key-count, scaled under load", found, options.plot):
        print(f"The plot is in {options.plot}")
    else:
        print("There is no plot: matplotlib is not installed.")
    print(f"All counts were right. {(monotonic_ns() - began) / 1e9:.0f} s in all.")


if __name__ == "__main__":
    main()
