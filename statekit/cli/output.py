"""What commands print: for people on a terminal, as plain columns in a pipe, as JSON for scripts.

Results go to stdout; progress and errors go to stderr, progress only if that is a terminal. So
`statekit ls URL | grep ...` and `statekit ls URL --json | jq ...` get nothing but the result.

rich is imported where something is drawn: loading it takes longer than most commands do.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import click

from statekit.errors import StateKitError

_BAR = 32  # characters
_CELL_MAX = 100  # of a value in a table
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


class OutputError(StateKitError):
    """A result that cannot be written to stdout."""


def print_json(value: Any) -> None:
    """One JSON document."""
    print_line(json.dumps(value, ensure_ascii=False, indent=2, default=str))


def print_line(text: str = "") -> None:
    try:
        click.echo(text)
    except BrokenPipeError:
        raise  # the reader has had enough
    except OSError as error:
        raise cannot_print(error) from None


def let_go_of_stdout() -> None:
    """Prevents Python from trying again, and complaining, when it flushes stdout at the end."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        pass  # stdout is no file


def cannot_print(error: OSError) -> OutputError:
    """What to raise if stdout cannot be written to."""
    let_go_of_stdout()
    return OutputError(
        f"the result cannot be written to stdout: {error.strerror or error}. Only that is lost: a "
        "checkpoint that was to be made is there."
    )


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]], numbers: str = "") -> None:
    """A table. numbers: one letter per column, "r" for columns that are aligned to the right."""
    sides = numbers.ljust(len(titles), "l")
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
        for title, side in zip(titles, sides, strict=True):
            table.add_column(title, justify="right" if side == "r" else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))  # as text: [x] is no markup
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for row in (titles, *rows):
        cells = [
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(row, widths, sides, strict=True)
        ]
        print_line("  ".join(cells).rstrip())


def print_bars(bars: Sequence[tuple[str, float, str]]) -> None:
    """A small bar chart. Of each bar: its label, its length, and the note behind it."""
    longest = max((length for _, length, _ in bars), default=0) or 1
    width = max((len(label) for label, _, _ in bars), default=0)
    for label, length, note in bars:
        print_line(f"{label.rjust(width)}  {bar(length / longest)}  {note}")


def bar(share: float) -> str:
    """A bar of a fixed width, in eighths of a character.

    >>> bar(0.5).count("█"), len(bar(0.3)) == len(bar(1.0))
    (16, True)
    """
    eighths = round(share * _BAR * 8)
    full, rest = divmod(eighths, 8)
    part = " ▏▎▍▌▋▊▉"[rest] if rest else ""
    return ("█" * full + part).ljust(_BAR)


def show_bytes(count: float) -> str:
    """A size for people.

    >>> show_bytes(999), show_bytes(1536), show_bytes(64 << 20)
    ('999 bytes', '1.5 KiB', '64.0 MiB')
    """
    size = float(count)
    for unit in _UNITS:
        if size < 1024 or unit == _UNITS[-1]:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def plural(count: int, noun: str) -> str:
    """A number of things.

    >>> plural(1, "pack"), plural(2000, "pack")
    ('1 pack', '2,000 packs')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def numbers(found: Iterable[int]) -> str:
    """Numbers of checkpoints.

    >>> numbers([1, 2]), numbers([])
    ('1, 2', 'none')
    """
    return ", ".join(map(str, found)) or "none"


def show_time(when: datetime) -> str:
    """A time in the local time zone."""
    return when.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def cut(text: str, most: int = _CELL_MAX) -> str:
    """A text that fits into a table, on one line."""
    shown = text.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."


def warn(text: str) -> None:
    """Something to know that is no failure, on stderr."""
    click.echo(f"statekit: {text}", err=True)


Advance = Callable[[int], None]


@contextmanager
def progress(what: str, total: int | None, *, in_bytes: bool = True) -> Iterator[Advance]:
    """A bar while work goes on. Call the function that it gives with how much more is done."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    figures = [DownloadColumn(), TransferSpeedColumn()] if in_bytes else [MofNCompleteColumn()]
    columns = [TextColumn("{task.description}"), BarColumn(), *figures, TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=total)
        yield lambda more: bars.advance(task, more)
