"""Values of a batch: a sequence that decodes single values on demand, or converts all at once."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from statekit.codecs import Codec
from statekit.errors import package, shorten
from statekit.native.batch import Blobs, Numbers
from statekit.render.columns import value_array

if TYPE_CHECKING:
    import numpy
    import pyarrow

V = TypeVar("V")


class Values(Sequence[V], Generic[V]):
    """The values of get_many(), in the order of the keys. A missing one is the default, or None.

    >>> import statekit as sk
    >>> visits = sk.open("memory:").value("visits", int)
    >>> visits.put_many(["alice", "bob"], [3, 4])
    >>> found = visits.get_many(["bob", "carol"])
    >>> found.to_list(), found[0], found.found
    ([4, None], 4, b'\\x01\\x00')
    """

    __slots__ = ("_default", "found")

    def __init__(self, found: bytes, default: Callable[[], Any] | None) -> None:
        self.found = found  # one byte per key: 1 if there is a value
        self._default = default  # makes the value for a missing key, anew each time

    def _missing(self) -> Any:
        return None if self._default is None else self._default()

    def __len__(self) -> int:
        return len(self.found)

    @overload
    def __getitem__(self, at: int) -> V: ...
    @overload
    def __getitem__(self, at: slice) -> list[V]: ...
    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return self.to_list()[at]
        return self._value(at) if self.found[at] else self._missing()

    def __iter__(self) -> Iterator[V]:
        return iter(self.to_list())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Values | list):
            return self.to_list() == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = ", ".join(shorten(self[at]) for at in range(min(len(self), 10)))
        return f"<Values [{shown}{', ...' if len(self) > 10 else ''}], {len(self)} in all>"

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (self.to_list(),)  # copied or pickled, it becomes a list

    @abstractmethod
    def _value(self, at: int) -> Any:
        """The value of a key that has one."""

    @abstractmethod
    def to_list(self) -> list[V]:
        """The values as a list."""

    @abstractmethod
    def to_arrow(self, *, text: Collection[str] = ()) -> "pyarrow.Array":
        """An Arrow array; null where there is neither a value nor a default.

        text: types that are to be text, as in the to_arrow() of a state.
        """

    def to_numpy(self) -> "numpy.ndarray[Any, Any]":
        """A NumPy array, of objects unless the values are numbers."""
        package("numpy", "to_numpy()")
        import numpy

        found = numpy.empty(len(self), dtype=object)
        for at, value in enumerate(self):
            found[at] = value
        return found


class NumberValues(Values[V]):
    """Numbers, kept in one array."""

    __slots__ = ("_numbers",)

    def __init__(self, parts: Sequence[Numbers], default: Any) -> None:
        super().__init__(b"".join(part.found for part in parts), default)
        self._numbers: memoryview[Any] = parts[0].values
        if len(parts) > 1:
            joined = b"".join(part.values for part in parts)
            self._numbers = memoryview(joined).cast("B").cast(parts[0].values.format)  # type: ignore[call-overload]

    def _value(self, at: int) -> Any:
        return self._numbers[at]

    def to_list(self) -> list[V]:
        if 0 not in self.found:
            numbers: list[V] = self._numbers.tolist()  # type: ignore[assignment]
            return numbers
        default = self._missing()
        return [
            value if there else default
            for value, there in zip(self._numbers, self.found, strict=True)
        ]

    def to_numpy(self) -> "numpy.ndarray[Any, Any]":
        """A NumPy array of int64 or float64. A missing value without default is 0 or NaN."""
        package("numpy", "to_numpy()")
        import numpy

        numbers = numpy.frombuffer(self._numbers, self._numbers.format)
        if 0 not in self.found:
            return numbers
        default = self._missing()
        if default is None:
            default = 0 if self._numbers.format == "q" else float("nan")
        there = numpy.frombuffer(self.found, bool)
        return numpy.where(there, numbers, numpy.array(default, numbers.dtype))

    def to_arrow(self, *, text: Collection[str] = ()) -> "pyarrow.Array":
        package("numpy", "to_arrow()")
        package("pyarrow", "to_arrow()")
        import numpy
        import pyarrow

        if 0 not in self.found or self._missing() is not None:
            return pyarrow.array(self.to_numpy())
        missing = ~numpy.frombuffer(self.found, bool)
        return pyarrow.array(numpy.frombuffer(self._numbers, self._numbers.format), mask=missing)


class EncodedValues(Values[V]):
    """Values of any type, kept encoded, one after the other."""

    __slots__ = ("_codec", "_decode", "_parts", "_starts")

    def __init__(
        self,
        parts: Sequence[Blobs],
        codec: Codec,
        decode: Callable[[Any], Any],
        default: Callable[[], Any] | None,
    ) -> None:
        super().__init__(b"".join(part.found for part in parts), default)
        self._parts = parts
        self._codec = codec
        self._decode = decode  # the state's function, which explains a value that it cannot read
        self._starts = [0]
        for part in parts:
            self._starts.append(self._starts[-1] + len(part.found))

    def _value(self, at: int) -> Any:
        if at < 0:
            at += len(self)
        for part, start in zip(self._parts, self._starts, strict=False):
            if at < start + len(part.found):
                r = at - start
                return self._decode(part.data[part.offsets[r] : part.offsets[r + 1]])
        raise IndexError(at)

    def to_list(self) -> list[V]:
        decode, missing = self._decode, self._missing
        found: list[V] = []
        for part in self._parts:
            data, ends = part.data, part.offsets.tolist()
            found += [
                decode(data[ends[r] : ends[r + 1]]) if there else missing()
                for r, there in enumerate(part.found)
            ]
        return found

    def to_arrow(self, *, text: Collection[str] = ()) -> "pyarrow.Array":
        missing = None if self._default is None else self._codec.encode(self._default())
        stored = (data for part in self._parts for data in part.to_list())
        items = [missing if data is None else data for data in stored]
        return value_array(self._codec.type, items, text)

    def encoded(self) -> list[bytes | None]:
        """The values as they are stored; None for a missing one."""
        return [data for part in self._parts for data in part.to_list()]
