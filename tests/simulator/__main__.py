"""python -m tests.simulator SEED, or --seeds A:B: replays a run, or searches for some that fail."""

import argparse
import sys
import time

from . import explain, run_of

FAILURES_MAX = 20


def search(first: int, stop: int) -> int:
    """How many fail; each is printed."""
    started = time.process_time()
    failed = runs = 0
    for seed in range(first, stop):
        runs += 1
        try:
            run_of(seed).play()
        except Exception as error:
            print(f"seed {seed}: {type(error).__name__}: {error}")
            failed += 1
            if failed == FAILURES_MAX:
                break
    seconds = time.process_time() - started
    print(f"{runs} runs, {failed} failed, {runs / seconds:.0f} runs per second of processor time")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("seed", nargs="?", type=int, help="replay this one, and say what happens")
    which.add_argument("--seeds", help="A:B, the first one and the one after the last")
    arguments = parser.parse_args()
    if arguments.seeds is not None:
        first, stop = map(int, arguments.seeds.split(":"))
        return 1 if search(first, stop) else 0
    if wrong := explain(arguments.seed):
        print(wrong)
        return 1
    trace: list[str] = []
    run_of(arguments.seed, trace=trace).play()
    print(*trace, f"seed {arguments.seed}: nothing is wrong", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
