"""The command line: `statekit ls URL` and its like. `statekit --help` lists them.

app.py        the program: its commands, what errors look like, exit codes, shell completion
places.py     what a URL on the command line stands for: URL@7, worker-0 ...
sources.py    checkpoints, homes and processes, to be looked at alike
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

import sys


def main() -> None:
    """The entry point of the program `statekit`."""
    try:
        from statekit.cli.app import app
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
