"""The data source as PySpark 4 wants it; source.py has what it does. Imported only with PySpark.

Spark makes a StateSource in a process of its own, asks it for the schema and pickles it. Another
process plans the query: it makes the reader, hands it the filters and asks for the partitions. Each
task unpickles the reader and reads its partition. So the checkpoint that was opened first travels
along, and all tasks read the same one.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.errors import PySparkException
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import StructField, StructType

from statekit.errors import ArgumentError, SchemaError
from statekit.keys import KEY_FAULTS, key_codec, leaf_of_encoded
from statekit.render.columns import key_names
from statekit.spark.output import arrow_schema
from statekit.spark.source import NAME, Reading

if TYPE_CHECKING:
    import pyarrow

_LATER = {"time64": "time"}  # Arrow types that older versions of Spark lack, and their names here
_KEYS_MAX = 10_000  # looking for more keys than that is not worth it


class StateSource(DataSource):  # type: ignore[misc]
    """A state of a checkpoint."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self.options = options
        self._reading: Reading | None = None

    @classmethod
    def name(cls) -> str:
        return NAME

    @property
    def reading(self) -> Reading:
        """The checkpoint is looked for once: whoever uses this source reads the same one."""
        if self._reading is None:
            self._reading = Reading.of(self.options)
        return self._reading

    def schema(self) -> Any:
        return spark_schema(self.reading.columns)

    def reader(self, schema: Any) -> "StateReader":
        return StateReader(self.reading, self._checked(schema))

    def _checked(self, schema: Any) -> Any:
        own = self.schema()
        if schema.simpleString() != own.simpleString():
            raise SchemaError(
                f"state {self.reading.state!r} has the columns {own.simpleString()}, and not "
                f"{schema.simpleString()}. Leave .schema(...) out: it follows from the state."
            )
        return schema


class FilteringSource(StateSource):
    """The same where Spark hands filters to the reader."""

    def reader(self, schema: Any) -> "StateReader":
        return FilteringReader(self.reading, self._checked(schema))


class StatePartition(InputPartition):  # type: ignore[misc]
    """The key-groups of a task."""

    def __init__(self, groups: tuple[range, ...]) -> None:
        self.groups = groups

    def __repr__(self) -> str:
        return f"StatePartition({self.groups})"


class StateReader(DataSourceReader):  # type: ignore[misc]
    """Reads a state by ranges of key-groups."""

    def __init__(self, reading: Reading, schema: Any) -> None:
        self.reading = reading
        self.schema = schema
        self.wanted: tuple[range, ...] | None = None  # key-groups; None: all

    def partitions(self) -> list[Any]:
        return [StatePartition(groups) for groups in self.reading.shares(self.wanted)]

    def read(self, partition: Any) -> "Iterator[pyarrow.RecordBatch]":
        if not isinstance(partition, StatePartition):
            return  # Spark makes one of its own if there is none
        wanted = arrow_schema(self.schema)
        with self.reading.held():
            for batch in self.reading.of_groups(partition.groups):
                yield batch if batch.schema.equals(wanted) else batch.cast(wanted)


class FilteringReader(StateReader):
    """Looks at filters on the key. Spark evaluates them again: they only choose key-groups."""

    def pushFilters(self, filters: list[Any]) -> Iterable[Any]:  # noqa: N802
        checkpoint = self.reading.checkpoint
        codec = key_codec(checkpoint.states[self.reading.state].key)
        keys: list[list[Any]] = [[]]  # all combinations of the values that the parts may have
        for name in key_names(codec):
            values = _values(filters, name)
            if values is None or len(keys) * len(values) > _KEYS_MAX:
                return filters
            keys = [[*key, value] for key in keys for value in values]
        groups = set()
        for parts in keys:
            key = tuple(parts) if codec.is_tuple else parts[0]
            try:
                encoded = codec.encode(key)
            except KEY_FAULTS:
                return filters  # of another type than the key: Spark knows what that means
            leaf = leaf_of_encoded(codec, encoded, checkpoint.leaf_count)
            groups.add(leaf // checkpoint.subgroups)
        self.wanted = tuple(range(group, group + 1) for group in sorted(groups))
        return filters


def _values(filters: list[Any], name: str) -> list[Any] | None:
    """The values that a column may have by its filters; None: any."""
    from pyspark.sql.datasource import EqualNullSafe, EqualTo, In

    found: list[Any] | None = None
    for one in filters:
        if getattr(one, "attribute", None) != (name,):
            continue
        if isinstance(one, EqualTo | EqualNullSafe):
            values = [one.value]
        elif isinstance(one, In):
            values = list(one.value)
        else:
            continue
        values = [bytes(value) if isinstance(value, bytearray) else value for value in values]
        values = [value for value in values if value is not None]  # no key is null
        found = values if found is None else [value for value in found if value in values]
    return found


# ---- Schemas


def spark_schema(columns: "pyarrow.Schema") -> Any:
    """The columns as Spark has them."""
    return StructType([StructField(one.name, _spark_type(one.type), True) for one in columns])


def _spark_type(kind: Any) -> Any:
    try:
        return from_arrow_type(kind)
    except PySparkException as error:
        needed = next((text for name, text in _LATER.items() if name in str(kind)), None)
        if needed is None:
            raise
        raise ArgumentError(
            f"this version of Spark has no type for {kind} ({error}). "
            f'Have these values as text: .option("text", "{needed}").'
        ) from None
