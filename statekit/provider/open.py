"""statekit.open(): a provider from the URL of its home."""

import logging
from typing import Any

from statekit.assignment import (
    KeyGroups,
    common,
    group_ranges,
    leaf_ranges,
    show_groups,
    subtract,
)
from statekit.errors import ArgumentError, HomeError, NotOwnedError, shorten
from statekit.homes import Home, HomeUrl
from statekit.homes.ledger import Ledger
from statekit.homes.record import HomeRecord, HomeShare, change_record, fix_geometry
from statekit.native import Store
from statekit.provider.home import home_of
from statekit.provider.provider import KVProvider
from statekit.provider.recording import show_arrivals, whole_groups
from statekit.provider.restore import CHECKPOINT, restore, resume_sources
from statekit.provider.split import Family
from statekit.residence.residence import Residence

_log = logging.getLogger("statekit")

_LEAVES_MAX = 1 << 20


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
    if isinstance(url, str) and url.startswith(CHECKPOINT):
        if subgroups is not None:
            raise ArgumentError(f"the sub-groups of {url!r} are given. Leave subgroups out.")
        if reclaim:
            raise ArgumentError(f"nothing was handed over by {url!r}. Leave reclaim out.")
        return restore(url.removeprefix(CHECKPOINT), key_groups=owned, regroup=key_groups)
    parsed = HomeUrl.parse(url)
    if reclaim and parsed.scheme == "memory":
        raise ArgumentError("memory: keeps nothing that was handed over. Leave reclaim out.")
    is_look = parsed.options.get("look", "0") != "0"
    home, budget = home_of(parsed)
    try:
        kv, given = _open_with(home, parsed.shown, key_groups, subgroups, owned, budget, reclaim)
    except BaseException:
        if home is not None:
            home.close()
        raise
    try:
        resume_sources(kv, background=not is_look)
        if given and reclaim:
            kv._record_taken(given, ())  # before anything is done with them
    except BaseException:
        kv._let_go()
        raise
    return kv


def _check_count(name: str, number: Any) -> None:
    """ArgumentError for what cannot be a number of key-groups or sub-groups."""
    if type(number) is not int or not 0 < number <= _LEAVES_MAX or number & (number - 1):
        what = "key-groups" if name == "key_groups" else "sub-groups"
        which = " `owned` says which of them are this provider's." if name == "key_groups" else ""
        raise ArgumentError(
            f"{name}={shorten(number)} is no number of {what}. Pass a power of two, "
            f"{_LEAVES_MAX} at most.{which}"
        )


def _open_with(
    home: Home | None,
    url: str,
    key_groups: int | None,
    subgroups: int | None,
    owned: KeyGroups | None,
    budget: int | None,
    reclaim: bool,
) -> tuple[KVProvider, tuple[range, ...]]:
    """The provider, and what its home has handed over of the key-groups that are asked for."""
    record = HomeRecord.read(home, url)
    is_new = home is None
    groups, subs = fix_geometry(record, url, key_groups, subgroups)
    mine = group_ranges(range(groups) if owned is None else owned, groups)
    mine, whole = _arrived(home, url, record, mine, owned is not None, reclaim, subs)
    if given := common(mine, subtract(record.given, whole)):
        if reclaim:
            _check_kept(url, record, given)
        elif owned is None:
            mine = subtract(mine, given)
            _log.warning("%s", _handed_over(url, given))
        else:
            raise NotOwnedError(_handed_over(url, given))
    if torn := common(mine, record.restoring):
        raise HomeError(
            f"a restore of key-groups {show_groups(torn)} into {url!r} is going on or was "
            "interrupted, so they are there only in part. Wait for it, or restore them again."
        )
    ledger = None
    if home is not None:
        if not record.is_current:
            # The geometry is fixed from now on.
            is_new = change_record(home, url, record, lambda found: None)
        if whole or (reclaim and record.arrivals):
            change_record(home, url, record, lambda found: _hold(found, whole, reclaim))
        ledger = Ledger(home, subs, len(record.schemas), is_bare=is_new)
        ledger.has_sources = bool(record.sources)
        ledger.recover(mine)
    store = Store(groups, subs)
    if not is_new:
        store.mark(0, store.leaves, "absent")
    for part in leaf_ranges(subtract((range(groups),), mine), subs):
        store.mark(part.start, part.stop, "away")
    residence = Residence(store, ledger, budget)
    kv = KVProvider(url, residence, record, mine, HomeShare(ledger), Family())
    return kv, given


def _arrived(
    home: Home | None,
    url: str,
    record: HomeRecord,
    mine: tuple[range, ...],
    is_strict: bool,
    reclaim: bool,
    subgroups: int,
) -> tuple[tuple[range, ...], tuple[range, ...]]:
    """What is owned, now that the process is gone to which key-groups came; those that are whole.

    Of the others a part is still where they came from: they are nobody's until they are fetched.
    """
    arriving = common(mine, record.arriving)
    if reclaim:  # they had gone, and nothing has come back yet
        arriving = subtract(arriving, subtract(record.given, record.deleted))
    if home is None or not arriving:
        return mine, ()
    whole = whole_groups(arriving, Ledger(home, subgroups).moved_in(), subgroups)
    if torn := subtract(arriving, whole):
        froms = tuple(one for one in record.arrivals if common(one.key_groups, torn))
        text = (
            f"key-groups {show_groups(torn)} of {url!r} are there only in part: they were on their "
            f"way from another process ({show_arrivals(froms)}) when the one that had this home "
            "open ended. They are not this provider's. fetch_from() that address goes on with it; "
            "if that process is gone for good, restore them from a checkpoint: restore(..., "
            f"home={url!r}, replace=True)."
        )
        if is_strict:
            raise NotOwnedError(text)
        _log.warning("%s", text)
    return subtract(mine, torn), whole


def _hold(record: HomeRecord, whole: tuple[range, ...], reclaim: bool) -> None:
    """Key-groups that have come are owned from now on. reclaim: nobody is left to be told so."""
    record.hold(whole)
    if reclaim:
        record.arrivals = tuple(one._replace(held=()) for one in record.arrivals if one.key_groups)


def _handed_over(url: str, given: tuple[range, ...]) -> str:
    return (
        f"key-groups {show_groups(given)} of {url!r} were handed over to another process, and are "
        "not this provider's any more. To have them back, fetch_from() there. If the other process "
        "is gone for good, open(..., reclaim=True) takes them back as they were at the last commit."
    )


def _check_kept(url: str, record: HomeRecord, given: tuple[range, ...]) -> None:
    """NotOwnedError if of key-groups that are to be taken back not all is there any more."""
    gone = common(given, record.deleted)
    if not gone:
        return
    kept = subtract(given, gone)
    others = f" {show_groups(kept)} can: name these as owned=, and reclaim them." if kept else ""
    raise NotOwnedError(
        f"key-groups {show_groups(gone)} of {url!r} cannot be taken back: they were handed over to "
        "another process, which had them, and so they were deleted here, at least a part of them. "
        f"Restore them from a checkpoint: restore(..., home={url!r}).{others}"
    )
