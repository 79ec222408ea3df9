"""statekit.restore(): a provider from checkpoints.

It makes a provider of one or several checkpoints, which may be those of other key-groups,
of another number of workers, or of another number of key-groups:

    coverage   the leaves that the checkpoints have. No leaf may be in two of them; a key-group is
               covered if all its leaves are.
    geometry   the largest number of leaves among the checkpoints, and no less than the number of
               key-groups asked for. A leaf is a prefix of the key's hash, so a leaf of the
               provider is a leaf of a checkpoint or a slice of one, never made of several.
    time       the least watermark of them: nothing expires too early. Timers and entries are as
               they were.

Into memory, a restore is lazy: the provider is ready when the manifests are read, and leaves come
when they are touched and in the background (residence/loading.py). Into a home, leaves are written
one by one, so it takes the memory of a leaf. Meanwhile the home's record names the key-groups that
are on their way; they cannot be opened before they have all arrived, and an interrupted restore
can be started again. All of it happens in a thread that no signal reaches (uninterrupted.py).

With lazy=True a home is ready at once, too: leaves move in as they would come to memory
(residence/moving_in.py). Then the home's record names the checkpoints that they come from, until
all are there: whoever opens the home goes on with it (resume_sources).
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack
from datetime import datetime
from os import PathLike
from typing import Any, Literal, TypeAlias

from statekit.assignment import (
    KeyGroups,
    common,
    group_ranges,
    leaf_ranges,
    show_groups,
    subtract,
)
from statekit.checkpoint.reader import Checkpoint
from statekit.checkpoint.union import Union, unite
from statekit.errors import (
    ArgumentError,
    CheckpointCancelledError,
    HomeError,
    StateKitError,
    shorten,
)
from statekit.homes import Home, HomeUrl
from statekit.homes.ledger import Ledger
from statekit.homes.record import (
    HomeRecord,
    HomeShare,
    HomeSource,
    change_record,
    fix_geometry,
    update_record,
)
from statekit.native import Store
from statekit.provider.home import home_of
from statekit.provider.provider import KVProvider
from statekit.provider.recording import show_arrivals
from statekit.provider.split import Family
from statekit.residence.residence import Residence
from statekit.residence.sources import CheckpointSource, PullSource, RoutedPull, open_pinned
from statekit.storage import Pin
from statekit.uninterrupted import uninterrupted

Place: TypeAlias = str | PathLike[str] | Checkpoint

CHECKPOINT = "checkpoint:"  # what the URL of a provider from checkpoints begins with
_LOOK_SECONDS = 0.1  # how soon a restore notices that it was interrupted


def restore(
    url: Place | Sequence[Place],
    *,
    key_groups: KeyGroups | None = None,
    lazy: bool | None = None,
    background: bool = True,
    at: int | datetime | None = None,
    home: str = "memory:",
    regroup: int | None = None,
    subgroups: int | None = None,
    missing: Literal["error", "ok"] = "error",
    replace: bool = False,
) -> KVProvider:
    """Makes a provider of a checkpoint, or of several that have different key-groups.

    url: where kv.checkpoint() wrote, or what it returned; a list of these to merge what is in them.
    key_groups: those to restore; all that the checkpoints have unless told.
    lazy: be ready at once, and bring state when it is touched and in the background; see
    KVProvider.loading. False: return when everything is here. Unless told, a restore into memory
    is lazy, and one into a home is not.
    background: False brings only what is touched, for who touches little of it and closes it soon.
    What is never touched stays in the checkpoint, which is kept meanwhile.
    at: the number of a checkpoint, or the newest one of a time; the newest unless told.
    home: where the state is to live, as in open(). A home other than memory must have no state of
    these key-groups. It is complete when this returns, unless lazy=True: then it needs the
    checkpoints until all of it is there, also when it is closed and opened again meanwhile.
    regroup: another number of key-groups, a power of two, in which key_groups counts then.
    subgroups: how many sub-groups each key-group is to have at least, a power of two: for a state
    that has grown. There may be more of them already, and it never has fewer leaves than it had.
    missing: "ok" restores several places also if they do not have all key-groups together. A single
    place may be that of one worker, so of that one nothing is missed.
    replace: whatever the home holds of these key-groups is deleted.
    """
    if missing not in ("error", "ok"):
        raise ArgumentError(
            f'missing={shorten(missing)} is neither "error" nor "ok". Pass "ok" to go on without '
            "key-groups that are in none of the places."
        )
    is_memory = HomeUrl.parse(home).scheme == "memory"
    if replace and is_memory:
        raise ArgumentError('replace=True is for a home: there is nothing to replace in "memory:".')
    is_lazy = is_memory if lazy is None else lazy
    if not background and not is_lazy:
        why = "lazy=False" if lazy is not None else "a restore into a home, unless it is lazy,"
        raise ArgumentError(
            f"background=False brings only what is touched, and {why} waits for all of it. "
            "Use it with lazy=True, or leave it out."
        )
    places = _places(url)
    is_strict = key_groups is None and missing == "error" and len(places) > 1

    def work(is_abandoned: Callable[[], bool]) -> KVProvider:
        parsed = HomeUrl.parse(home)
        if parsed.options.get("look", "0") != "0":
            raise ArgumentError(
                f"{parsed.shown!r} is a copy to look at, which is gone when it is closed. "
                "Restore into the home itself: leave look out."
            )
        budget = home_of(parsed)[1] if is_memory else None  # before anything is pinned
        plan, mine, source = _open_source(places, at, regroup, subgroups, key_groups, is_strict)
        if is_memory:
            return _restore_here(plan, mine, source, budget, is_lazy, background, is_abandoned)
        try:
            return _restore_home(
                plan, mine, source, parsed, replace, background if is_lazy else None, is_abandoned
            )
        finally:
            source.release()

    return uninterrupted(work, KVProvider.close)


def _open_source(
    places: Sequence[Place],
    at: int | datetime | None,
    regroup: int | None,
    subgroups: int | None,
    key_groups: KeyGroups | None,
    is_strict: bool,
) -> "tuple[Union, tuple[range, ...], CheckpointSource]":
    """What several checkpoints are together, what is wanted of it, and where it comes from."""
    with ExitStack() as undo:
        pinned = []
        for place in places:
            pinned.append(open_pinned(place, at))
            undo.callback(pinned[-1][1].release)
        plan = unite([checkpoint for checkpoint, _ in pinned], regroup, subgroups)
        if is_strict:
            plan.check_whole(
                "Name the checkpoints that have them too, or say which key-groups are wanted "
                '(key_groups=), or missing="ok" (--missing-ok) to go on without them.'
            )
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


def _restore_here(
    plan: Union,
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
    record = HomeRecord(plan.key_groups, plan.subgroups, [*plan.schemas])
    url = CHECKPOINT + ", ".join(one.url for one in plan.checkpoints)
    kv = KVProvider(url, residence, record, mine, HomeShare(None), Family())
    try:
        _prepare(kv, plan, mine, source)
        if lazy:
            residence.resume_loading()  # if it is to be in the background
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


def _prepare(
    kv: KVProvider, plan: Union, mine: tuple[range, ...], source: PullSource | None
) -> None:
    """The provider's store with nothing in it yet, but with types, time and a past.

    source: what leaves come from; None if they go into a home, which is to be asked then.
    """
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
    plan: Union,
    mine: tuple[range, ...],
    source: CheckpointSource,
    parsed: HomeUrl,
    replace: bool,
    lazily: bool | None,
    is_abandoned: Callable[[], bool],
) -> KVProvider:
    """A provider with a home. lazily: whether leaves that move in do so by themselves, too; None:
    all of them are there when this returns.
    """
    if lazily is not None:
        _check_nameable(plan)
    home, budget = home_of(parsed)
    assert home is not None
    kv = None
    try:
        url = parsed.shown
        record = HomeRecord.read(home, url)
        fix_geometry(record, url, plan.key_groups, plan.subgroups)
        ledger = Ledger(home, plan.subgroups, len(record.schemas))
        ledger.recover(mine)  # what was committed is in its place now
        if not replace:
            torn = (*record.restoring, *record.deleted)  # of which nobody expects to find all
            _check_unfilled(url, record, subtract(mine, torn))
            _check_empty(home, url, record, subtract(mine, torn), plan.subgroups)
        _change_restoring(home, url, record, lambda there: subtract(there, mine) + mine)
        ledger.has_sources = bool(record.sources)
        residence = Residence(Store(plan.key_groups, plan.subgroups), ledger, budget)
        kv = KVProvider(url, residence, record, mine, HomeShare(ledger), Family())
        for schema in plan.schemas:
            kv._register(schema)
        leaves = leaf_ranges(mine, plan.subgroups)
        if lazily is None:
            _prepare(kv, plan, mine, None)
            every = [leaf for part in leaves for leaf in part]
            residence.fill_home(source, _wanted(every, is_abandoned))
        else:
            ledger.empty(leaves)
            _prepare(kv, plan, mine, source)
        # From now on they are at the position of the checkpoint.
        positions = [(mine, plan.checkpoints[0].metadata)] if len(plan.checkpoints) == 1 else []
        residence.commit(mine, [one for one in positions if one[1]])
        coming = None
        if lazily is not None:
            checkpoints = [
                (one.storage.url, one.number, one.digest.hex()) for one in plan.checkpoints
            ]
            coming = HomeSource(mine, tuple(checkpoints), lazily)
        _change_restoring(home, url, record, lambda there: subtract(there, mine), mine, coming)
        if lazily is not None:
            leaves_coming = _coming(kv, mine, source, ())
            source.share()
            _move_in(kv, mine, [(leaves_coming, source)], lazily)
    except BaseException:
        if kv is None:
            home.close()
        else:
            kv._let_go()  # nobody has it, or can be told to close it
        raise
    return kv


def _check_empty(
    home: Home, url: str, record: HomeRecord, groups: tuple[range, ...], subgroups: int
) -> None:
    for number, schema in enumerate(record.schemas):
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
    record: HomeRecord,
    change: Callable[[tuple[range, ...]], tuple[range, ...]],
    done: tuple[range, ...] = (),
    coming: HomeSource | None = None,
) -> None:
    """Changes the key-groups in the home's record that are on their way.

    done: they are here; coming: or they can be used, and this is where they come from.
    """

    def set_restoring(found: HomeRecord) -> None:
        found.restoring = group_ranges(change(found.restoring))
        gone = group_ranges((*found.restoring, *subtract(done, found.restoring)))
        found.end_sources(gone)
        found.end_arrivals(gone)
        found.take(done)
        if coming is not None:
            found.sources += (coming,)

    change_record(home, url, record, set_restoring)


def _check_nameable(plan: Union) -> None:
    """ArgumentError if a home would have to keep a password to find a checkpoint again."""
    for one in plan.checkpoints:
        if one.storage.url != one.storage.shown:
            raise ArgumentError(
                f"the URL of {one.storage.shown!r} has a password. A home that is filled lazily "
                "keeps the URL until all is there, and must not keep that. Leave lazy out, or "
                "give the password another way (a key file, the environment)."
            )


def _check_unfilled(url: str, record: HomeRecord, groups: tuple[range, ...]) -> None:
    if both := common(groups, record.filling):
        raise ArgumentError(
            f"{url!r} has key-groups {show_groups(both)}, which are still being filled from "
            f"{_names(record.sources)}: open it to go on with that. Restore into a new home, or "
            "pass replace=True (--replace) to have what is there deleted."
        )
    if both := common(groups, record.arriving):
        raise ArgumentError(
            f"{url!r} has key-groups {show_groups(both)}, which are on their way from another "
            f"process ({show_arrivals(record.arrivals)}): open it, and fetch_from() there goes on "
            "with that. Or pass replace=True (--replace) to have what is there deleted."
        )


def _names(sources: Iterable[HomeSource]) -> str:
    found = (f"checkpoint {at} of {url!r}" for one in sources for url, at, _ in one.checkpoints)
    return ", ".join(dict.fromkeys(found))


# ---- Homes that are still being filled


def _coming(
    kv: KVProvider, groups: tuple[range, ...], source: CheckpointSource, here: Container[int]
) -> list[int]:
    """The leaves of key-groups that a source has, and that are not here."""
    store = kv._residence.store
    return [
        leaf
        for part in source.filled(store.leaves)
        for own in leaf_ranges(groups, store.subgroups)
        for leaf in range(max(part.start, own.start), min(part.stop, own.stop))
        if leaf not in here
    ]


def _move_in(
    kv: KVProvider,
    groups: tuple[range, ...],
    routes: "list[tuple[list[int], CheckpointSource]]",
    background: bool,
) -> None:
    """Has leaves of key-groups move in from sources, which are the provider's from now on."""
    residence, home, ledger = kv._residence, kv._residence.home, kv._residence.ledger
    assert home is not None
    assert ledger is not None

    def moved_in() -> None:
        home.flush()  # before it is forgotten where to find them
        update_record(home, kv.url, lambda record: record.end_sources(groups))
        # Some may have gone since, and be on their way back from another process.
        arriving = HomeRecord.read(home, kv.url).arriving
        ledger.forget_moved_in(leaf_ranges(subtract(groups, arriving), residence.store.subgroups))

    leaves = [leaf for some, _ in routes for leaf in some]
    ledger.has_sources = True
    try:
        source: PullSource = routes[0][1]
        if len(routes) > 1:  # one may have key-groups that are to come from another
            source = RoutedPull([(frozenset(some), one) for some, one in routes], None)
        residence.move_in_from(source, leaves, moved_in, background)
    except BaseException:
        if residence.loading is None:  # which would let go of them
            for _, one in routes:
                one.release()
        raise
    residence.resume_loading()  # in the background, if it is to be
    if not leaves:
        residence.end_loading()


def resume_sources(kv: KVProvider, background: bool) -> None:
    """Goes on with what was coming when the home was closed, or its process killed.

    background: False brings only what is touched, whatever the home was restored with.
    """
    ledger = kv._residence.ledger
    sources = [one for one in kv._recorded.sources if common(one.key_groups, kv._mine)]
    if not sources or ledger is None:
        return
    here = ledger.moved_in()
    routes = []
    with ExitStack() as undo:
        for one in sources:
            pinned = []
            for checkpoint in one.checkpoints:
                pinned.append(_open_again(kv.url, one, *checkpoint))
                undo.callback(pinned[-1][1].release)
            source = CheckpointSource(pinned, kv._residence.store.leaves)
            groups = common(one.key_groups, kv._mine)
            routes.append((_coming(kv, groups, source, here), source))
        undo.pop_all()
    every = common(kv._recorded.filling, kv._mine)
    _move_in(kv, every, routes, background and all(one.background for one in sources))


def _open_again(
    home_url: str, source: HomeSource, place: str, number: int, digest: str
) -> tuple[Checkpoint, Pin]:
    """The checkpoint that a home is being filled from. HomeError if it is another one by now."""
    try:
        checkpoint, pin = open_pinned(place, number)
        if checkpoint.digest.hex() == digest:
            return checkpoint, pin
        pin.release()
        why = "another one of that number is there"
    except StateKitError as error:
        why = str(error)
    raise HomeError(
        f"key-groups {show_groups(source.key_groups)} of {home_url!r} are still being filled from "
        f"checkpoint {number} of {place!r}, which cannot be had: {why} Bring it back, or restore "
        "these key-groups from another checkpoint (restore(..., replace=True)). The others can be "
        "opened by themselves (owned=)."
    )
