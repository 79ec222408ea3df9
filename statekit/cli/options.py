"""Options that several commands have."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

C = TypeVar("C", bound=Callable[..., Any])

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON for scripts instead of text for people."
)
at_option = click.option(
    "--at", type=click.IntRange(min=1), metavar="N", help="Checkpoint N instead of the newest."
)
state_option = click.option("--state", metavar="STATE", help="Only this state.")


def limit_option(default: int, text: str) -> Callable[[C], C]:
    return click.option(
        "--limit", type=click.IntRange(min=0), default=default, show_default=True, metavar="N",
        help=text,
    )  # fmt: skip
