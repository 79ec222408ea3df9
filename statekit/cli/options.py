"""Options and arguments that several commands have."""

import json
import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

C = TypeVar("C", bound=Callable[..., Any])

_NUMBER = re.compile(r"-\d[\d.eE+-]*")
_MARK = "\0"  # no argument of a program has it


class EntryCommand(click.Command):
    """A command that takes keys and values: -7 is a key or a value, and no option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        marked = [
            _MARK + arg if _NUMBER.fullmatch(arg) and before != "--at" else arg
            for before, arg in zip(["", *args], args, strict=False)
        ]
        return super().parse_args(ctx, marked)


def entry_text(value: str) -> str:
    """The click type of an argument that is a key or a value."""
    return value.removeprefix(_MARK)


def parse_json(text: str | bytes) -> Any:
    """json.loads(), but a number that is too large for a float is a ValueError, not infinity."""
    return json.loads(text, parse_float=parse_float)


def parse_float(text: str) -> float:
    """float(), but a number that is too large for a float is a ValueError, not infinity."""
    value = float(text)
    if math.isinf(value) and "n" not in text.lower():  # inf, Infinity
        raise ValueError(f"{text} is too large for a float")
    return value


json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON for scripts instead of text for people."
)
at_option = click.option(
    "--at", type=click.IntRange(min=1), metavar="N", help="Checkpoint N instead of the newest."
)
missing_option = click.option(
    "--missing-ok", is_flag=True, help="Go on although some key-groups are in none of the URLs."
)
state_option = click.option("--state", metavar="STATE", help="Only this state.")


def limit_option(default: int, text: str) -> Callable[[C], C]:
    return click.option(
        "--limit", type=click.IntRange(min=0), default=default, show_default=True, metavar="N",
        help=text,
    )  # fmt: skip
