"""Many tasks write parts of checkpoints; some are killed; a collector runs. Nothing may be wrong.

    python tests/faults/parts_race.py --runs 100 --keys 1000000

Each run is one checkpoint: TASKS tasks in WORKERS processes restore their key-groups from the last
checkpoint, count some keys up, and write their part. Three of them get SIGKILL at a random place,
and are tried again elsewhere; so is the publisher, in every third run. A collector removes all that
it may, all the time. Then the checkpoint must have exactly what the model has, and after a last
collection the place must have no file that the checkpoint does not need.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import IO, Any

import numpy as np

import statekit as sk

TASKS, WORKERS, KILLED = 64, 8, 3
GROUPS, SUBGROUPS = 128, 2
POINTS = (
    "storage.pack.open", "storage.pack.write", "storage.pack.fsync", "storage.pack.rename",
    "attempt.begin", "attempt.fill", "attempt.pack", "attempt.part", "storage.dirsync",
)  # fmt: skip
PUBLISHING = ("parts.publish", "storage.manifest.write", "storage.manifest.link", "parts.published")


def changed(keys: Any, number: int) -> Any:
    """The keys that checkpoint `number` counts up."""
    return keys if number == 1 else keys[keys % 7 == number % 7]


# ---- In processes of their own


def work(place: str, key_count: int) -> None:
    """Does tasks from standard input, one per line: number, which task, and where to die."""
    keys = np.arange(key_count, dtype=np.int64)
    with sk.open("memory:", key_groups=GROUPS, subgroups=SUBGROUPS) as kv:
        groups = np.asarray(kv.key_groups_of(keys, key=int))
    for line in sys.stdin:
        number, task, point = json.loads(line)
        sk_failpoints(point)
        mine = sk.assign(GROUPS, TASKS)[task]
        own = keys[(groups >= mine.start) & (groups < mine.stop)]
        part = _task(place, number, mine, own)
        print(part.to_json(), flush=True)


def _task(place: str, number: int, mine: range, own: Any) -> sk.Part:
    if number == 1:
        kv = sk.open("memory:", key_groups=GROUPS, subgroups=SUBGROUPS, owned=mine)
    else:
        kv = sk.restore(place, key_groups=mine, at=number - 1)
    with kv:
        kv.value("count", int, key=int, default=0).add_many(changed(own, number))
        return kv.write_part(place, number=number)


def sk_failpoints(point: str | None) -> None:
    from statekit import failpoints

    failpoints.configure(point)


def publish(place: str, number: int) -> None:
    parts = [line for line in sys.stdin.read().splitlines() if line]
    note = sk.write_attachment(place, "note", b"%d" % number, number=number)
    sk.publish(place, parts, number=number, metadata={"number": number}, attachments=[note])


def collect(place: str) -> None:
    """Collects garbage until standard input is closed."""
    os.set_blocking(0, False)
    rounds = 0
    while sys.stdin.buffer.read(1) is None:
        sk.collect(place, keep=1)
        rounds += 1
        time.sleep(0.01)  # the others want the lock, too
    print(rounds)


# ---- The scheduler


def start(place: Path, *what: object, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, "--role", *map(str, what), "--place", str(place)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )


def pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


class Race:
    """A place, its workers and its model."""

    def __init__(self, place: Path, key_count: int, seed: int) -> None:
        self.place = place
        self.key_count = key_count
        self.rng = random.Random(seed)
        self.number = 0
        self.kills = 0
        self.model = np.zeros(key_count, dtype=np.int64)
        self.workers = [self._worker() for _ in range(WORKERS)]
        self.collector = start(place, "collect")

    def _worker(self) -> subprocess.Popen[str]:
        return start(self.place, "work", "--keys", self.key_count)

    def run(self) -> None:
        """One checkpoint."""
        self.number += 1
        parts = self._tasks()
        self._publish(parts)
        keys = np.arange(self.key_count, dtype=np.int64)
        self.model[changed(keys, self.number)] += 1
        self.check()

    def _tasks(self) -> list[str]:
        doomed = {*self.rng.sample(range(TASKS), KILLED)}
        waiting = deque(self.rng.sample(range(TASKS), TASKS))
        parts: dict[int, str] = {}
        while waiting:
            # One task for each worker, then the answers of all: so the tasks run side by side.
            given: list[tuple[int, int]] = []
            for at in range(min(WORKERS, len(waiting))):
                task, point = waiting.popleft(), None
                if task in doomed:
                    doomed.discard(task)
                    point = f"{self.rng.choice(POINTS)}=kill"
                pipe(self.workers[at].stdin).write(json.dumps([self.number, task, point]) + "\n")
                pipe(self.workers[at].stdin).flush()
                given.append((at, task))
            for at, task in given:
                line = pipe(self.workers[at].stdout).readline()
                if line:
                    parts[task] = line.strip()
                else:  # it was killed: another process gets the task
                    assert self.workers[at].wait() == -9, "a task failed by itself"
                    close(self.workers[at])
                    self.workers[at] = self._worker()
                    waiting.append(task)
                    self.kills += 1
        return [*parts.values()]

    def _publish(self, parts: list[str]) -> None:
        if self.number % 3 == 0:
            point = f"{self.rng.choice(PUBLISHING)}=kill"
            self._run_publisher(parts, {"STATEKIT_FAILPOINTS": point})
        assert self._run_publisher(parts) == 0
        assert self._run_publisher(parts) == 0  # publishing once more works

    def _run_publisher(self, parts: list[str], env: dict[str, str] | None = None) -> int:
        process = start(self.place, "publish", "--number", self.number, env=env)
        process.communicate("\n".join(parts))
        assert process.returncode in (0, -9)
        return process.returncode

    def check(self) -> None:
        newest = sk.checkpoints(self.place)[-1]
        assert newest.number == self.number
        assert newest.read_attachment("note") == b"%d" % self.number
        with sk.restore(newest, lazy=False) as kv:
            state = kv.value("count", int, key=int, default=0)
            assert len(state) == self.key_count
            found = np.asarray(state.get_many(np.arange(self.key_count, dtype=np.int64)))
        wrong = np.flatnonzero(found != self.model)
        assert not len(wrong), f"{len(wrong)} counts of checkpoint {self.number} are wrong"

    def finish(self) -> int:
        """Checks that no needless file is left. Returns how often the collector ran."""
        rounds = int(self.collector.communicate()[0])
        for worker in self.workers:
            worker.communicate()
            assert worker.returncode == 0
        sk.collect(self.place, keep=1)
        (last,) = sk.checkpoints(self.place)
        assert not [*last.verify()]
        needed = {last.manifest.name, *last.manifest.files, ".lock"}
        assert {*os.listdir(self.place)} == needed, "files are left over"
        return rounds

    def kill(self) -> None:
        for process in (*self.workers, self.collector):
            process.kill()
            process.wait()
            close(process)


def close(process: subprocess.Popen[str]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            try:
                stream.close()
            except BrokenPipeError:
                continue  # what it was not told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=random.randrange(10**9))
    parser.add_argument("--role", choices=["work", "publish", "collect"])
    parser.add_argument("--place")
    parser.add_argument("--number", type=int)
    given = parser.parse_args()
    if given.role == "work":
        work(given.place, given.keys)
    elif given.role == "publish":
        publish(given.place, given.number)
    elif given.role == "collect":
        collect(given.place)
    else:
        race_for(given.runs, given.keys, given.seed)


def race_for(runs: int, key_count: int, seed: int) -> None:
    print(f"seed {seed}")
    with tempfile.TemporaryDirectory() as place:
        race = Race(Path(place), key_count, seed)
        try:
            for run in range(runs):
                race.run()
                print(f"run {run + 1} of {runs}: exact; {race.kills} killed so far", flush=True)
            print(f"nothing is left over; the collector ran {race.finish()} times")
        finally:
            race.kill()


if __name__ == "__main__":
    main()
