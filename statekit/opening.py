"""Opening a provider: from the URL of its home."""

from statekit.assignment import KeyGroups, group_ranges, subtract
from statekit.errors import ArgumentError
from statekit.homes import Home, HomeUrl, open_home
from statekit.meta import HomeShare, Meta
from statekit.provider import MEMORY_DEFAULT, Family, KVProvider
from statekit.residence import Residence
from statekit.store import Store

_HOME_SHARE = 8  # an eighth of the memory is for the home's own caches, ...
_HOME_BYTES_MIN = 8 << 20  # ... but this much if it is no more than a quarter
_ALLOCATOR_SHARE = 5  # a fifth is for what the allocator needs on top of what it is asked for
_KEY_GROUPS, _SUBGROUPS = 128, 16


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
    key_groups, subgroups: powers of two; 128 and 16 unless the home has others already.
    owned: the key-groups that are this provider's; all unless told.

    >>> kv = open("memory:")
    >>> visits = kv.value("visits", int, default=0)
    >>> visits["alice"] += 1
    >>> visits["alice"]
    1
    """
    parsed = HomeUrl.parse(url)
    home = None
    share = 0
    if parsed.scheme == "memory":
        budget = parsed.take_bytes("memory", 0) or None
        if parsed.place:
            raise ArgumentError(f'{url!r} names a place in memory. Write "memory:".')
        parsed.refuse_rest()
    else:
        memory = parsed.take_bytes("memory", MEMORY_DEFAULT)
        share = max(memory // _HOME_SHARE, min(_HOME_BYTES_MIN, memory // 4))
        budget = memory - share - memory // _ALLOCATOR_SHARE
        home = open_home(parsed, share)
    try:
        return _open_with(home, parsed.shown, key_groups, subgroups, owned, budget)
    except BaseException:
        if home is not None:
            home.close()
        raise


def _open_with(
    home: Home | None,
    url: str,
    key_groups: int | None,
    subgroups: int | None,
    owned: KeyGroups | None,
    budget: int | None,
) -> KVProvider:
    meta = Meta.read(home, url)
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
    store = Store(geometry[0], geometry[1])
    is_new = meta.key_groups is None
    meta.key_groups, meta.subgroups = geometry
    mine = group_ranges(range(geometry[0]) if owned is None else owned, geometry[0])
    if not is_new:
        store.mark(0, store.leaves, "absent")
    for part in subtract((range(geometry[0]),), mine):
        store.mark(part.start * geometry[1], part.stop * geometry[1], "away")
    share = HomeShare(home)
    residence = Residence(store, home, budget, share.write_lock)
    return KVProvider(url, residence, meta, mine, share, Family())
