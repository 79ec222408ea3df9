"""Kafka: totals per key that are exact, though workers are killed again and again.

A worker reads some partitions of a topic. Each partition has a provider of its own, which keeps the
totals of its keys and, in every commit, the offset of the next record. A restart goes on from that
offset, so a record counts once, whatever happens. Kafka need not know how far a worker has come.

    python examples/kafka_counts.py --brokers kafka:9092 --topic clicks --state /var/lib/clicks
    python examples/kafka_counts.py --demo                  on a mock of Kafka, state in RocksDB
    python examples/kafka_counts.py --demo --checkpoints    state in memory, with checkpoints

The demo (kafka_demo.py) kills workers at random and compares the totals with a Counter.
Needs: pip install confluent-kafka 'statekit[rocksdb]'
"""

import argparse
import random
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import Any

import confluent_kafka as kafka

import statekit as sk

BATCH = 500  # records
COMMIT_RECORDS, COMMIT_SECONDS = 2000, 1.0  # whichever comes first
GROUPS = 4  # key-groups of each provider. Few: a partition is never split between workers
MEMORY = "16MiB"  # of each provider; a worker has a provider for each of its partitions


class Partition:
    """The totals of a partition in a RocksDB home, and the offset that they belong to."""

    def __init__(self, folder: Path, number: int) -> None:
        self.place = folder / f"partition-{number}"
        self.open()

    def open(self) -> None:
        self.kv = sk.open(f"rocksdb:{self.place}?memory={MEMORY}", key_groups=GROUPS)
        self.start(self.kv.committed)

    def start(self, position: dict[str, Any] | None) -> None:
        """Goes on from the last commit."""
        self.totals = self.kv.value("totals", int, default=0)
        self.offset = position["offset"] if position else kafka.OFFSET_BEGINNING
        self.uncommitted, self.committed_at = 0, monotonic()

    def add(self, records: list[Any]) -> None:
        for record in records:
            self.totals.add(record.key().decode(), amount_of(record))
            self.offset = record.offset() + 1
            self.uncommitted += 1

    def commit_if_due(self) -> None:
        """Between two batches, so that no record is cut in two."""
        seconds = monotonic() - self.committed_at
        if self.uncommitted >= COMMIT_RECORDS or (self.uncommitted and seconds >= COMMIT_SECONDS):
            self.commit()
            self.uncommitted, self.committed_at = 0, monotonic()

    def commit(self) -> None:
        self.kv.commit({"offset": self.offset})  # state and offset, or neither

    def rollback(self) -> None:
        self.kv.rollback()
        self.start(self.kv.committed)

    def __enter__(self) -> "Partition":
        return self

    def __exit__(self, *failure: Any) -> None:
        if self.uncommitted and not any(failure):
            self.commit()
        self.kv.__exit__(*failure)  # after a failure the home stays at its last commit


class CheckpointedPartition(Partition):
    """The same in memory: only the newest checkpoint survives."""

    def open(self) -> None:
        newest = sk.checkpoints(self.place)[-1:]
        self.kv = sk.restore(self.place) if newest else sk.open("memory:", key_groups=GROUPS)
        self.start(newest[0].metadata if newest else None)

    def commit(self) -> None:
        self.kv.checkpoint(self.place, metadata={"offset": self.offset})
        sk.collect(self.place, keep=2)

    def rollback(self) -> None:
        self.kv.close()
        self.open()


def amount_of(record: Any) -> int:
    """What a record adds. This stands for asking a service that fails now and then."""
    if random.random() < 1 / 5000:
        raise ConnectionError("the service is away")
    return int(record.value())


def work(
    brokers: str,
    topic: str,
    mine: Iterable[int] | None,
    kind: type[Partition],
    folder: Path,
    to_end: bool,
) -> None:
    """Reads these partitions, or all, each from the offset that its state has."""
    settings = {
        "bootstrap.servers": brokers,
        "group.id": "kafka-counts",  # must be given, but is not used
        "enable.auto.commit": False,
        "auto.offset.reset": "error",  # if records are gone, say so
        "enable.partition.eof": True,
    }
    with ExitStack() as stack:
        consumer = kafka.Consumer(settings)
        stack.callback(consumer.close)
        mine = mine or consumer.list_topics(topic, 60).topics[topic].partitions
        parts = {number: stack.enter_context(kind(folder, number)) for number in mine}

        def position(number: int) -> kafka.TopicPartition:
            return kafka.TopicPartition(topic, number, parts[number].offset)

        consumer.assign([position(number) for number in parts])
        ended: set[int] = set()
        while not to_end or ended != parts.keys():
            batches = defaultdict(list)
            for record in consumer.consume(BATCH, timeout=0.2):
                if record.error() is None:
                    batches[record.partition()].append(record)
                elif record.error().code() == kafka.KafkaError._PARTITION_EOF:
                    ended.add(record.partition())
                else:
                    raise kafka.KafkaException(record.error())
            for number, records in batches.items():
                try:
                    parts[number].add(records)
                except ConnectionError as error:  # half of the batch is in the state
                    parts[number].rollback()
                    consumer.seek(position(number))
                    ended.discard(number)
                    print(f"partition {number} was rolled back: {error}", flush=True)
            for part in parts.values():
                part.commit_if_due()
            print(f"{sum(map(len, batches.values()))} records", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="totals per key of a Kafka topic")
    parser.add_argument("--brokers", help="where Kafka is, such as kafka:9092")
    parser.add_argument("--topic", default="clicks")
    parser.add_argument("--partitions", nargs="*", type=int, help="all unless given")
    parser.add_argument("--state", type=Path, default="state", help="a folder")
    parser.add_argument("--checkpoints", action="store_true", help="instead of RocksDB homes")
    parser.add_argument("--to-end", action="store_true", help="stop when all records are read")
    parser.add_argument("--demo", type=int, nargs="?", const=7, metavar="SEED", help="try it out")
    options = parser.parse_args()
    if options.demo is not None:
        import kafka_demo

        kafka_demo.run(options.demo, options.checkpoints)
        return
    if not options.brokers:
        parser.error("say where Kafka is (--brokers), or --demo")
    kind = CheckpointedPartition if options.checkpoints else Partition
    work(options.brokers, options.topic, options.partitions, kind, options.state, options.to_end)


if __name__ == "__main__":
    main()
