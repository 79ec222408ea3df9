"""The command line: `statekit ls URL` and its like. `statekit --help` lists them.

app.py        the program: its commands, what errors look like, exit codes, shell completion
places.py     what a URL on the command line stands for: URL@7, worker-0 ...
sources.py    checkpoints, homes and processes, all read in the same way
targets.py    where files are: a directory, a URL of fsspec, stdout
peers.py      how other processes are reached: token, TLS, patience
output.py     tables, bars, sizes, progress: for people, for pipes, and as JSON
looking.py    ls inspect get diff
verifying.py  verify
moving.py     export import checkpoint restore
serving.py    serve fetch: between live processes
changing.py   edit rescale merge regroup compact gc
files.py      Parquet, Arrow, JSON lines and CSV: a state as a file and back
typetext.py   types written on a command line: "dict[str, list[int]]"
bench.py      how fast each type of state is here
"""

import os
import signal
import sys
from typing import NoReturn


def main() -> None:
    """The entry point of the program `statekit`."""
    _prepare()
    try:
        from statekit.cli.app import app
    except KeyboardInterrupt:
        print("statekit: interrupted", file=sys.stderr)
        sys.exit(130)
    except ImportError as error:
        if error.name not in ("click", "rich"):
            raise
        print(
            f"statekit: the command line needs the package {error.name!r}. "
            "Install it with: pip install 'statekit[cli]'",
            file=sys.stderr,
        )
        sys.exit(1)
    app(prog_name="statekit")


def _prepare() -> None:
    """Sets up this process, which belongs to the command alone."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # we report errors ourselves
    signal.signal(signal.SIGTERM, _end)
    if sys.stderr is None:
        # Its descriptor is free, and must not become that of a file that we write: libraries
        # written in C print their complaints to this descriptor.
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        print("statekit: stdout is closed. Give it a file, or /dev/null.", file=sys.stderr)
        sys.exit(1)
    if not sys.stdout.isatty():
        # In UTF-8, the encoding of JSON. And with a buffer, which PYTHONUNBUFFERED takes away:
        # without one, if a write wrote only a part (the disk is full, the reader has gone), Python
        # believes that all was written.
        sys.stdout = open(sys.stdout.fileno(), "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def _end(number: int, _: object) -> NoReturn:
    """Handles SIGTERM: raises, so that unfinished work is cleared away, as with Ctrl-C."""
    raise SystemExit(128 + number)
