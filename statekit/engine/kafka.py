"""Kafka: a topic as the source of a job. Needs confluent-kafka.

    job.source(topic("kafka:9092", "clicks"), parallelism=2)

Each task reads some of the partitions. Its position is the offset of each of them, which is part of
the job's checkpoint: a record counts once, whatever fails. Kafka need not know how far a job is.
"""

from collections.abc import Iterator
from time import monotonic
from typing import Any

import pyarrow as pa

from statekit.engine.job import Placed, Read, Until
from statekit.errors import EngineError

_WAIT_S = 0.02  # for records, before the coordinator is listened to again
_LOOK_S = 60.0  # for the cluster to say which partitions there are

SCHEMA = pa.schema(
    {
        "key": pa.binary(), "value": pa.binary(), "partition": pa.int32(), "offset": pa.int64(),
        "at": pa.int64(),
    }
)  # fmt: skip


def topic(brokers: str, name: str, *, rows: int = 1000, to_end: bool = False) -> Read:
    """Batches of SCHEMA; `at` is the time of a record in milliseconds, as Kafka has it.

    to_end: the source ends where the topic ended when it was read to there.
    """

    def read(task: int, tasks: int, start: Any) -> Iterator[Placed | Until]:
        import confluent_kafka as kafka

        consumer = kafka.Consumer(
            {
                "bootstrap.servers": brokers,
                "group.id": "statekit",  # must be given, but is not used
                "enable.auto.commit": False,
                "auto.offset.reset": "error",  # if records are gone, say so
                "enable.partition.eof": True,
            }
        )
        try:
            known = consumer.list_topics(name, _LOOK_S).topics[name]
            if known.error is not None:
                raise EngineError(f"topic {name!r} of {brokers!r}: {known.error}")
            mine = sorted(known.partitions)[task::tasks]
            offsets = {str(part): kafka.OFFSET_BEGINNING for part in mine} | dict(start or {})
            consumer.assign([kafka.TopicPartition(name, int(p), at) for p, at in offsets.items()])
            ended: set[int] = set()
            while not to_end or ended != {*mine}:
                found = []
                came: list[Any] = consumer.consume(rows, timeout=_WAIT_S)
                for record in came:
                    if record.error() is None:
                        found.append(record)
                        ended.discard(record.partition())
                    elif record.error().code() == kafka.KafkaError._PARTITION_EOF:
                        ended.add(record.partition())
                    else:
                        raise EngineError(f"topic {name!r} of {brokers!r}: {record.error()}")
                for record in found:
                    offsets[str(record.partition())] = record.offset() + 1
                if found:
                    yield Placed(_batch(found), dict(offsets))
                yield Until(monotonic())
        except kafka.KafkaException as error:
            raise EngineError(f"topic {name!r} of {brokers!r}: {error}") from None
        finally:
            consumer.close()

    return read


def _batch(records: list[Any]) -> pa.RecordBatch:
    columns = (
        [one.key() for one in records],
        [one.value() for one in records],
        [one.partition() for one in records],
        [one.offset() for one in records],
        [one.timestamp()[1] for one in records],
    )
    arrays = [pa.array(some, of) for some, of in zip(columns, SCHEMA.types, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)
