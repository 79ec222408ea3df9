"""python -m tests.lives: random lives of providers, compared with a plain model.

Every life comes from one seed; --lives 1 plays the one of --seed again.
"""

import argparse
import os
import random
import sys

from .known import KNOWN
from .run import FAILURES_MAX, Limits, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lives", description=__doc__)
    parser.add_argument("--seed", type=int, help="of the first life; a random one unless given")
    parser.add_argument("--steps", type=int, help="about so many in all")
    parser.add_argument("--seconds", type=float, help="no new life after so long")
    parser.add_argument("--lives", type=int, help="so many lives")
    parser.add_argument("--jobs", type=int, default=1, help="processes that play lives")
    parser.add_argument("--keep-going", action="store_true", help="after a failure, too")
    parser.add_argument("--trace", action="store_true", help="say every step")
    parser.add_argument("--fixed", default="", help=f"of these, separated by commas: {[*KNOWN]}")
    given = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets must follow from the seed
        arguments = [sys.executable, "-m", "tests.lives", *sys.argv[1:]]
        os.execve(sys.executable, arguments, {**os.environ, "PYTHONHASHSEED": "0"})
    seed = random.randrange(10**9) if given.seed is None else given.seed
    fixed = [*KNOWN] if given.fixed == "all" else given.fixed.split(",")
    limits = Limits(
        given.lives,
        given.steps,
        given.seconds,
        FAILURES_MAX if given.keep_going else 1,
    )
    if limits[:3] == (None, None, None):
        limits = limits._replace(steps=10_000)
    print(f"from seed {seed} on", flush=True)
    known = [name for name in KNOWN if name not in fixed]
    result = run(seed, given.jobs, limits, known, given.trace)
    return 1 if result.failed else 0


if __name__ == "__main__":
    sys.exit(main())
