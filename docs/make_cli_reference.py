"""Writes docs/cli.md from the commands themselves: `python docs/make_cli_reference.py`.

tests/test_cli.py sees to it that the page is what this makes.
"""

import inspect
import textwrap
from pathlib import Path

import click

from statekit.cli.app import sections

PAGE = Path(__file__).parent / "cli.md"

INTRODUCTION = """\
# The command line

`pip install 'statekit[cli]'` brings the program `statekit` (also `python -m statekit`). It looks at
checkpoints, homes and running processes, moves state between them, and makes new checkpoints of old
ones. `docs/make_cli_reference.py` makes this page from the program; `statekit COMMAND --help` says
the same.

```
$ statekit ls /data/job
worker    number  time                 key-groups     states       size        new  base
worker-0       1  2026-11-16 17:38:14  0-63 of 128         7  315.7 KiB  315.8 KiB     -
worker-1       1  2026-11-16 17:38:14  64-127 of 128       7  316.1 KiB  316.2 KiB     -
$ statekit get /data/job clicks alice
[{"url": "/home", "ms": 12}]
$ statekit rescale /data/job --workers 3 --out /data/job-3
```

## What a URL is

| you write | it is |
|---|---|
| `/data/ckpt` | a directory of checkpoints: the newest one |
| `/data/ckpt@7` | checkpoint 7 of it; commands about a whole directory refuse the number |
| `s3://bucket/path` | the same on any storage that fsspec knows (`pip install 'statekit[s3]'`) |
| `/data/job` | a directory with `worker-0`, `worker-1` ... in it: the newest checkpoint of each |
| `rocksdb:/path`, `redis://host/0` | a home that no process has open |
| `127.0.0.1:7000`, `unix:/path` | a process that serves: `statekit serve` prints such an address |

`get`, `inspect`, `export` and `diff` look at all of these; `edit` changes checkpoints, also those
of several workers. Looking changes nothing. A RocksDB home is opened in a private copy, and refused
if it is open elsewhere. A Redis home is read as it is: nobody should write to it meanwhile. What is
shown of a running process is its state at one moment; the process goes on working.

`edit`, `compact` and `regroup` write a new checkpoint, which is then the newest. If it is made
from an older one (`URL@7`), it overrides what came after that one, so they ask for `--force`.

## How keys and values are written

Checkpoints say what type each state has, so your classes are not needed.

| key type | on the command line | in JSON |
|---|---|---|
| `str` | `alice` | `"alice"` |
| `int` | `7` | `7` |
| `bytes` | `0x6162`, hex digits | `"0x6162"` |
| `tuple[str, int]` | `'["alice", 7]'` | `["alice", 7]` |

| type of a value | in JSON |
|---|---|
| `int`, `bool`, `str`, `None` | as it is |
| `float` | as it is; `"NaN"`, `"Infinity"`, `"-Infinity"` |
| `bytes` | `"0x6162"`, hex digits |
| `datetime`, `date`, `time`, `timedelta` | ISO 8601: `"2026-11-16T12:00:00+00:00"`, `"PT1.5S"` |
| `UUID`, `Decimal` | text |
| list, tuple | array |
| set | array, sorted |
| dict | object; keys that are not text are written as on the command line |
| dataclass, TypedDict | object |
| NamedTuple | object, or an array by position |
| enum, `Literal` | its value |
| timers | array of due times |
| `Any` | as JSON, with markers for what JSON does not have: see below |

In an `Any`, `{"$bytes": "0x6162"}`, `{"$datetime": "2026-11-16T12:00:00+00:00"}`,
`{"$float": "NaN"}` and `{"$ext": [code, "0x..."]}` stand for the types that they name, and
`{"$map": [[key, value], ...]}` is a map whose keys are not all text.

Entries with a time to live stay in checkpoints until they are removed, so some entries that are
shown may have expired. How long entries live is not stored: the program says so when it declares
the state.

## In scripts

Results go to stdout, everything else to stderr. On a terminal there are tables and progress
bars; in a pipe, plain columns. `--json` gives one JSON document.

| exit code | |
|---|---|
| 0 | done; `diff`: no difference |
| 1 | the command failed, and stderr says why; `diff`: there are differences |
| 2 | the command line was wrong; `diff`: the command failed |
| 3 | `verify`: something is damaged |
| 130, 143 | the command was interrupted by Ctrl-C, or told to end (SIGTERM) |
| 141 | the reader of stdout has gone, as in `statekit ls … \\| head -1` |
"""


def page() -> str:
    parts = [INTRODUCTION]
    for title, commands in sections().items():
        parts.append(f"## {title}\n")
        parts.extend(map(describe, commands))
    return "\n".join(parts)


def describe(command: click.Command) -> str:
    """A command's section. Not click's own text: that is another in every version of click."""
    arguments = [
        param.metavar or (f"[{param.name}]" if not param.required else param.name or "").upper()
        for param in command.params
        if isinstance(param, click.Argument)
    ]
    text, _, example = inspect.cleandoc(command.help or "").partition("\b\n")
    lines = example.removeprefix("Example:\n")
    return "\n".join(
        [
            f"### statekit {command.name} {' '.join(arguments)}\n",
            f"{text.strip()}\n",
            f"```\n{textwrap.dedent(lines).rstrip()}\n```\n",
            "| option | |",
            "|---|---|",
            *(option_row(param) for param in command.params if isinstance(param, click.Option)),
            "",
        ]
    )


def option_row(option: click.Option) -> str:
    value = option.metavar or ""
    if isinstance(option.type, click.Choice):
        value = " or ".join(option.type.choices)
    notes = ["required"] if option.required else []
    if option.show_default:
        notes.append(f"{option.default} unless told")
    note = f" ({'; '.join(notes)})" if notes else ""
    return f"| `{' '.join([option.opts[0], value]).strip()}` | {option.help}{note} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
