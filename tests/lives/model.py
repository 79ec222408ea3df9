"""The model: what is true, in plain dicts.

A key-group has content, wherever it is: with a provider, at rest in a home that nobody has open,
or lost. Content is made of values that are never changed in place, so that a copy of it, as a
checkpoint or a commit has one, is a copy of dicts.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import statekit as sk

from .forms import FORMS, KEYS, MISSING, Spec, canon, random_key

Entry = tuple[Any, int | None]  # value, stamp


class Held:
    """The entries of one state in one key-group, as values of one version of its type."""

    __slots__ = ("entries", "version")

    def __init__(self, version: int, entries: dict[Any, Entry]) -> None:
        self.version = version
        self.entries = entries

    def upgraded(self, form: str, version: int) -> "Held":
        entries = self.entries
        for step in range(self.version, version):
            upgrade = FORMS[form].upgrade
            entries = {key: (upgrade(value, step), at) for key, (value, at) in entries.items()}
        return Held(max(version, self.version), entries)


Content = dict[str, Held]
Cut = dict[int, Content]  # key-group -> content, at one moment


def copied(content: Content) -> Content:
    return {name: Held(held.version, dict(held.entries)) for name, held in content.items()}


@dataclass(eq=False)
class HomeModel:
    """A home, with what is durable there."""

    name: str
    kind: str
    url: str  # without options
    base: Cut = field(default_factory=dict)  # as of the last commit
    positions: dict[int, Any] = field(default_factory=dict)  # what key-groups were committed with
    stored: dict[str, int] = field(default_factory=dict)  # versions of its states
    was_shared: bool = False  # several providers had it open, and some still have
    is_torn: bool = False  # a process was killed: what is there must be found out
    alternatives: list[Cut] = field(default_factory=list)  # one of these is there

    def settle(self, group: int, content: Content) -> None:
        """A key-group is durable as it is."""
        for cut in (self.base, *self.alternatives):  # its process was not killed, so it is in all
            cut[group] = copied(content)

    def forget(self, group: int) -> None:
        for cut in (self.base, *self.alternatives):
            cut.pop(group, None)
        self.positions.pop(group, None)


@dataclass(eq=False)
class Kv:
    """A provider."""

    pid: str
    host: int
    home: HomeModel | None
    owned: set[int]
    stored: dict[str, int]  # versions of all states that it knows; the home's if it has one
    declared: dict[str, int] = field(default_factory=dict)
    family: int = 0  # providers that were split from each other
    address: str = ""

    @property
    def is_sibling(self) -> bool:
        """Whether other providers have, or had, its home open with it."""
        return self.home is not None and self.home.was_shared

    def __repr__(self) -> str:
        where = "memory" if self.home is None else self.home.name
        return f"{self.pid}@{self.host}/{where}"


@dataclass(eq=False)
class Move:
    """A hand-over that may not be over."""

    mid: str
    source: Kv
    target: Kv
    groups: set[int]
    strategy: str
    frozen: Cut  # as it was when it began
    positions: dict[int, Any]  # of the last commits, when it began
    begun_by_source: bool
    home: HomeModel | None = None  # of the target
    base: tuple[str, int] | None = None  # where a checkpoint is, and its number


@dataclass(eq=False)
class Copies:
    """Key-groups of one provider that another copies ahead: a shadow."""

    sid: str
    source: Kv
    target: Kv
    groups: set[int]  # that were not taken over


@dataclass(eq=False)
class Point:
    """A checkpoint."""

    place: "Place"
    number: int
    cuts: list[Cut]  # it has one of these
    stored: dict[str, int]
    metadata: Any
    by_sibling: bool = False  # who took it may not know states that others declared at its home

    @property
    def groups(self) -> set[int]:
        return set(self.cuts[0])


@dataclass(eq=False)
class Place:
    """A directory of checkpoints of one provider; without an owner, of all providers, in parts."""

    url: str
    owner: Kv | None
    points: list[Point] = field(default_factory=list)
    line: str = ""  # once its owner is gone: the home that it had
    writers: list[Kv] = field(default_factory=list)  # of the parts of its last checkpoint


class World:
    """See the module."""

    def __init__(self, rng: random.Random) -> None:
        self.groups = 2 ** rng.choice((0, 1, 2, 3, 4, 4, 5, 6))
        self.subgroups = 2 ** rng.choice((0, 0, 1, 2, 3, 4))
        self.specs = {spec.name: spec for spec in _random_specs(rng)}
        self.now = 4 * 10**12  # later than the clock on the wall
        self.watermark = rng.randrange(-1000, 1000)
        count = rng.choice((3, 10, 30, 100))
        self.keys = {
            kind: list(dict.fromkeys(random_key(rng, kind) for _ in range(count)))
            for kind in sorted({"str", *(spec.key for spec in self.specs.values())})
        }
        self.content: Cut = {}  # of key-groups that are not lost
        self.kvs: list[Kv] = []
        self.homes: list[HomeModel] = []
        self.moves: list[Move] = []
        self.copies: list[Copies] = []
        self.torn_moves: list[Move] = []  # into homes whose process was killed
        self.places: list[Place] = []
        self._hashes: dict[tuple[str, Any], int] = {}

    # ---- Who has what

    def group_of(self, kind: str, key: Any) -> int:
        return self.group_in(kind, key, self.groups)

    def group_in(self, kind: str, key: Any, groups: int) -> int:
        if (kind, key) not in self._hashes:
            self._hashes[kind, key] = sk.key_hash(KEYS[kind], key)
        return self._hashes[kind, key] * groups >> 64

    def at_rest(self, home: HomeModel) -> set[int]:
        """Key-groups that are in a home and that nobody has."""
        taken = {group for kv in self.kvs for group in kv.owned}
        return {group for group in home.base if group not in taken}

    def lost(self) -> set[int]:
        there = {group for kv in self.kvs for group in kv.owned}
        there.update(group for home in self.homes for group in home.base)
        return set(range(self.groups)) - there

    def note_shared(self) -> None:
        """Which homes several providers have open, or had since they were opened."""
        for home in self.homes:
            users = len(self.users_of(home))
            home.was_shared = users > 1 or (home.was_shared and users == 1)

    def users_of(self, home: HomeModel) -> list[Kv]:
        return [kv for kv in self.kvs if kv.home is home]

    def cut(self, kv: Kv) -> Cut:
        return {group: copied(self.content[group]) for group in kv.owned}

    def moves_of(self, kv: Kv) -> list[Move]:
        return [move for move in self.moves if kv in (move.source, move.target)]

    def has_entries_of_others(self, kv: Kv) -> bool:
        """Whether it may hold, shut, what another process is still to fetch."""
        return any(move.source is kv for move in (*self.moves, *self.torn_moves))

    # ---- Entries

    def clock(self, spec: Spec) -> int | None:
        if spec.ttl is None:
            return None
        return self.now if spec.ttl.clock == "processing" else self.watermark

    def is_alive(self, spec: Spec, stamp: int | None) -> bool:
        if spec.ttl is None:
            return True
        clock = self.clock(spec)
        assert clock is not None
        assert stamp is not None
        return stamp + spec.ttl.after_ms > clock

    def alive(self, spec: Spec, cut: Cut, groups: Iterable[int]) -> dict[Any, Any]:
        """The entries of a state in some key-groups."""
        found = {}
        for group in groups:
            held = cut[group].get(spec.name)
            if held is not None:
                for key, (value, stamp) in held.entries.items():
                    if self.is_alive(spec, stamp):
                        found[key] = value
        return found

    def settle(self, kv: Kv) -> None:
        """What a provider has is durable at home."""
        if kv.home is not None:
            for group in kv.owned:
                kv.home.settle(group, self.content[group])

    def take_in(self, kv: Kv, groups: Iterable[int], stored: dict[str, int]) -> None:
        """Key-groups come to a provider. stored: the versions of states where they come from."""
        for name, version in stored.items():
            kv.stored.setdefault(name, version)
        groups = [*groups]
        kv.owned.update(groups)
        self.upgrade(kv, groups)

    def upgrade(self, kv: Kv, groups: Iterable[int]) -> None:
        for group in groups:
            content = self.content[group]
            for name, held in content.items():
                if (version := kv.stored.get(name, 0)) > held.version:
                    content[name] = held.upgraded(self.specs[name].form, version)

    def upgraded(self, cut: Cut, versions: dict[str, int]) -> Cut:
        return {
            group: {
                name: held.upgraded(self.specs[name].form, versions.get(name, 0))
                for name, held in content.items()
            }
            for group, content in cut.items()
        }

    def regrouped(self, cut: Cut, groups: int) -> Cut:
        """The same entries in another number of key-groups."""
        found: Cut = {}
        for content in cut.values():
            for name, held in content.items():
                for key, entry in held.entries.items():
                    group = self.group_in(self.specs[name].key, key, groups)
                    there = found.setdefault(group, {})
                    there.setdefault(name, Held(held.version, {})).entries[key] = entry
        return found


class Scope:
    """The entries of one state that one provider has; see forms.Entries."""

    def __init__(self, world: World, kv: Kv, spec: Spec) -> None:
        self._world = world
        self._kv = kv
        self._spec = spec

    def _held(self, key: Any) -> dict[Any, Entry]:
        group = self._world.group_of(self._spec.key, key)
        assert group in self._kv.owned
        content, name = self._world.content[group], self._spec.name
        if name not in content:
            content[name] = Held(self._kv.stored[name], {})
        return content[name].entries

    def get(self, key: Any) -> Any:
        value, stamp = self._held(key).get(key, (MISSING, None))
        if value is MISSING or not self._world.is_alive(self._spec, stamp):
            return MISSING
        return value

    def read(self, key: Any) -> Any:
        value = self.get(key)
        ttl = self._spec.ttl
        if value is not MISSING and ttl is not None and ttl.refresh == "read":
            self.put(key, value)
        return value

    def put(self, key: Any, value: Any) -> None:
        self._held(key)[key] = (value, self._world.clock(self._spec))

    def drop(self, key: Any) -> bool:
        is_there = self.get(key) is not MISSING
        self._held(key).pop(key, None)
        return is_there

    def items(self) -> Iterator[tuple[Any, Any]]:
        world = self._world
        found = world.alive(self._spec, world.content, sorted(self._kv.owned))
        return iter(found.items())


def _random_specs(rng: random.Random) -> Iterator[Spec]:
    from .forms import UNTIMED, TTLSpec

    names = rng.sample([*FORMS], rng.choice((2, 4, 7, 10)))
    for form in names:
        ttl = None
        if form not in UNTIMED and rng.random() < 0.3:
            ttl = TTLSpec(
                rng.choice((10, 100, 1000)),
                rng.choice(("processing", "event")),
                rng.choice(("write", "read")),
            )
        key = "str" if form == "timers" else rng.choice(("str", "str", "int", "bytes", "pair"))
        yield Spec(f"{form}_{key[0]}", form, key, ttl)


def differences(expected: dict[Any, Any], found: dict[Any, Any]) -> list[str]:
    """What is wrong, at most a few lines."""
    wrong = []
    for key, value in expected.items():
        if key not in found:
            wrong.append(f"{key!r} is missing, should be {_short(value)}")
        elif canon(found[key]) != canon(value):
            wrong.append(f"{key!r} is {_short(found[key])}, should be {_short(value)}")
    wrong += [f"{key!r} is there: {_short(found[key])}" for key in found if key not in expected]
    return wrong[:6] + ([f"and {len(wrong) - 6} more"] if len(wrong) > 6 else [])


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:80]}…{text[-30:]}"
