"""The home that a URL names, and how the memory is shared with it."""

from statekit.errors import ArgumentError
from statekit.homes import Home, HomeUrl, open_home
from statekit.provider.split import MEMORY_DEFAULT
from statekit.uninterrupted import await_finalizers

_HOME_SHARE = 8  # an eighth of the memory is for the home's own caches, ...
_HOME_BYTES_MIN = 8 << 20  # ... but this much if it is no more than a quarter
_ALLOCATOR_SHARE = 5  # a fifth is for what the allocator needs on top of what it is asked for


def home_of(parsed: HomeUrl) -> tuple[Home | None, int | None]:
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
