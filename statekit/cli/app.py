"""The program: its commands in groups, what errors look like, exit codes, shell completion.

    0   done; `diff`: no difference
    1   it could not be done, and stderr says why; `diff`: there are differences
    2   it was not asked for rightly; `diff`: trouble
    3   `verify`: something is damaged

Errors of statekit and of the operating system are one message on stderr, never a traceback.
"""

from collections.abc import Callable
from typing import Any

import click
import rich  # noqa: F401  (so that its absence is told at once, whatever the output)
from click.shell_completion import get_completion_class

import statekit
from statekit.cli import bench, changing, looking, moving, serving, verifying
from statekit.errors import StateKitError

_SECTIONS: dict[str, list[click.Command]] = {
    "Looking": [looking.ls, looking.inspect, looking.get, verifying.verify, looking.diff],
    "Moving": [moving.export, moving.import_, moving.checkpoint, moving.restore],
    "Handing over": [serving.serve, serving.fetch],
    "Changing": [
        changing.edit,
        changing.rescale,
        changing.merge,
        changing.regroup,
        changing.compact,
        changing.gc,
    ],
}
_TROUBLE = {"diff": 2}  # by command; else 1


class App(click.Group):
    """Commands by what they are for, and errors as messages."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        listed: set[str] = set()
        for title, commands in sections().items():
            rows = [(command.name or "", command.get_short_help_str(70)) for command in commands]
            listed.update(name for name, _ in rows)
            with formatter.section(title):
                formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # whoever reads has had enough: click ends quietly
        except (StateKitError, OSError) as error:
            notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
            click.echo(f"statekit: {_message(error)}{notes}", err=True)
        except ImportError as error:
            if error.name is None or error.name.partition(".")[0] not in _EXTRAS:
                raise
            package = error.name.partition(".")[0]
            click.echo(
                f"statekit: this needs the package {package!r}. "
                f"Install it with: pip install 'statekit[{_EXTRAS[package]}]'",
                err=True,
            )
        return ctx.exit(_TROUBLE.get(ctx.invoked_subcommand or "", 1))


_EXTRAS = {
    "pyarrow": "arrow", "numpy": "arrow", "fsspec": "storage", "s3fs": "s3", "redis": "redis",
    "rocksdict": "rocksdb", "lz4": "compression", "zstandard": "compression",
    "grpc": "remote", "google": "remote",
}  # fmt: skip


def _message(error: Exception) -> str:
    if isinstance(error, StateKitError) or not isinstance(error, OSError):
        return str(error)
    name = f"{error.filename!r}: " if error.filename else ""
    return f"{name}{error.strerror or error}. Check the path and your rights to it."


@click.group(
    cls=App,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="A URL is a directory, or anything that fsspec knows: s3://bucket/path. URL@7 is "
    "checkpoint 7 of it; without a number it is the newest.",
)
@click.version_option(statekit.__version__, prog_name="statekit", message="%(prog)s %(version)s")
def app() -> None:
    """Look at the checkpoints of statekit, move them, change them."""


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes what you type.

    \b
    Example:
      statekit completion bash > ~/.local/share/bash-completion/completions/statekit
    """
    script = get_completion_class(shell)
    assert script is not None
    # Not source(): for bash it would look for the version of the one that is installed here.
    made = script(app, {}, "statekit", "_STATEKIT_COMPLETE")
    click.echo(made.source_template % made.source_vars())


def sections() -> dict[str, list[click.Command]]:
    """All commands, as the help and the reference show them."""
    return {**_SECTIONS, "Else": [bench.bench, completion]}


def _add(add: Callable[[click.Command], None]) -> None:
    for commands in sections().values():
        for command in commands:
            add(command)


_add(app.add_command)
