"""Commands that hand state over between processes: serve fetch. Each shows its progress.

A hand-over moves state: the old owner forgets what has arrived at the new owner. So `fetch` must be
told what to do with it. And whatever ends a hand-over early (Ctrl-C, a lost peer, a full disk),
each key-group stays with one of the two.
"""

import json
import logging
import signal
import sys
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import click

import statekit
from statekit.assignment import group_ranges, show_groups, subtract
from statekit.cli.moving import check_home, parse_groups
from statekit.cli.options import json_option
from statekit.cli.output import plural, print_json, print_line, show_bytes, warn
from statekit.cli.peers import (
    Access,
    access_options,
    read_tls,
    read_token,
    tls_options,
    token_option,
)
from statekit.cli.places import expand, is_home, parse_directory
from statekit.errors import ArgumentError, CheckpointError, MigrationError, StateKitError, shorten
from statekit.migration.strategies import ALIASES, STRATEGIES
from statekit.offline.copying import check_empty
from statekit.remote.security import TLS, check_server, parse_address

if TYPE_CHECKING:
    from statekit.protocol.calls import PeerHello

_TICK_S = 0.1  # between two looks at how far it is
_RATE_S = 2.0  # rates are taken over this many seconds
_LINES_MAX = 10  # of progress, if stderr is no terminal
_GRACE_S = 10.0  # for leaves that are on their way when `serve` is told to end
_ROW = 64  # cells per row of the map
_CELLS_MAX = 256  # of the map in all: with more key-groups, a cell stands for several
_SHADES = "░▒▓█"  # of a key-group nothing is here, some, most, all
_ELSEWHERE = "·"
_GOING = 0.99  # a key-group on its way counts as here by this share at most: it has another owner


# ---- serve


@click.command()
@click.argument("url")
@click.option(
    "--address",
    default="127.0.0.1:0",
    show_default=True,
    metavar="HOST:PORT",
    help="Where to listen; port 0 is any that is free. Also unix:/path.",
)
@click.option("--key-groups", metavar="RANGE", help="Only these, such as 0-63; all unless told.")
@token_option("A file with the token that others must show.")
@tls_options
@click.option("--once", is_flag=True, help="End when everything was handed over.")
@json_option
def serve(
    url: str,
    address: str,
    key_groups: str | None,
    token_file: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    tls_ca: str | None,
    once: bool,
    as_json: bool,
) -> None:
    """Serve a checkpoint or a home, for others to fetch from.

    URL is a checkpoint, or a home such as rocksdb:/path that no other process has open. It is
    served at once: state is read when somebody asks for it. Whoever runs `statekit fetch`, or
    fetch_from() in a program, takes key-groups over; then they are refused here, and a home does
    not have them any more. A checkpoint stays as it is.

    It goes on until Ctrl-C or SIGTERM. What is on its way then has ten seconds to get there;
    exit code 1 if it did not. Outside this machine, TLS is needed, and a token or certificates of
    the others. With --json there is one object a line: what is served, then each hand-over.

    \b
    Example:
      statekit serve /data/ckpt
      statekit serve rocksdb:/var/state --address 10.0.0.5:7000 --token-file token \\
          --tls-cert cert.pem --tls-key key.pem
    """
    tls, token = read_tls(tls_cert, tls_key, tls_ca), read_token(token_file)
    _check_reach(address, tls, token)
    with _log_as_lines(), _asked_to_end() as ending, _open_state(url, key_groups) as kv:
        server = kv.serve(address, tls=tls, token=token)
        _Serving(kv, server.address, as_json).run(ending, once)
        server.close(grace=_GRACE_S)  # the last report is answered before the line is cut


def _check_reach(address: str, tls: TLS | None, token: str | None) -> None:
    try:
        check_server(parse_address(address), tls, token, False)
    except ArgumentError:
        if parse_address(address).is_local or (tls is not None and tls.cert is None):
            raise
        raise ArgumentError(
            f"{address!r} can be reached from outside this machine. Give --tls-cert and --tls-key, "
            "and --token-file or --tls-ca to know who comes; or listen on 127.0.0.1."
        ) from None


def _open_state(url: str, key_groups: str | None) -> statekit.KVProvider:
    groups = None if key_groups is None else parse_groups(key_groups)
    if is_home(url):
        check_home(url)
        kv = statekit.open(url, owned=groups)
        if not kv.schemas:
            kv.close()
            raise ArgumentError(f"{kv.url!r} holds no states. Check the URL.")
        return kv
    places = expand([url])
    sources = [place.storage.url for place in places]
    return statekit.restore(sources, key_groups=groups, at=places[0].at)


class _Serving:
    """What `serve` shows while others fetch."""

    def __init__(self, kv: statekit.KVProvider, address: str, as_json: bool) -> None:
        self._kv = kv
        self._address = address
        self._as_json = as_json
        self._groups = kv.key_groups
        self._rates: dict[str, _Rate] = {}
        self._begun: dict[str, float] = {}
        self._told: set[str] = set()  # hand-overs whose end was reported

    def run(self, ending: "_Ending", once: bool) -> None:
        self._announce()
        with _screen() as draw:
            is_live = draw is not None
            while not ending.wait(_TICK_S):
                self._look(is_live)
                if draw is not None:
                    draw(self._picture())
                if once and self._is_all_gone:
                    break
            until = monotonic() + _GRACE_S
            while self._unfinished and monotonic() < until and not ending.wait(_TICK_S):
                if draw is not None:
                    draw(self._picture("waiting for what is on its way; Ctrl-C again ends it now"))
            self._look(is_live)
            if draw is not None:
                draw(self._picture("ended"))
        self._conclude()

    @property
    def _departures(self) -> tuple[statekit.Departure, ...]:
        return self._kv._as_peer().departures  # also those that are done, unlike kv.migrations

    @property
    def _unfinished(self) -> list[statekit.Departure]:
        return [one for one in self._departures if not one.done]

    @property
    def _is_all_gone(self) -> bool:
        return not self._kv.key_groups and bool(self._departures) and not self._unfinished

    def _announce(self) -> None:
        kv = self._kv
        place = kv.url.removeprefix("checkpoint:")
        if self._as_json:
            self._event(
                "serving",
                url=place,
                address=self._address,
                key_groups=_pairs(kv.key_groups),
                key_group_count=kv.key_group_count,
                states=list(kv.schemas),
            )
            return
        print_line(f"serving {place} at {self._address}")
        print_line(
            f"key-groups {show_groups(kv.key_groups)} of {kv.key_group_count}, "
            f"{plural(len(kv.schemas), 'state')}: {', '.join(kv.schemas) or 'none'}"
        )
        print_line(f"to take them over: statekit fetch {self._address} --into DIR")

    def _look(self, is_live: bool) -> None:
        """Reports hand-overs that began or ended since the last look."""
        now = monotonic()
        for one in self._departures:
            done, _, size = one.progress
            if one.id not in self._rates:
                self._rates[one.id] = _Rate()
                self._begun[one.id] = now
                if not is_live and not self._as_json:
                    print_line(f"{one.target} takes key-groups {show_groups(one.key_groups)}")
            self._rates[one.id].add(now, done, size)
            if one.done and one.id not in self._told:
                self._told.add(one.id)
                self._tell_end(one, now - self._begun[one.id], is_live)

    def _tell_end(self, one: statekit.Departure, seconds: float, is_live: bool) -> None:
        done, _, size = one.progress
        left = self._kv.key_groups
        if self._as_json:
            self._event(
                "handed_over",
                to=one.target,
                key_groups=_pairs(one.key_groups),
                leaves=done,
                bytes=size,
                left=_pairs(left),
            )
        elif not is_live:
            print_line(
                f"{one.target} has {plural(done, 'leaf').replace('leafs', 'leaves')}, "
                f"{show_bytes(size)}, after {seconds:.1f} s; "
                f"left here: {show_groups(left)}"
            )

    def _event(self, event: str, **figures: Any) -> None:
        print_line(json.dumps({"event": event, **figures}, ensure_ascii=False))

    def _picture(self, note: str = "") -> str:
        kv = self._kv
        going = Counter(
            leaf // kv.subgroups for one in self._unfinished for leaf in [*one.state.leaves]
        )
        shades = {group: min(n / kv.subgroups, _GOING) for group, n in going.items()}
        shades |= dict.fromkeys((group for part in kv.key_groups for group in part), 1.0)
        if not note:
            note = "everything was handed over; " if self._is_all_gone else ""
            note += "Ctrl-C ends it"
        lines = [
            "",
            *_map(kv.key_group_count, shades),
            f"[dim]{_SHADES[3]} here  {_SHADES[2]}{_SHADES[1]} on its way  {_ELSEWHERE} gone[/]",
            "",
        ]
        for one in self._departures[-8:]:
            done, total, size = one.progress
            rate = self._rates.get(one.id) or _Rate()
            lines.append(
                f"[bold]{_escape(one.target)}[/]: key-groups {show_groups(one.key_groups)}, "
                f"{done:,} of {total:,} leaves, {show_bytes(size)}"
                + ("" if one.done else f", {rate.text()}")
                + (" [green]done[/]" if one.done else "")
            )
        if not self._departures:
            lines.append("nobody has fetched anything yet")
        return "\n".join([*lines, f"[dim]{note}[/]"])

    def _conclude(self) -> None:
        if lost := self._unfinished:
            done, total, _ = lost[0].progress
            raise MigrationError(
                f"ended while {lost[0].target} had {done} of {total} leaves of key-groups "
                f"{show_groups(lost[0].key_groups)}. It does not have the rest: serve the same "
                "state again for those key-groups."
            )


# ---- fetch


class _Strategy(click.Choice[str]):
    """One of the strategies, by its present name or its former one."""

    def convert(self, value: Any, *rest: Any) -> Any:
        return super().convert(ALIASES.get(value, value), *rest)


@click.command()
@click.argument("address")
@click.option(
    "--key-groups", metavar="RANGE", help="These, such as 0-63; all that it has unless told."
)
@click.option(
    "--strategy",
    type=_Strategy(STRATEGIES),
    default="prioritised",
    show_default=True,
    help="How leaves come; fetch_from() explains them.",
)
@click.option("--into", metavar="DIR", help="Write what arrived as a checkpoint: a new directory.")
@click.option("--discard", is_flag=True, help="Throw away what arrived: for trying things out.")
@access_options
@json_option
def fetch(
    address: str,
    key_groups: str | None,
    strategy: str,
    into: str | None,
    discard: bool,
    access: Access,
    as_json: bool,
) -> None:
    """Take key-groups over from a process that serves them.

    ADDRESS is what `statekit serve` prints, or kv.serve() in a program. This takes the state over:
    its old owner refuses these key-groups from then on, and forgets what has arrived here. So say
    where it is to go: --into writes it as a checkpoint, to be served or restored elsewhere. Only
    with --discard it is gone when the command ends.

    Ctrl-C gives back the key-groups of which nothing has come yet, and writes those that have
    come. If the peer is lost, those that are complete are written. Exit code 1 in both cases.

    \b
    Example:
      statekit fetch 127.0.0.1:43107 --key-groups 0-63 --into /data/half
      statekit fetch 127.0.0.1:43107 --discard
    """
    if discard == (into is not None):
        raise click.UsageError(
            "fetch takes the state over, and its old owner forgets it. Say where it is to go with "
            "--into DIR, or --discard to throw it away; one of them."
        )
    if into is not None:
        check_empty(parse_directory(into))
    with access.connect(address) as channel:
        hello = channel.hello()
    groups = _groups_of(hello, address, key_groups)
    with (
        _log_as_lines(),
        _asked_to_end() as ending,
        statekit.open(
            "memory:", key_groups=hello.key_groups, subgroups=hello.subgroups, owned=()
        ) as kv,
    ):
        options = {"key_groups": groups, "strategy": strategy, "tls": access.tls}
        more = {"token": access.token, "timeout": access.timeout_s}
        fetching = _Fetching(kv, address, {**options, **more})
        fetching.run(ending)
        _finish(kv, fetching, into, as_json)


def _groups_of(hello: "PeerHello", address: str, text: str | None) -> tuple[range, ...]:
    if text is None:
        if not hello.owned:
            raise ArgumentError(f"{address} has no key-groups, or none any more.")
        return hello.owned
    groups = group_ranges(parse_groups(text), hello.key_groups)
    if missing := subtract(groups, hello.owned):
        raise ArgumentError(
            f"{address} does not have key-groups {show_groups(missing)}. It has "
            f"{show_groups(hello.owned)} of {hello.key_groups}."
        )
    return groups


class _Fetching:
    """A hand-over in a thread of its own, so that this one can draw, and be interrupted."""

    def __init__(self, kv: statekit.KVProvider, address: str, options: dict[str, Any]) -> None:
        self._kv = kv
        self._options = options
        self.address = address
        self.key_groups: tuple[range, ...] = options["key_groups"]
        self.strategy: str = options["strategy"]
        self.arrival: statekit.Arrival | None = None
        self.error: BaseException | None = None
        self.given_back: tuple[range, ...] = ()
        self.is_interrupted = False
        self.seconds = 0.0
        self._began = monotonic()
        self._over = threading.Event()
        self._rate = _Rate()
        self._lines = 0

    def run(self, ending: "_Ending") -> None:
        threading.Thread(target=self._take, name="statekit-fetch", daemon=True).start()
        with _screen() as draw:
            while not self._over.wait(_TICK_S):
                self._look(draw)
                if ending.take():
                    self._interrupt()
            self.seconds = monotonic() - self._began
            self._look(draw)

    def _take(self) -> None:
        kv = self._kv
        try:
            self.arrival = kv.fetch_from(self.address, **self._options)
            if self.strategy == "on_demand":  # then nothing comes by itself
                for group in [group for part in kv.key_groups for group in part]:
                    start = group * kv.subgroups
                    kv._residence.load_leaves(range(start, start + kv.subgroups))
            self.arrival.wait()
        except BaseException as error:  # reported by the thread that waits for this one
            self.error = error
        finally:
            self._over.set()

    def _interrupt(self) -> None:
        arrival = self._known()
        if self.is_interrupted or arrival is None:
            raise click.Abort  # it is the second time, or nothing has begun
        self.is_interrupted = True
        self.given_back = arrival.give_back()

    def _known(self) -> statekit.Arrival | None:
        """The hand-over, as soon as it has begun: all_at_once returns it only when it is over."""
        if self.arrival is not None:
            return self.arrival
        return next((one for one in self._kv.migrations if isinstance(one, statekit.Arrival)), None)

    def complete(self) -> tuple[range, ...]:
        """The key-groups that are here as a whole."""
        return group_ranges([group for group, share in self._shares().items() if share == 1.0])

    def _shares(self) -> dict[int, float]:
        """How much of each key-group is here, from 0 to 1."""
        kv = self._kv
        store, subs = kv._residence.store, kv.subgroups
        return {
            group: store.stats(start=group * subs, stop=(group + 1) * subs).whole / subs
            for part in kv.key_groups
            for group in part
        }

    def _look(self, draw: "Callable[[str], None] | None") -> None:
        arrival = self._known()
        if arrival is None:
            return
        done, total, size = arrival.progress
        self._rate.add(monotonic(), done, size)
        if draw is not None:
            draw(self._picture(arrival))
        elif done * _LINES_MAX // max(total, 1) > self._lines:
            self._lines = done * _LINES_MAX // max(total, 1)
            click.echo(f"{done:,} of {total:,} leaves, {show_bytes(size)}", err=True)

    def _picture(self, arrival: statekit.Arrival) -> str:
        done, total, size = arrival.progress
        asked = min(arrival.fetches, done)
        share = done / total if total else 1.0
        status = f"{total - done:,} to come" if done < total else "[green]all here[/]"
        if self.is_interrupted:
            status += f"; key-groups {show_groups(self.given_back)} were given back"
        return "\n".join(
            [
                f"key-groups {show_groups(self.key_groups)} from {_escape(self.address)}, "
                f"{self.strategy}",
                "",
                *_map(self._kv.key_group_count, self._shares()),
                f"[dim]{_SHADES[-1]} here  {_SHADES[1]}{_SHADES[2]} in part  {_SHADES[0]} to come  "
                f"{_ELSEWHERE} elsewhere[/]",
                "",
                f"[bold]{done:,}[/] of {total:,} leaves, {share:.0%}, {show_bytes(size)}"
                + (f", {self._rate.text()}" if done < total else ""),
                f"{asked:,} on demand, {done - asked:,} streamed, {status}",
            ]
        )


def _finish(kv: statekit.KVProvider, fetching: _Fetching, into: str | None, as_json: bool) -> None:
    """Writes what arrived, reports it, and raises what went wrong."""
    error, arrival = fetching.error, fetching.arrival or fetching._known()
    if error is not None and (arrival is None or not isinstance(error, StateKitError)):
        raise error
    assert arrival is not None
    here = kv.key_groups if error is None else fetching.complete()
    made = _write(kv, here, into) if into is not None and here else None
    leaves, _, size = arrival.progress
    if as_json:
        print_json(
            {
                "address": fetching.address,
                "key_groups": _pairs(here),
                "strategy": fetching.strategy,
                "leaves": leaves,
                "on_demand": min(arrival.fetches, leaves),
                "bytes": size,
                "seconds": round(fetching.seconds, 3),
                "url": None if made is None else made.url,
                "number": None if made is None else made.number,
            }
        )
    else:
        rate = size / max(fetching.seconds, 1e-3)
        print_line(
            f"fetched key-groups {show_groups(here)}: {leaves:,} leaves, {show_bytes(size)} in "
            f"{fetching.seconds:.1f} s, {show_bytes(rate)}/s"
        )
        if made is not None:
            print_line(f"written: checkpoint {made.number} of {made.url}, {show_bytes(made.bytes)}")
    if error is not None:
        torn = subtract(arrival.key_groups, here)
        raise MigrationError(f"key-groups {show_groups(torn)} are not here as a whole: {error}")
    if fetching.is_interrupted:
        raise MigrationError(
            f"interrupted: key-groups {show_groups(fetching.given_back)} were given back to "
            f"{fetching.address}."
        )


def _write(kv: statekit.KVProvider, here: tuple[range, ...], into: str) -> statekit.Checkpoint:
    """A checkpoint of these key-groups.

    If it cannot be written there, it is written elsewhere: nobody else has these key-groups.
    """

    def take(place: str) -> statekit.Checkpoint:
        # Not kv.checkpoint(): that would wait for key-groups that are not complete yet.
        return kv._checkpointer.take(place, None, gives_way=False, choose=lambda: here)

    try:
        return take(into)
    except (StateKitError, OSError) as error:
        made = take(tempfile.mkdtemp(prefix="statekit-fetched-"))
        raise CheckpointError(
            f"{shorten(into)} cannot be written: {error} What was fetched is in {made.url!r} "
            "instead. It is the only copy: keep it."
        ) from error


# ---- What both show


class _Rate:
    """Leaves and bytes per second, over the last seconds."""

    def __init__(self) -> None:
        self._seen = deque([(monotonic(), 0, 0)])

    def add(self, now: float, leaves: int, size: int) -> None:
        self._seen.append((now, leaves, size))
        while now - self._seen[0][0] > _RATE_S:
            self._seen.popleft()

    def text(self) -> str:
        (began, first, before), (now, last, after) = self._seen[0], self._seen[-1]
        spent = max(now - began, 1e-3)
        return f"{(last - first) / spent:,.0f} leaves/s, {(after - before) / spent / 1e6:.1f} MB/s"


def _map(count: int, shares: dict[int, float]) -> list[str]:
    """One cell per key-group, shaded by how much of it is here. Those not in shares are elsewhere.

    >>> _map(4, {0: 1.0, 1: 0.3, 2: 0.0})
    ['0  [cyan]█▒░·[/]']
    """
    each = -(-count // _CELLS_MAX)
    cells = []
    for start in range(0, count, each):
        known = [
            shares[group] for group in range(start, min(start + each, count)) if group in shares
        ]
        share = sum(known) / len(known) if known else -1.0
        cells.append(_ELSEWHERE if share < 0 else _SHADES[_shade(share)])
    width = len(str(count - 1))
    return [
        f"{str(at * each).rjust(width)}  [cyan]{''.join(cells[at : at + _ROW])}[/]"
        for at in range(0, len(cells), _ROW)
    ]


def _shade(share: float) -> int:
    if share in (0.0, 1.0):
        return -1 if share else 0
    return 1 if share < 0.5 else 2


def _pairs(groups: Sequence[range]) -> list[list[int]]:
    return [[part.start, part.stop] for part in groups]


def _escape(text: str) -> str:
    """The text for rich: [x] in it is no markup."""
    return text.replace("[", r"\[")


@contextmanager
def _screen() -> Iterator["Callable[[str], None] | None"]:
    """Gives a function that draws a text over the last one; None if stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(stderr=True), auto_refresh=False) as live:
        yield lambda text: live.update(Text.from_markup(text), refresh=True)


class _Ending:
    """How often somebody has asked to end.

    This is no threading.Event: its set() takes a lock. The thread that the signal interrupts may
    hold that lock, and would wait for itself for ever.
    """

    def __init__(self) -> None:
        self._asked = self._taken = 0

    def ask(self) -> None:
        self._asked += 1

    def take(self) -> bool:
        """Whether somebody has asked since the last time that this was True."""
        if self._taken == self._asked:
            return False
        self._taken += 1
        return True

    def wait(self, seconds: float) -> bool:
        """take(), now or after `seconds`."""
        if self._taken == self._asked:
            sleep(seconds)
        return self.take()


@contextmanager
def _asked_to_end() -> Iterator[_Ending]:
    """Counts Ctrl-C and SIGTERM, which do nothing else meanwhile."""
    ending = _Ending()
    before = {
        number: signal.signal(number, lambda *_: ending.ask())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield ending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Told(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if record.name != "statekit":
            warn(record.getMessage())


@contextmanager
def _log_as_lines() -> Iterator[None]:
    """Prints what a server logs, without tracebacks. Ends of hand-overs are reported elsewhere."""
    logger, handler = logging.getLogger("statekit"), _Told()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
