"""The program: its commands in groups, what errors look like, exit codes, shell completion.

      0   done; `diff`: no difference
      1   it could not be done, and stderr says why; `diff`: there are differences
      2   the command line was wrong; `diff`: trouble
      3   `verify`: something is damaged
    130   interrupted (Ctrl-C)
    141   the reader of stdout has gone: `statekit ls ... | head -1`

Errors of statekit and of the operating system are one message on stderr, never a traceback.
"""

import errno
import sys
from collections.abc import Callable
from typing import Any

import click
import rich  # noqa: F401  (so that its absence is told at once, whatever the output)
from click.shell_completion import get_completion_class

import statekit
from statekit.cli import bench, changing, engine, experiment, looking, moving, serving, verifying
from statekit.cli.output import cannot_print, let_go_of_stdout, print_line, warn
from statekit.errors import StateKitError

_SECTIONS: dict[str, list[click.Command]] = {
    "Looking": [looking.ls, looking.inspect, looking.get, verifying.verify, looking.diff],
    "Moving": [moving.export, moving.import_, moving.checkpoint, moving.restore],
    "Handing over": [serving.serve, serving.fetch],
    "The demo engine": [
        engine.run,
        engine.plan,
        engine.scale,
        experiment.experiment,
        experiment.workgen,
        engine.drain,
        engine.move,
        engine.rescales,
        engine.worker,
        engine.abort_rescale,
    ],
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
_EXIT_INTERRUPTED, _EXIT_READER_GONE = 130, 141  # as if SIGINT or SIGPIPE had ended the process


class App(click.Group):
    """Commands by what they are for, and errors as messages."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        listed: set[str] = set()
        for title, commands in sections().items():
            rows = [(command.name or "", command.get_short_help_str(70)) for command in commands]
            listed.update(name for name, _ in rows)
            with formatter.section(title):
                formatter.write_dl(rows)

    def main(self, *args: Any, **options: Any) -> Any:
        try:
            return super().main(*args, **options)
        except OSError as error:  # from printing a help text, before there is a command
            warn(str(cannot_print(error)))
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            let_go_of_stdout()
            return ctx.exit(_EXIT_READER_GONE)
        except (KeyboardInterrupt, click.Abort):
            warn("interrupted")
            return ctx.exit(_EXIT_INTERRUPTED)
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


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _message(error: Exception) -> str:
    if isinstance(error, StateKitError) or not isinstance(error, OSError):
        return str(error)
    name = f"{error.filename!r}: " if error.filename else ""
    advice = "Check the path and your rights to it."
    if error.errno in _FULL:
        advice = "Free some space, or use another place."
    return f"{name}{error.strerror or error}. {advice}"


@click.group(
    cls=App,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="A URL is a directory of checkpoints, or anything that fsspec knows: s3://bucket/path. "
    "URL@7 is checkpoint 7 of it; without a number it is the newest. Some commands also take homes "
    "(rocksdb:/path) and processes that serve (127.0.0.1:7000).",
)
@click.version_option(statekit.__version__, prog_name="statekit", message="%(prog)s %(version)s")
def app() -> None:
    """Look at the state that statekit keeps, move it, change it."""


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
    # source() is not used: for bash it would look for the version that is installed here.
    made = script(app, {}, "statekit", "_STATEKIT_COMPLETE")
    print_line(made.source_template % made.source_vars())


def sections() -> dict[str, list[click.Command]]:
    """All commands, as the help and the reference show them."""
    return {**_SECTIONS, "Else": [bench.bench, completion]}


def _add(add: Callable[[click.Command], None]) -> None:
    for commands in sections().values():
        for command in commands:
            add(command)


_add(app.add_command)
