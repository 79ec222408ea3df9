"""The demo of kafka_counts.py: workers on a mock of Kafka are killed, and must still be right.

The mock is the one that comes with confluent-kafka, in a process of its own. In each round the four
partitions are dealt out anew to one or two workers, and all of these are killed with SIGKILL at a
random moment. The last round runs to its end. Then collections.Counter says what the totals must
be.
"""

import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import confluent_kafka as kafka
from kafka_counts import CheckpointedPartition, Partition

TOPIC, PARTITIONS = "clicks", 4  # as many as a topic of the mock has
RECORDS, KEYS = 30_000, 5_000
KILLS, LINES_MAX = 4, 20  # rounds; workers are killed after this many lines of output at most
PYTHON = [sys.executable, *(f"-W{option}" for option in sys.warnoptions)]


def serve_mock() -> None:
    """A mock of a Kafka cluster, until standard input ends."""
    settings = {"bootstrap.servers": "mock", "test.mock.num.brokers": 1, "log_level": 3}
    owner = kafka.Producer(settings)
    (broker,) = owner.list_topics(timeout=60).brokers.values()
    print(f"{broker.host}:{broker.port}", flush=True)
    sys.stdin.read()


def produce(brokers: str, rng: random.Random) -> Counter[str]:
    """Fills the topic. Returns what the totals must be in the end."""
    producer = kafka.Producer({"bootstrap.servers": brokers})
    expected: Counter[str] = Counter()
    for _ in range(RECORDS):
        key, amount = f"user-{rng.randrange(KEYS)}", rng.randrange(1, 10)
        producer.produce(TOPIC, key=key, value=str(amount))
        expected[key] += amount
    if producer.flush(60):
        raise SystemExit("the mock did not take all records")
    return expected


def run_workers(
    command: list[str], shares: list[list[int]], lines_max: int | None
) -> tuple[int, list[str]]:
    """Runs a worker for each share of the partitions.

    Returns how many were killed, and what all of them printed.
    """
    end, start = os.pipe()
    workers = []
    for share in shares:
        partitions = ["--partitions", *map(str, share)]
        workers.append(subprocess.Popen([*command, *partitions], stdout=start))
    os.close(start)
    lines = []
    with open(end) as said:
        for line in said:
            lines.append(line)
            if len(lines) == lines_max:
                for worker in workers:
                    worker.kill()
    codes = [worker.wait() for worker in workers]
    if set(codes) - {0, -9}:
        raise SystemExit("a worker failed")
    return codes.count(-9), lines


def run(seed: int, with_checkpoints: bool) -> None:
    rng = random.Random(seed)
    kind = CheckpointedPartition if with_checkpoints else Partition
    worker = [*PYTHON, str(Path(__file__).with_name("kafka_counts.py")), "--to-end"]
    worker += ["--checkpoints"] * with_checkpoints
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen([*PYTHON, __file__], stdin=pipe, stdout=pipe, text=True) as mock,
    ):
        assert mock.stdout is not None
        brokers = mock.stdout.readline().strip()
        expected = produce(brokers, rng)
        worker += ["--brokers", brokers, "--topic", TOPIC, "--state", folder]
        killed, lines = 0, []
        for lines_max in [*(rng.randrange(LINES_MAX) + 1 for _ in range(KILLS)), None]:
            numbers = rng.sample(range(PARTITIONS), PARTITIONS)
            count = rng.randrange(1, 3)
            shares = [numbers[at::count] for at in range(count)]
            done, said = run_workers(worker, shares, lines_max)
            killed += done
            lines += said
        totals: dict[str, int] = {}
        for number in range(PARTITIONS):
            with kind(Path(folder), number) as part:
                totals.update(part.totals.items())
    read = sum(int(line.split()[0]) for line in lines if line[0].isdigit())
    rolled = sum("rolled back" in line for line in lines)
    print(f"seed {seed}: {killed} workers were killed, {rolled} failed batches were rolled back")
    print(f"{RECORDS:,} records in the topic, {read:,} were read")
    wrong = sum(totals.get(key) != total for key, total in expected.items())
    print(f"{len(expected):,} totals compared with collections.Counter: {wrong} differ")
    if totals != expected:
        raise SystemExit("the totals are wrong")


if __name__ == "__main__":
    serve_mock()
