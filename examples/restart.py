"""Restart: a counter that is killed again and again, and counts every event once.

A child process reads a log of events from an offset, counts them, and takes a checkpoint every
now and then with the offset as metadata. The parent kills it with SIGKILL at random moments and
starts it again, until the log is done. State and offset are in one checkpoint, so what is replayed
after a restart is exactly what the state does not have yet. collections.Counter says whether that
is right.

    python examples/restart.py
"""

import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import statekit as sk

SEED = 11
EVENTS = 200_000
BATCH = 500
CHECKPOINT_EVERY = 10  # batches
KILLS = 6


def events() -> list[str]:
    """The log: it can be read again from any offset, as Kafka's can."""
    rng = random.Random(SEED)
    return [f"user-{rng.randrange(5000)}" for _ in range(EVENTS)]


def work(place: Path) -> None:
    """The child: goes on from the newest checkpoint."""
    try:
        newest = sk.checkpoints(place)[-1]
        kv, offset = sk.restore(place), newest.metadata["offset"]
    except IndexError:
        kv, offset = sk.open("memory:"), 0
    counts = kv.value("counts", int, default=0)
    log = events()
    job = None
    while offset < len(log):
        counts.add_many(log[offset : offset + BATCH])
        offset += BATCH
        if offset % (CHECKPOINT_EVERY * BATCH) == 0:
            if job is not None:
                job.wait()
            job = kv.checkpoint_async(place, metadata={"offset": offset})
        print(offset, flush=True)
    if job is not None:
        job.wait()
    kv.checkpoint(place, metadata={"offset": offset})
    kv.close()


def run_until_killed(place: Path, batches: int | None) -> bool:
    """Runs the child and kills it after `batches` batches. True if it got to the end."""
    command = [sys.executable, __file__, str(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for done, _ in enumerate(child.stdout, 1):
            if done == batches:
                child.kill()
    return child.returncode == 0


def main() -> None:
    rng = random.Random(SEED)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "counter"
        for _ in range(KILLS):
            run_until_killed(place, rng.randrange(1, EVENTS // BATCH // 4))
        survived = sk.checkpoints(place)
        print(f"killed {KILLS} times; {len(survived)} checkpoints were completed")
        if not run_until_killed(place, None):
            raise SystemExit("the last run failed")
        with sk.restore(place) as kv:
            counted = dict(kv.value("counts", int).items())
        offset = sk.checkpoints(place)[-1].metadata["offset"]
    expected = Counter(events())
    print(f"{sum(counted.values()):,} events counted, {offset:,} read, {EVENTS:,} in the log")
    wrong = sum(counted.get(user) != count for user, count in expected.items())
    print(f"{len(expected):,} counts compared with collections.Counter: {wrong} differ")
    if wrong or sum(counted.values()) != EVENTS:
        raise SystemExit("the state is wrong")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        work(Path(sys.argv[1]))
    else:
        main()
