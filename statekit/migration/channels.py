"""Channels: connections to other processes that stay warm between two hand-overs.

A new connection costs several milliseconds, and the first question on it is who is there. When
ownership moves in steps, each of them would pay for both. So a channel that nobody uses any more is
kept, with what its peer has said of itself. gRPC closes a connection that is idle for long, so
keeping the channel costs no bytes; its next call connects again.

A channel that was in use when its peer was lost is not kept: the next one is to find out anew
whether somebody listens there.
"""

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from statekit.protocol.calls import PeerHello

if TYPE_CHECKING:
    from statekit.migration.shell import Credentials
    from statekit.remote.channel import PeerChannel

IDLE_MAX = 16  # channels that are kept while nobody uses them

Open = Callable[[str, "Credentials", float], "PeerChannel"]


class _Lent:
    """A channel of the pool, and what is known of its peer."""

    __slots__ = ("channel", "hello", "key", "pid", "users")

    def __init__(self, channel: "PeerChannel", key: tuple[object, ...]) -> None:
        self.channel = channel
        self.key = key
        self.users = 1
        self.hello: PeerHello | None = None  # as it was when somebody last asked
        self.pid = os.getpid()  # connections do not survive fork()


class Channels:
    """The channels of one peer."""

    def __init__(self, connect: Open) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._kept: dict[tuple[object, ...], _Lent] = {}  # by what they are for; see give_back()
        self._lent: dict[PeerChannel, _Lent] = {}  # all that are in use or kept
        self._is_closed = False

    def borrow(self, address: str, credentials: "Credentials", timeout_s: float) -> "PeerChannel":
        """A channel that others may be using too; give_back() must follow."""
        key = (address, credentials.tls, credentials.token, timeout_s)
        with self._lock:
            found = self._kept.get(key)
            if found is not None and found.pid == os.getpid():
                found.users += 1
                return found.channel
        made = _Lent(self._connect(address, credentials, timeout_s), key)
        with self._lock:
            self._lent[made.channel] = made
            self._kept.setdefault(key, made)
        return made.channel

    def give_back(self, channel: "PeerChannel", is_broken: bool = False) -> None:
        """is_broken: something went wrong with it. It is closed when its last user is done."""
        closing: list[PeerChannel] = []
        with self._lock:
            lent = self._lent.get(channel)
            if lent is None:  # it was not borrowed, or is closed
                closing.append(channel)
            else:
                lent.users -= 1
                if self._kept.get(lent.key) is lent and (is_broken or self._is_closed):
                    del self._kept[lent.key]
                if not lent.users:
                    closing += self._rest(lent)
        for one in closing:
            one.close()

    def _rest(self, lent: _Lent) -> "list[PeerChannel]":
        """Nobody uses it. Which ones are to be closed."""
        if self._kept.get(lent.key) is not lent:
            del self._lent[lent.channel]
            return [lent.channel]
        del self._kept[lent.key]
        self._kept[lent.key] = lent  # the last one that is closed
        lent.channel.rest()
        idle = [one for one in self._kept.values() if not one.users]
        for one in (old := idle[: max(0, len(idle) - IDLE_MAX)]):
            del self._kept[one.key], self._lent[one.channel]
        return [one.channel for one in old]

    def note(self, channel: "PeerChannel", hello: PeerHello) -> None:
        """What the peer has said of itself."""
        with self._lock:
            if (lent := self._lent.get(channel)) is not None:
                lent.hello = hello

    def known(self, channel: "PeerChannel") -> PeerHello | None:
        """What it said last; it may have changed since."""
        lent = self._lent.get(channel)
        return None if lent is None else lent.hello

    def close(self) -> None:
        """Closes those that nobody uses; the others when they are given back."""
        with self._lock:
            self._is_closed = True
            idle = [one for one in self._kept.values() if not one.users]
            for one in idle:
                del self._lent[one.channel]
            self._kept.clear()
        for one in idle:
            one.channel.close()
