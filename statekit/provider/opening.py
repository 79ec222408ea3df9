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
be started again. All of it happens in a thread that no signal reaches (uninterrupted.py).
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from datetime import datetime
from os import PathLike
from typing import Any, Literal, NamedTuple, TypeAlias
from uuid import uuid4

from statekit.assignment import (
    KeyGroups,
    common,
    group_ranges,
    leaf_ranges,
    show_groups,
    subtract,
)
from statekit.checkpoint.reader import Checkpoint
from statekit.errors import (
    ArgumentError,
    CheckpointCancelledError,
    HomeError,
    NotOwnedError,
    OccupiedError,
    SchemaError,
    shorten,
)
from statekit.homes import Home, HomeUrl, open_home
from statekit.homes.ledger import Ledger
from statekit.homes.record import HomeShare, Meta
from statekit.native import Store
from statekit.provider.provider import MEMORY_DEFAULT, Family, KVProvider
from statekit.residence.loading import CheckpointSource, open_pinned
from statekit.residence.residence import Residence
from statekit.schema import StateSchema
from statekit.uninterrupted import await_finalizers, uninterrupted

_log = logging.getLogger("statekit")

Place: TypeAlias = str | PathLike[str] | Checkpoint

_HOME_SHARE = 8  # an eighth of the memory is for the home's own caches, ...
_HOME_BYTES_MIN = 8 << 20  # ... but this much if it is no more than a quarter
_ALLOCATOR_SHARE = 5  # a fifth is for what the allocator needs on top of what it is asked for
_KEY_GROUPS, _SUBGROUPS = 128, 16
_LEAVES_MAX = 1 << 20
_CHECKPOINT = "checkpoint:"
_LOOK_SECONDS = 0.1  # how soon a restore notices that it was interrupted


def open(  # noqa: A001  (sk.open, as in gzip.open)
    url: str = "memory:",
    *,
    key_groups: int | None = None,
    subgroups: int | None = None,
    owned: KeyGroups | None = None,
    reclaim: bool = False,
) -> KVProvider:
    """Opens a provider.

    url: "memory:", "rocksdb:/path?memory=2GiB", "redis://host:port/db", or a home that another
    package brings. `memory=` is how much memory may hold; the rest is at home.
    "checkpoint:URL" restores the newest checkpoint there; see restore().
    key_groups, subgroups: powers of two; 128 and 16 unless the home has others already.
    owned: the key-groups that are this provider's; unless told, all that were not handed over to
    another process.
    reclaim: take back what was handed over, as the home has it: as it was at the last commit. To be
    said when the new owner is gone for good, and only you can know that.

    >>> kv = open("memory:")
    >>> visits = kv.value("visits", int, default=0)
    >>> visits["alice"] += 1
    >>> visits["alice"]
    1
    """
    for name, number in (("key_groups", key_groups), ("subgroups", subgroups)):
        if number is not None:
            _check_count(name, number)
    if isinstance(url, str) and url.startswith(_CHECKPOINT):
        if subgroups is not None:
            raise ArgumentError(f"the sub-groups of {url!r} are given. Leave subgroups out.")
        if reclaim:
            raise ArgumentError(f"nothing was handed over by {url!r}. Leave reclaim out.")
        return restore(url.removeprefix(_CHECKPOINT), key_groups=owned, regroup=key_groups)
    parsed = HomeUrl.parse(url)
    if reclaim and parsed.scheme == "memory":
        raise ArgumentError("memory: keeps nothing that was handed over. Leave reclaim out.")
    home, budget = _home_of(parsed)
    try:
        return _open_with(home, parsed.shown, key_groups, subgroups, owned, budget, reclaim)
    except BaseException:
        if home is not None:
            home.close()
        raise


def _check_count(name: str, number: Any) -> None:
    """ArgumentError for what cannot be a number of key-groups or sub-groups."""
    if type(number) is not int or not 0 < number <= _LEAVES_MAX or number & (number - 1):
        what = "key-groups" if name == "key_groups" else "sub-groups"
        which = " `owned` says which of them are this provider's." if name == "key_groups" else ""
        raise ArgumentError(
            f"{name}={shorten(number)} is no number of {what}. Pass a power of two, "
            f"{_LEAVES_MAX} at most.{which}"
        )


def _home_of(parsed: HomeUrl) -> tuple[Home | None, int | None]:
    """The home that a URL names, and how much memory may hold."""
    if parsed.scheme == "memory":
        budget = parsed.take_bytes("memory", 0) or None
        if parsed.place:
            raise ArgumentError(f'{parsed.shown!r} names a place in memory. Write "memory:".')
        parsed.refuse_rest()
        return None, budget
    await_finalizers()  # one of them may be about to let go of this home
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
    reclaim: bool,
) -> KVProvider:
    meta = Meta.read(home, url)
    is_new = home is None
    groups, subs = _fix_geometry(meta, url, key_groups, subgroups)
    mine = group_ranges(range(groups) if owned is None else owned, groups)
    if given := common(mine, meta.given):
        if reclaim:
            _check_kept(url, meta, given)
        elif owned is None:
            mine = subtract(mine, given)
            _log.warning("%s", _handed_over(url, given))
        else:
            raise NotOwnedError(_handed_over(url, given))
    if torn := common(mine, meta.restoring):
        raise HomeError(
            f"a restore of key-groups {show_groups(torn)} into {url!r} is going on or was "
            "interrupted, so they are there only in part. Wait for it, or restore them again."
        )
    ledger = None
    if home is not None:
        if not meta.is_current:
            # The geometry is fixed from now on.
            is_new = _change_meta(home, url, meta, lambda found: None)
        ledger = Ledger(home, subs, len(meta.schemas), is_bare=is_new)
        ledger.recover(mine)
    store = Store(groups, subs)
    if not is_new:
        store.mark(0, store.leaves, "absent")
    for part in leaf_ranges(subtract((range(groups),), mine), subs):
        store.mark(part.start, part.stop, "away")
    residence = Residence(store, ledger, budget)
    kv = KVProvider(url, residence, meta, mine, HomeShare(ledger), Family())
    if given and reclaim:
        kv._record_taken(given, ())  # before anything is done with them
    return kv


def _handed_over(url: str, given: tuple[range, ...]) -> str:
    return (
        f"key-groups {show_groups(given)} of {url!r} were handed over to another process, and are "
        "not this provider's any more. To have them back, fetch them from there into a provider "
        'of "memory:", and merge() that. If the other process is gone for good, '
        "open(..., reclaim=True) takes them back as they were at the last commit."
    )


def _check_kept(url: str, meta: Meta, given: tuple[range, ...]) -> None:
    """NotOwnedError if of key-groups that are to be taken back not all is there any more."""
    gone = common(given, meta.deleted)
    if not gone:
        return
    kept = subtract(given, gone)
    others = f" {show_groups(kept)} can: name these as owned=, and reclaim them." if kept else ""
    raise NotOwnedError(
        f"key-groups {show_groups(gone)} of {url!r} cannot be taken back: they were handed over to "
        "another process, which had them, and so they were deleted here, at least a part of them. "
        f"Restore them from a checkpoint: restore(..., home={url!r}).{others}"
    )


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


# ---- Restoring


def restore(
    url: Place | Sequence[Place],
    *,
    key_groups: KeyGroups | None = None,
    lazy: bool = True,
    at: int | datetime | None = None,
    home: str = "memory:",
    regroup: int | None = None,
    missing: Literal["error", "ok"] = "error",
    replace: bool = False,
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
    missing: "ok" restores several places also if they do not have all key-groups together. A single
    place may be that of one worker, so of that one nothing is missed.
    replace: whatever the home holds of these key-groups is deleted.
    """
    if missing not in ("error", "ok"):
        raise ArgumentError(
            f'missing={shorten(missing)} is neither "error" nor "ok". Pass "ok" to go on without '
            "key-groups that are in none of the places."
        )
    if replace and HomeUrl.parse(home).scheme == "memory":
        raise ArgumentError('replace=True is for a home: there is nothing to replace in "memory:".')
    places = _places(url)
    is_strict = key_groups is None and missing == "error" and len(places) > 1

    def work(is_abandoned: Callable[[], bool]) -> KVProvider:
        parsed = HomeUrl.parse(home)
        if parsed.options.get("look", "0") != "0":
            raise ArgumentError(
                f"{parsed.shown!r} is a copy to look at, which is gone when it is closed. "
                "Restore into the home itself: leave look out."
            )
        is_memory = parsed.scheme == "memory"
        budget = _home_of(parsed)[1] if is_memory else None  # before anything is pinned
        plan, mine, source = _open_source(places, at, regroup, key_groups, is_strict)
        if is_memory:
            return _restore_here(plan, mine, source, budget, lazy, is_abandoned=is_abandoned)
        try:
            return _restore_home(plan, mine, source, parsed, replace, is_abandoned)
        finally:
            source.release()

    return uninterrupted(work, KVProvider.close)


def _open_source(
    places: Sequence[Place],
    at: int | datetime | None,
    regroup: int | None,
    key_groups: KeyGroups | None,
    is_strict: bool,
) -> "tuple[_Plan, tuple[range, ...], CheckpointSource]":
    """What several checkpoints are together, what is wanted of it, and where it comes from."""
    with ExitStack() as undo:
        pinned = []
        for place in places:
            if isinstance(place, Checkpoint):
                pinned.append(open_pinned(place.url, place.number))
            else:
                pinned.append(open_pinned(place, at))
            undo.callback(pinned[-1][1].release)
        plan = _Plan.make([checkpoint for checkpoint, _ in pinned], regroup)
        if is_strict:
            plan.check_whole()
        mine = plan.choose(key_groups)
        source = CheckpointSource(pinned, plan.leaves)
        undo.pop_all()
    return plan, mine, source


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

    def check_whole(self) -> None:
        """ArgumentError if there are key-groups that none of the checkpoints has."""
        holes = subtract((range(self.key_groups),), group_ranges([*self.covered, *self.torn]))
        if holes:
            raise ArgumentError(
                f"key-groups {show_groups(holes)} of {self.key_groups} are in none of "
                f"{self.names}. Name the checkpoints that have them too, or say which key-groups "
                'are wanted (key_groups=), or missing="ok" (--missing-ok) to go on without them.'
            )

    def choose(self, key_groups: KeyGroups | None) -> tuple[range, ...]:
        """The key-groups to be restored. ArgumentError if some are not covered."""
        if key_groups is None and not self.torn:
            return self.covered
        asked = self.torn if key_groups is None else group_ranges(key_groups, self.key_groups)
        if missing := subtract(asked, self.covered):
            part = common(missing, self.torn)
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
    is_abandoned: Callable[[], bool] = lambda: False,
) -> KVProvider:
    """A provider in memory. The source is its own, also if this fails."""
    try:
        store = Store(plan.key_groups, plan.subgroups)
        residence = Residence(store, None, budget)
        residence.restore_from(source, background)
    except BaseException:
        source.release()
        raise
    meta = Meta(plan.key_groups, plan.subgroups, [*plan.schemas])
    url = _CHECKPOINT + ", ".join(one.url for one in plan.checkpoints)
    kv = KVProvider(url, residence, meta, mine, HomeShare(None), Family())
    try:
        _prepare(kv, plan, mine)
        if lazy:
            residence.resume_loading()
        else:
            _wait_loaded(residence, is_abandoned)
    except BaseException:
        kv.close()
        raise
    return kv


def _wait_loaded(residence: Residence, is_abandoned: Callable[[], bool]) -> None:
    while True:
        try:
            residence.wait_loaded(_LOOK_SECONDS)
            return
        except TimeoutError:
            if is_abandoned():
                raise


def _wanted(leaves: Iterable[int], is_abandoned: Callable[[], bool]) -> Iterator[int]:
    for leaf in leaves:
        if is_abandoned():
            raise CheckpointCancelledError("the restore was interrupted. Start it again.")
        yield leaf


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
        kv._checkpointer.succeed(one)
        if one.manifest.leaves == plan.leaves:
            kv._checkpointer.adopt(one, epoch)


def _restore_home(
    plan: _Plan,
    mine: tuple[range, ...],
    source: CheckpointSource,
    parsed: HomeUrl,
    replace: bool,
    is_abandoned: Callable[[], bool],
) -> KVProvider:
    home, budget = _home_of(parsed)
    assert home is not None
    kv = None
    try:
        url = parsed.shown
        meta = Meta.read(home, url)
        _fix_geometry(meta, url, plan.key_groups, plan.subgroups)
        ledger = Ledger(home, plan.subgroups, len(meta.schemas))
        ledger.recover(mine)  # what was committed is in its place now
        if not replace:
            torn = (*meta.restoring, *meta.deleted)  # of which nobody expects to find all
            _check_empty(home, url, meta, subtract(mine, torn), plan.subgroups)
        _change_restoring(home, url, meta, lambda there: subtract(there, mine) + mine)
        residence = Residence(Store(plan.key_groups, plan.subgroups), ledger, budget)
        kv = KVProvider(url, residence, meta, mine, HomeShare(ledger), Family())
        for schema in plan.schemas:
            kv._register(schema)
        _prepare(kv, plan, mine)
        leaves = [leaf for part in leaf_ranges(mine, plan.subgroups) for leaf in part]
        residence.fill_home(source, _wanted(leaves, is_abandoned))
        # From now on they are at the position of the checkpoint.
        positions = [(mine, plan.checkpoints[0].metadata)] if len(plan.checkpoints) == 1 else []
        residence.commit(mine, [one for one in positions if one[1]])
        _change_restoring(home, url, meta, lambda there: subtract(there, mine), mine)
    except BaseException:
        if kv is None:
            home.close()
        else:
            kv._let_go()  # nobody has it, or can be told to close it
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
                    f"{leaf // subgroups}. Restore into a new home, or pass replace=True "
                    "(--replace) to have what is there deleted."
                )


def _change_restoring(
    home: Home,
    url: str,
    meta: Meta,
    change: Callable[[tuple[range, ...]], tuple[range, ...]],
    done: tuple[range, ...] = (),
) -> None:
    """Changes the key-groups in the home's record that are on their way; done: they are here."""

    def set_restoring(found: Meta) -> None:
        found.restoring = group_ranges(change(found.restoring))
        found.take(done)

    _change_meta(home, url, meta, set_restoring)


def _change_meta(home: Home, url: str, meta: Meta, change: Callable[[Meta], None]) -> bool:
    """Changes the home's record, which others may be changing too; whether there was none."""
    while True:
        expected = home.read_meta()
        if expected is not None:
            stored = Meta.decode(expected, url)
            theirs = (stored.key_groups, stored.subgroups)
            if theirs != (meta.key_groups, meta.subgroups):  # it was new a moment ago
                raise ArgumentError(
                    f"{url!r} was just made by another process with {theirs[0]} key-groups x "
                    f"{theirs[1]} sub-groups; asked for was {meta.key_groups} x {meta.subgroups}. "
                    "Open it with the same numbers everywhere."
                )
            meta.refresh(stored)
        meta.id = meta.id or uuid4().hex
        change(meta)
        if home.write_meta(meta.encode(), expected):
            meta.is_current = True
            return expected is None
