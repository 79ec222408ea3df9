"""Splitting: whose key-groups are, and how they change providers within a process.

No entry is touched: a leaf is moved from store to store, with what is known of its leases. Between
two homes rows are copied (Residence.give). Both happen in a thread that no signal reaches, so that
Ctrl-C cannot leave a key-group with two providers or with none.
"""

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from statekit.assignment import (
    KeyGroups,
    common,
    group_ranges,
    leaf_ranges,
    show_groups,
    subtract,
)
from statekit.errors import (
    ArgumentError,
    HomeError,
    KeyTypeError,
    NotOwnedError,
    OccupiedError,
    SchemaError,
    shorten,
)
from statekit.homes.record import HomeRecord, HomeShare
from statekit.keys import KeyType, encode_key, key_codec, leaf_of_encoded
from statekit.live.checkpointer import Checkpointer
from statekit.migration.api import PeerApi
from statekit.native import Store
from statekit.native.columns import route
from statekit.provider.declare import Declaring
from statekit.residence.residence import Residence
from statekit.schema import StateSchema
from statekit.uninterrupted import uninterrupted

if TYPE_CHECKING:
    from statekit.provider.provider import KVProvider

_log = logging.getLogger("statekit")

MEMORY_DEFAULT = 256 << 20  # of a provider whose home is not memory

_list = list  # the class has a method of that name


class Family:
    """The providers of one process that were split from each other: who owns which key-group."""

    def __init__(self) -> None:
        self.owners: dict[int, Any] = {}  # providers, by key-group

    def members(self) -> "set[KVProvider]":
        return set(self.owners.values())


class Splitting(Declaring, PeerApi):
    """See KVProvider."""

    _family: Family
    _home: HomeShare
    _mine: tuple[range, ...]
    _has_position: bool
    _checkpointer: Checkpointer

    @property
    @abstractmethod
    def schemas(self) -> Mapping[str, StateSchema]: ...

    @abstractmethod
    def _record_overwritten(self, part: tuple[range, ...]) -> None: ...

    @abstractmethod
    def _new(self, residence: Residence, record: HomeRecord) -> "KVProvider":
        """A provider of the same home and family that owns nothing."""

    @property
    def key_groups(self) -> tuple[range, ...]:
        """The key-groups that this provider owns, as ascending ranges."""
        return self._mine

    @property
    def key_group_count(self) -> int:
        """How many key-groups there are in all."""
        return self._residence.store.key_groups

    @property
    def subgroups(self) -> int:
        """Sub-groups in each key-group."""
        return self._residence.store.subgroups

    def key_group_of(self, key: Any) -> int:
        """The key-group of a key, whoever owns it."""
        codec = key_codec(_key_type_of(key))
        store = self._residence.store
        data = encode_key(codec.text, key)
        return leaf_of_encoded(codec, data, store.leaves) // store.subgroups

    def key_groups_of(self, keys: Any, *, key: KeyType = str) -> memoryview:
        """The key-group of each key of a column (as batches take them), as unsigned ints.

        For engines that route whole micro-batches; numpy.asarray() of it costs no copy.
        """
        # Both are prefixes of the hash: a key-group is a leaf of a store without sub-groups.
        return route(keys, key_codec(key), self.key_group_count)

    def owner_of(self, key: Any) -> "KVProvider | None":
        """The provider that has a key: this one, or one it was split from or into, or None.

        >>> import statekit as sk
        >>> kv = sk.open("memory:")
        >>> left, right = kv.split([range(0, 64), range(64, 128)])
        >>> kv.owner_of("alice") is left, left.key_group_of("alice")
        (True, 15)
        """
        owner: KVProvider | None = self._family.owners.get(self.key_group_of(key))
        return owner

    def _gave(self, part: tuple[range, ...]) -> None:
        self._mine = subtract(self._mine, part)
        for group in (group for r in part for group in r):
            if self._family.owners.get(group) is self:
                del self._family.owners[group]

    def _take_over(self, part: tuple[range, ...]) -> None:
        self._mine = group_ranges((*self._mine, *part))
        self._checkpointer.came(leaf_ranges(part, self.subgroups))
        for group in (group for r in part for group in r):
            self._family.owners[group] = self

    def split(self, ranges: Iterable[KeyGroups]) -> "_list[KVProvider]":
        """Hands key-groups over to new providers, one for each range, by moving their leaves.

        What is in no range stays here. The new providers have the same states and the same home;
        memory is shared out by the number of key-groups.
        """
        self._check_open()
        total = self.key_group_count
        if isinstance(ranges, range | str | bytes) or not isinstance(ranges, Iterable):
            raise ArgumentError(
                f"{shorten(ranges)} is no list of key-groups for new providers. Pass one range for "
                f"each: [range(0, {total // 2}), range({total // 2}, {total})], or what "
                f"statekit.assign({total}, 2) gives."
            )
        parts = [group_ranges(part, total) for part in ranges]
        group_ranges([group for part in parts for group in part])  # each group once
        for part in parts:
            if missing := subtract(part, self._mine):
                raise NotOwnedError(
                    f"key-groups {show_groups(missing)} are not this provider's, which has "
                    f"{show_groups(self._mine)}. Split what it has."
                )
        if self._peer is not None:
            self._peer.finish_coming([group for part in parts for group in part])
        return uninterrupted(lambda _: self._split(parts), self._unsplit)

    def _split(self, parts: "_list[tuple[range, ...]]") -> "_list[KVProvider]":
        made: _list[KVProvider] = []
        with self._lock:
            try:
                for part in parts:
                    made.append(self._split_off(part))
            except BaseException:
                self._unsplit(made)
                raise
        return made

    def _unsplit(self, made: "_list[KVProvider]") -> None:
        for provider in made:
            self._merge(provider)
            provider._let_go()

    def _split_off(self, part: tuple[range, ...]) -> "KVProvider":
        own = self._residence
        groups = sum(map(len, self._mine)) or 1
        share = None
        if own.budget is not None:
            share = own.budget * sum(map(len, part)) // groups
        if self._peer is not None:
            self._peer.check_free(part)
        other = self._sibling(share)
        try:
            own.move_leaves(other._residence, leaf_ranges(part, self.subgroups))
        except BaseException:
            other._let_go()
            raise
        if other._residence.loading is not None:
            other._residence.resume_loading()
        self._gave(part)
        other._take_over(part)
        self._hand_on(other, part)
        if own.budget is not None and share is not None:
            own.set_budget(own.budget - share)
        return other

    def _sibling(self, budget: int | None) -> "KVProvider":
        """A provider with the same states and home that owns nothing yet."""
        store = Store(self.key_group_count, self.subgroups)
        store.mark(0, store.leaves, "away")
        own = self._residence
        residence = Residence(store, own.ledger, budget)
        residence.whole_budget = own.whole_budget
        if own.loading is not None:
            residence.share_source(own)
        ours = self._recorded
        record = HomeRecord(ours.key_groups, ours.subgroups, [*ours.schemas])
        other = self._new(residence, record)
        other._has_position = self._has_position
        event_time = self._residence.store.time("event")
        if event_time is not None:
            store.set_time("event", event_time)
        try:
            for declaration in self._declared.values():
                other._attach_state(declaration)
        except BaseException:
            other._let_go()
            raise
        return other

    def merge(self, other: "KVProvider") -> None:
        """Takes over all key-groups of another provider, which is left with none.

        It stays open (close it if it is of no more use): it may be given key-groups again.
        Refused, with nothing changed, if both have a key-group or their states do not agree.
        """
        self._check_open()
        if not isinstance(other, Splitting):
            raise ArgumentError(
                f"{shorten(other)} is no provider. Pass what split() or open() gave."
            )
        other._check_open()
        self._check_mergeable(other)
        if other._peer is not None:
            other._peer.finish_coming(other._mine)
        uninterrupted(lambda _: self._merge(other))

    def _merge(self, other: "KVProvider") -> None:
        first, second = sorted((self, other), key=id)
        with first._lock, second._lock:
            part = other._mine
            if other._peer is not None:
                other._peer.check_free(part)
            is_moved = self._residence.ledger is other._residence.ledger
            if not is_moved:
                self._check_vacant(part)
            for name, declaration in other._declared.items():
                if name not in self._declared:
                    self._attach_state(declaration)
            for schema in other._recorded.schemas:
                self._register(schema)
                if not is_moved:
                    other._native_state(schema)  # also those that are stored and not declared
            here, there = self._residence.budget, other._residence.budget
            if here is not None:
                # Their memory comes with them; a provider that had given all away and takes from
                # one without a limit needs some again.
                self._residence.set_budget(here + (there or 0) or MEMORY_DEFAULT)
            leaves = leaf_ranges(part, self.subgroups)
            self._residence.let_in(leaves)
            if not is_moved:
                self._record_overwritten(part)
            leases = other._leases_of(part)
            is_told = not is_moved and None not in (self._residence.home, other._residence.home)
            try:
                # From one home to another: at no instant would both be opened with them.
                other._residence.give(
                    self._residence,
                    leaves,
                    (lambda: other._record_given(part, leases)) if is_told else lambda: None,
                )
            except BaseException:
                if here is not None:
                    self._residence.set_budget(here)
                if is_told:
                    other._note(lambda: other._record_taken(part, leases))
                raise
            if not is_moved:
                self._note(lambda: self._record_taken(part, leases))
            other._gave(part)
            self._take_over(part)
            other._hand_on(self, part)
            if other._residence.forget_given() and is_told:
                other._note(lambda: other._record_taken(part, leases))  # as empty as a new home
            gone_from = other._residence.ledger
            if not is_moved and gone_from is not None and gone_from.has_sources:
                # All of it has moved in there, and gone: its sources have nothing to add.
                other._note(lambda: other._record(lambda record: record.end_sources(part)))
            if there is not None:
                other._residence.set_budget(0)

    def _check_vacant(self, part: tuple[range, ...]) -> None:
        """OccupiedError if the home has rows of key-groups that come, and never gave them away."""
        home, ledger = self._residence.home, self._residence.ledger
        if home is None or ledger is None or ledger.is_bare:
            return
        record = HomeRecord.read(home, self.url)
        if record.sources:  # since this provider was opened, perhaps
            ledger.has_sources = True
        here = ledger.moved_in() if record.arriving else set()
        torn = [
            range(group, group + 1)
            for part in record.arriving
            for group in part
            if not here.issuperset(range(group * self.subgroups, (group + 1) * self.subgroups))
        ]
        rest = subtract(part, (*record.given, *torn))  # of which nobody expects to find all
        coming = common(rest, record.filling)
        group = coming[0].start if coming else ledger.first_held(rest)
        if group is not None:
            raise OccupiedError(
                f"{self.url!r} has entries of key-group {group}, with which it was not opened: "
                "they would be overwritten. Nothing was taken over. Open the home with that "
                "key-group (owned=), or use another home."
            )

    def _note(self, record: Callable[[], None]) -> None:
        """Changes the home's record. If that fails, the next flush() tries it again, or fails."""
        try:
            record()
        except HomeError as error:
            _log.warning("the home does not say yet what is its own: %s", error)

    def _check_mergeable(self, other: "KVProvider") -> None:
        if other is self:
            raise ArgumentError("a provider cannot be merged with itself. Pass another one.")
        is_shared = self._residence.ledger is other._residence.ledger
        if self._recorded.id and self._recorded.id == other._recorded.id and not is_shared:
            raise ArgumentError(
                f"both providers have the home {self.url!r} open, each by itself: it would be "
                "given its own rows, and delete them. Close one, and open its key-groups with "
                "owned= where they are to be; providers that split() makes share their home."
            )
        here = (self.key_group_count, self.subgroups)
        there = (other.key_group_count, other.subgroups)
        if here != there:
            raise ArgumentError(
                f"a provider of {there[0]} key-groups x {there[1]} sub-groups cannot be merged "
                f"into one of {here[0]} x {here[1]}. Open both with the same numbers."
            )
        common = subtract(self._mine, subtract(self._mine, other._mine))
        if common:
            raise OccupiedError(
                f"both providers have key-groups {show_groups(common)}. "
                "Merge providers that own different ones."
            )
        self._see_siblings()
        other._see_siblings()
        mine = self.schemas
        for name, schema in other.schemas.items():
            if name in mine and mine[name] != schema:
                raise SchemaError(
                    f"state {name!r} is {mine[name]} here and {schema} there. "
                    "Nothing was merged; declare it alike on both sides."
                )
        for name, declared in self._declared.items():
            theirs = other._declared.get(name)
            if theirs is not None and theirs.ttl != declared.ttl:
                raise SchemaError(
                    f"state {name!r} has ttl {declared.ttl} here and {theirs.ttl} there. "
                    "Nothing was merged; declare it alike on both sides."
                )


def _key_type_of(key: Any) -> str:
    """The key type that a key has by itself."""
    letters = {str: "s", bytes: "b", int: "i"}
    parts = key if isinstance(key, tuple) else (key,)
    text = "".join(letters.get(type(part), "?") for part in parts)
    if "?" in text or not text:
        raise KeyTypeError(
            f"the key {shorten(key)} is of type {type(key).__name__}, which no key has. "
            "Use str, bytes, int, or a tuple of these."
        )
    return f"({text})" if isinstance(key, tuple) else text
