"""Opening a provider: from the URL of its home, or from checkpoints.

Restoring makes a provider of one or several checkpoints, which may be those of other key-groups,
of another number of workers, or of another number of key-groups:

    coverage   the leaves that the checkpoints have. No leaf may be in two of them; a key-group is
               covered if all its leaves are.
    geometry   the largest number of leaves among the checkpoints, and no less than the number of
               key-groups asked for. A leaf is a prefix of the key's hash, so a leaf of the
               provider is a leaf of a checkpoint or a slice of one, never made of several.
    time       the least watermark of them: nothing expires too early. Timers and entries are as
               they were.

Into memory, a restore is lazy: the provider is ready when the manifests are read, and leaves come
when they are touched and in the background (loading.py). Into a home, leaves are written one by
one, so it takes the memory of a leaf. Meanwhile the home's record names the key-groups that are
on their way; they cannot be opened before they have all arrived, and an interrupted restore can
be started again.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from datetime import datetime
from os import PathLike
from typing import Any, NamedTuple, TypeAlias

from statekit.assignment import KeyGroups, group_ranges, leaf_ranges, show_groups, subtract
from statekit.checkpoint.reader import Checkpoint
from statekit.errors import (
    ArgumentError,
    HomeError,
    OccupiedError,
    SchemaError,
    shorten,
)
from statekit.homes import Home, HomeUrl, open_home
from statekit.loading import CheckpointSource, open_pinned
from statekit.meta import HomeShare, Meta
from statekit.provider import MEMORY_DEFAULT, Family, KVProvider
from statekit.residence import Residence
from statekit.schema import StateSchema
from statekit.store import Store

Place: TypeAlias = str | PathLike[str] | Checkpoint

_HOME_SHARE = 8  # an eighth of the memory is for the home's own caches, ...
_HOME_BYTES_MIN = 8 << 20  # ... but this much if it is no more than a quarter
_ALLOCATOR_SHARE = 5  # a fifth is for what the allocator needs on top of what it is asked for
_KEY_GROUPS, _SUBGROUPS = 128, 16
_LEAVES_MAX = 1 << 20
_CHECKPOINT = "checkpoint:"


def open(  # noqa: A001  (sk.open, as in gzip.open)
    url: str = "memory:",
    *,
    key_groups: int | None = None,
    subgroups: int | None = None,
    owned: KeyGroups | None = None,
) -> KVProvider:
    """Opens a provider.

    url: "memory:", "rocksdb:/path?memory=2GiB", "redis://host:port/db", or a home that another
    package brings. `memory=` is how much memory may hold; the rest is at home.
    "checkpoint:URL" restores the newest checkpoint there; see restore().
    key_groups, subgroups: powers of two; 128 and 16 unless the home has others already.
    owned: the key-groups that are this provider's; all unless told.

    >>> kv = open("memory:")
    >>> visits = kv.value("visits", int, default=0)
    >>> visits["alice"] += 1
    >>> visits["alice"]
    1
    """
    if isinstance(url, str) and url.startswith(_CHECKPOINT):
        if subgroups is not None:
            raise ArgumentError(f"the sub-groups of {url!r} are given. Leave subgroups out.")
        return restore(url.removeprefix(_CHECKPOINT), key_groups=owned, regroup=key_groups)
    parsed = HomeUrl.parse(url)
    home, budget = _home_of(parsed)
    try:
        return _open_with(home, parsed.shown, key_groups, subgroups, owned, budget)
    except BaseException:
        if home is not None:
            home.close()
        raise


def _home_of(parsed: HomeUrl) -> tuple[Home | None, int | None]:
    """The home that a URL names, and how much memory may hold."""
    if parsed.scheme == "memory":
        budget = parsed.take_bytes("memory", 0) or None
        if parsed.place:
            raise ArgumentError(f'{parsed.shown!r} names a place in memory. Write "memory:".')
        parsed.refuse_rest()
        return None, budget
    memory = parsed.take_bytes("memory", MEMORY_DEFAULT)
    share = max(memory // _HOME_SHARE, min(_HOME_BYTES_MIN, memory // 4))
    return open_home(parsed, share), memory - share - memory // _ALLOCATOR_SHARE


def _open_with(
    home: Home | None,
    url: str,
    key_groups: int | None,
    subgroups: int | None,
    owned: KeyGroups | None,
    budget: int | None,
) -> KVProvider:
    meta = Meta.read(home, url)
    is_new = meta.key_groups is None
    groups, subs = _fix_geometry(meta, url, key_groups, subgroups)
    mine = group_ranges(range(groups) if owned is None else owned, groups)
    if torn := _common(mine, meta.restoring):
        raise HomeError(
            f"a restore of key-groups {show_groups(torn)} into {url!r} is going on or was "
            "interrupted, so they are there only in part. Wait for it, or restore them again."
        )
    store = Store(groups, subs)
    if not is_new:
        store.mark(0, store.leaves, "absent")
    for part in leaf_ranges(subtract((range(groups),), mine), subs):
        store.mark(part.start, part.stop, "away")
    share = HomeShare(home)
    residence = Residence(store, home, budget, share.write_lock)
    return KVProvider(url, residence, meta, mine, share, Family())


def _fix_geometry(
    meta: Meta, url: str, key_groups: int | None, subgroups: int | None
) -> tuple[int, int]:
    """Key-groups and sub-groups of a home: those it has, those asked for, or the usual ones."""
    geometry = []
    for name, asked, stored, default in (
        ("key_groups", key_groups, meta.key_groups, _KEY_GROUPS),
        ("subgroups", subgroups, meta.subgroups, _SUBGROUPS),
    ):
        if asked is not None and stored is not None and asked != stored:
            raise ArgumentError(
                f"{url!r} was made with {name}={stored}; asked for was {name}={asked}. "
                "Leave it out, or copy the state into a new home."
            )
        known = default if stored is None else stored
        geometry.append(known if asked is None else asked)
    meta.key_groups, meta.subgroups = geometry
    return geometry[0], geometry[1]


def _common(a: tuple[range, ...], b: tuple[range, ...]) -> tuple[range, ...]:
    return subtract(a, subtract(a, b))


# ---- Restoring


def restore(
    url: Place | Sequence[Place],
    *,
    key_groups: KeyGroups | None = None,
    lazy: bool = True,
    at: int | datetime | None = None,
    home: str = "memory:",
    regroup: int | None = None,
) -> KVProvider:
    """Makes a provider of a checkpoint, or of several that have different key-groups.

    url: where kv.checkpoint() wrote, or what it returned; a list of these to merge what is in them.
    key_groups: those to restore; all that the checkpoints have unless told.
    lazy: be ready at once, and bring state when it is touched and in the background; see
    KVProvider.loading. False: return when everything is here.
    at: the number of a checkpoint, or the newest one of a time; the newest unless told.
    home: where the state is to live, as in open(). A home other than memory must have no state of
    these key-groups, and is complete when this returns.
    regroup: another number of key-groups, a power of two, in which key_groups counts then.
    """
    places = _places(url)
    parsed = HomeUrl.parse(home)
    if parsed.options.get("look", "0") != "0":
        raise ArgumentError(
            f"{parsed.shown!r} is a copy to look at, which is gone when it is closed. "
            "Restore into the home itself: leave look out."
        )
    with ExitStack() as undo:
        pinned = []
        for place in places:
            if isinstance(place, Checkpoint):
                pinned.append(open_pinned(place.url, place.number))
            else:
                pinned.append(open_pinned(place, at))
            undo.callback(pinned[-1][1].release)
        plan = _Plan.make([checkpoint for checkpoint, _ in pinned], regroup)
        mine = plan.choose(key_groups)
        source = CheckpointSource(pinned, plan.leaves)
        undo.pop_all()
    if parsed.scheme == "memory":
        return _restore_here(plan, mine, source, _home_of(parsed)[1], lazy)
    try:
        return _restore_home(plan, mine, source, parsed)
    finally:
        source.release()


def _places(url: Any) -> list[Place]:
    if isinstance(url, str | PathLike | Checkpoint):
        return [url]
    if isinstance(url, Iterable) and not isinstance(url, bytes | bytearray | memoryview):
        return [*url]
    raise ArgumentError(
        f"{shorten(url)} names no checkpoints. Give the place that kv.checkpoint() wrote to, a "
        "path or a URL as str, or a list of such places."
    )


class _Plan(NamedTuple):
    """What several checkpoints are together."""

    checkpoints: Sequence[Checkpoint]
    key_groups: int
    subgroups: int
    covered: tuple[range, ...]  # key-groups
    torn: tuple[range, ...]  # key-groups of which only a part is covered
    schemas: list[StateSchema]
    watermark: int | None

    @property
    def leaves(self) -> int:
        return self.key_groups * self.subgroups

    @property
    def names(self) -> str:
        return ", ".join(repr(one.url) for one in self.checkpoints)

    @classmethod
    def make(cls, checkpoints: Sequence[Checkpoint], regroup: int | None) -> "_Plan":
        if not checkpoints:
            raise ArgumentError("there is no checkpoint to restore. Name one place or more.")
        groups = _group_count(checkpoints, regroup)
        leaves = max(groups, *(one.manifest.leaves for one in checkpoints))
        covered, torn = _coverage(checkpoints, leaves, leaves // groups)
        times = [one.watermark for one in checkpoints]
        known = [time for time in times if time is not None]
        return cls(
            checkpoints,
            groups,
            leaves // groups,
            covered,
            torn,
            _schemas(checkpoints),
            min(known) if len(known) == len(times) else None,
        )

    def choose(self, key_groups: KeyGroups | None) -> tuple[range, ...]:
        """The key-groups to be restored. ArgumentError if some are not covered."""
        if key_groups is None and not self.torn:
            return self.covered
        asked = self.torn if key_groups is None else group_ranges(key_groups, self.key_groups)
        if missing := subtract(asked, self.covered):
            part = _common(missing, self.torn)
            partly = f", of {show_groups(part)} only a part" if part else ""
            raise ArgumentError(
                f"key-groups {show_groups(missing)} of {self.key_groups} are not in {self.names}: "
                f"there are {show_groups(self.covered)}{partly}. "
                "Ask for these, or name the checkpoints that have the others too."
            )
        return asked


def _group_count(checkpoints: Sequence[Checkpoint], regroup: int | None) -> int:
    counts = sorted({one.key_group_count for one in checkpoints})
    if regroup is None:
        if len(counts) > 1:
            raise ArgumentError(
                f"these checkpoints have different numbers of key-groups, {counts}. "
                f"Pass regroup={counts[-1]}, or another number that all are to have."
            )
        return counts[0]
    if type(regroup) is not int or not 0 < regroup <= _LEAVES_MAX or regroup & (regroup - 1):
        raise ArgumentError(
            f"there cannot be {shorten(regroup)} key-groups. "
            f"Pass a power of two, {_LEAVES_MAX} at most, as regroup."
        )
    return regroup


def _coverage(
    checkpoints: Sequence[Checkpoint], leaves: int, subgroups: int
) -> tuple[tuple[range, ...], tuple[range, ...]]:
    """The key-groups of which the checkpoints have all leaves, and those of which only some."""
    spans = []
    for one in checkpoints:
        for part in leaf_ranges(one.key_groups, leaves // one.key_group_count):
            spans.append((part.start, part.stop, one))
    spans.sort(key=lambda span: span[:2])
    joined: list[list[int]] = []
    last: Checkpoint | None = None
    for start, stop, one in spans:
        if joined and start < joined[-1][1]:
            assert last is not None
            raise OccupiedError(
                f"checkpoint {last.number} of {last.url!r} and checkpoint {one.number} of "
                f"{one.url!r} have the same key-groups: {show_groups(last.key_groups)} and "
                f"{show_groups(one.key_groups)}. Restore checkpoints of different ones."
            )
        if joined and start == joined[-1][1]:
            joined[-1][1] = stop
        else:
            joined.append([start, stop])
        last = one
    covered: list[range] = []
    touched: set[int] = set()
    for start, stop in joined:
        covered.append(range(-(-start // subgroups), stop // subgroups))
        touched.update((start // subgroups, (stop - 1) // subgroups))
    whole = group_ranges([part for part in covered if len(part)])
    return whole, subtract(group_ranges(sorted(touched)), whole)


def _schemas(checkpoints: Sequence[Checkpoint]) -> list[StateSchema]:
    found: dict[str, tuple[StateSchema, Checkpoint]] = {}
    for one in checkpoints:
        for schema in one.manifest.schemas:
            known, other = found.setdefault(schema.name, (schema, one))
            if known != schema:
                raise SchemaError(
                    f"state {schema.name!r} is {known} in {other.url!r} and {schema} in "
                    f"{one.url!r}. Restore each, declare it alike and take new checkpoints first."
                )
    return [schema for schema, _ in found.values()]


def _restore_here(
    plan: _Plan,
    mine: tuple[range, ...],
    source: CheckpointSource,
    budget: int | None,
    lazy: bool,
    background: bool = True,
) -> KVProvider:
    """A provider in memory. The source is its own, also if this fails."""
    try:
        store = Store(plan.key_groups, plan.subgroups)
        share = HomeShare(None)
        residence = Residence(store, None, budget, share.write_lock)
        residence.restore_from(source, background)
    except BaseException:
        source.release()
        raise
    meta = Meta(plan.key_groups, plan.subgroups, [*plan.schemas])
    url = _CHECKPOINT + ", ".join(one.url for one in plan.checkpoints)
    kv = KVProvider(url, residence, meta, mine, share, Family())
    try:
        _prepare(kv, plan, mine)
        if lazy:
            residence.resume_loading()
        else:
            residence.wait_loaded()
    except BaseException:
        kv.close()
        raise
    return kv


def _prepare(kv: KVProvider, plan: _Plan, mine: tuple[range, ...]) -> None:
    """The provider's store with nothing in it yet, but with types, time and a past."""
    store = kv._residence.store
    if plan.watermark is not None:
        store.set_time("event", plan.watermark)  # before anything is read
    for schema in plan.schemas:
        # All of them, in their order: then equal state is encoded as equal bytes, whoever is
        # quicker at it, the user who declares states or the threads that load them.
        store.state(schema.name, schema.kind, schema.key, timed=schema.timed)  # type: ignore[call-overload]
    store.mark(0, store.leaves, "away")
    owned = leaf_ranges(mine, plan.subgroups)
    for part in owned:
        store.mark(part.start, part.stop, "whole")
    source = kv._residence.source  # None if it goes into a home, which is to be asked then
    filled = (range(store.leaves),) if source is None else source.filled(store.leaves)
    for part in filled:  # the others are empty, and need not be asked for
        for own in owned:
            start, stop = max(part.start, own.start), min(part.stop, own.stop)
            if start < stop:
                store.mark(start, stop, "absent")
    epoch = store.advance_epoch()  # changes from here on are changes to the checkpoints
    for one in plan.checkpoints:
        if one.manifest.leaves == plan.leaves:
            kv._checkpointer.adopt(one, epoch)


def _restore_home(
    plan: _Plan, mine: tuple[range, ...], source: CheckpointSource, parsed: HomeUrl
) -> KVProvider:
    home, budget = _home_of(parsed)
    assert home is not None
    try:
        url = parsed.shown
        meta = Meta.read(home, url)
        _fix_geometry(meta, url, plan.key_groups, plan.subgroups)
        _check_empty(home, url, meta, subtract(mine, meta.restoring), plan.subgroups)
        _change_restoring(home, url, meta, lambda there: subtract(there, mine) + mine)
        store = Store(plan.key_groups, plan.subgroups)
        share = HomeShare(home)
        residence = Residence(store, home, budget, share.write_lock)
        kv = KVProvider(url, residence, meta, mine, share, Family())
        for schema in plan.schemas:
            kv._register(schema)
        _prepare(kv, plan, mine)
        leaves = [leaf for part in leaf_ranges(mine, plan.subgroups) for leaf in part]
        residence.fill_home(source, leaves)
        _change_restoring(home, url, meta, lambda there: subtract(there, mine))
        home.flush()
    except BaseException:
        home.close()
        raise
    return kv


def _check_empty(
    home: Home, url: str, meta: Meta, groups: tuple[range, ...], subgroups: int
) -> None:
    for number, schema in enumerate(meta.schemas):
        for leaf in (leaf for part in leaf_ranges(groups, subgroups) for leaf in part):
            if next(iter(home.load(leaf, number)), None) is not None:
                raise ArgumentError(
                    f"{url!r} is not empty: it has entries of state {schema.name!r} in key-group "
                    f"{leaf // subgroups}. Restore into a new home, or delete what is there."
                )


def _change_restoring(
    home: Home,
    url: str,
    meta: Meta,
    change: Callable[[tuple[range, ...]], tuple[range, ...]],
) -> None:
    """Changes the key-groups in the home's record that are on their way."""
    while True:
        expected = home.read_meta()
        if expected is not None:
            stored = Meta.decode(expected, url)
            meta.schemas, meta.restoring = stored.schemas, stored.restoring
        meta.restoring = group_ranges(change(meta.restoring))
        if home.write_meta(meta.encode(), expected):
            return
