"""Parts of many tasks, of which some are killed, beside a collector: published once, and exact.

`python tests/faults/parts_race.py --runs 100 --keys 1000000` is the same at its full size.
"""

import random
from pathlib import Path

from parts_race import KILLED, Race
from workloads import NIGHTLY

RUNS, KEYS = (100, 1_000_000) if NIGHTLY else (2, 4_000)


def test_many_tasks_publish_exact_checkpoints_beside_a_collector(tmp_path: Path) -> None:
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    race = Race(tmp_path / "place", KEYS, seed)
    try:
        for _ in range(RUNS):
            race.run()
        assert race.kills == RUNS * KILLED
        race.finish()
    finally:
        race.kill()
