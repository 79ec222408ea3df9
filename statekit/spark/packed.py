"""All states of one key as one binary value, for a state store that is not ours.

    value    = [1, schemas, rows, wake]        MessagePack
    schemas  = the MessagePack of [[name, form, key, type, clock], ...], as bytes
    rows     a row for each of these states, as homes keep it (homes/rows.py), with its stamp if it
             has a time to live; nil where the key has no entry
    wake     when the store was asked to wake the key, in ms; nil if it was not

The schemas are the same for all keys of an op, so a store that compresses has them once a block.
They are there so that a value is read by what it is, and not by what the program expects: what a
checkpoint refuses (checkpoint/reader.py) is refused here, with the same message.

A value is unpacked into a provider that has this one key, worked on as everywhere else, and packed
again. So lists, maps, timers and TTL are what they are in any provider.
"""

from typing import Any

import msgspec

from statekit.errors import StatefulOpError, StateKitError, shorten
from statekit.homes.rows import block_rows
from statekit.native.block import Block
from statekit.native.ttl import as_ttl
from statekit.provider.open import open as open_provider
from statekit.residence.assemble import install_rows
from statekit.schema import StateSchema, check_evolution
from statekit.spark.cursor import State, Timers, declare

FORMAT = 1

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class Scratch:
    """A provider for the states of one key at a time."""

    def __init__(self, states: dict[str, State | Timers], key_type: str) -> None:
        self.kv = open_provider("memory:", key_groups=1, subgroups=1)
        declare(self.kv, states, key_type)
        self._store = self.kv._residence.store
        self._raw = {raw.name: raw for raw in self._store.states()}
        self._codec = next(iter(self._raw.values())).codec if self._raw else None
        self._timers = [name for name, spec in states.items() if isinstance(spec, Timers)]
        self._lives = {
            name: life
            for name, spec in states.items()
            if isinstance(spec, State) and (life := as_ttl(spec.ttl)) is not None
        }
        schemas = self.kv.schemas
        self._names = list(states)
        listed = [[*schemas[name]] for name in self._names]
        self._schemas = _encode(listed)
        self._known: dict[bytes, list[str | None]] = {self._schemas: [*self._names]}

    def load(self, key: Any, value: bytes | None) -> int | None:
        """Puts the states of a key in. Returns when the store was asked to wake it."""
        if value is None:
            return None
        try:
            version, schemas, rows, wake = _decode(value)
            if version != FORMAT:
                raise ValueError(f"it is of version {version}")
            names = self._known.get(schemas) or self._learn(schemas)
            known = [(self._raw[name], row) for name, row in zip(names, rows, strict=True)
                     if name is not None and row is not None]  # fmt: skip
        except StateKitError:  # it is read, and does not fit
            raise
        except (msgspec.DecodeError, ValueError, TypeError) as error:
            raise StatefulOpError(
                f"the stored value of key {shorten(key)} is none that this statekit has written "
                f"({error}). Was the query's checkpoint made by another program, or by a later "
                "version of statekit?"
            ) from None
        if known:
            assert self._codec is not None
            encoded = self._codec.encode(key)
            numbered = [(at, encoded, row) for at, (_, row) in enumerate(known)]
            self._store.mark(0, 1, "absent")  # a whole leaf knows that it has no such entry
            try:
                install_rows([raw for raw, _ in known], numbered)
            finally:
                self._store.mark(0, 1, "whole")
        return wake  # type: ignore[no-any-return]

    def _learn(self, schemas: bytes) -> list[str | None]:
        """The states that a value written by another version of the program has."""
        found: list[str | None] = []
        asked = self.kv.schemas
        for fields in _decode(schemas):
            stored = StateSchema(*fields)
            if stored.name in self._raw:
                check_evolution(stored, asked[stored.name])
                found.append(stored.name)
            else:
                found.append(None)  # the program has it no more
        self._known[schemas] = found
        return found

    def pack(self, wake: int | None) -> bytes | None:
        """The states as one value; None if nothing is left."""
        rows: dict[str, bytes | None] = {}
        for block in Block.each(self._store.encode_leaf(0)):
            (rows[block.name],) = block_rows(block) or [None]
        if not rows:
            return None
        return _encode([FORMAT, self._schemas, [rows.get(name) for name in self._names], wake])

    def next_due(self, key: Any) -> int | None:
        """When the key's first timer is due."""
        dues = [dues[0] for name in self._timers if (dues := self.kv[name][key])]
        return min(dues) if dues else None

    def expires(self, clock: str) -> int | None:
        """When the last entry expires; None if there is none, or one that does not by this clock.

        Only in the clock's own time: the event time or the system's.
        """
        last: int | None = None
        for block in Block.each(self._store.encode_leaf(0)):
            life = self._lives.get(block.name)
            if life is None or life.time != clock or block.stamps is None:
                return None
            (stamp,) = block.stamps.tolist()
            last = max(last or 0, stamp + life.after_ms)
        return last

    def due(self, key: Any, watermark: int) -> list[tuple[int, str]]:
        """Takes out the timers that are due: when, and of which state."""
        taken = [
            (timer.due, name) for name in self._timers for timer in self.kv[name].pop_due(watermark)
        ]
        taken.sort()
        return taken

    def clear(self, key: Any) -> None:
        for name in self._names:
            self.kv[name].discard(key)
