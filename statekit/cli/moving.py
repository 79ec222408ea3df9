"""Commands that move state between checkpoints, files and homes: export import checkpoint ..."""

import os
import re
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import click

import statekit
from statekit.checkpoint.reader import Checkpoint
from statekit.cli import files
from statekit.cli.options import at_option, json_option, missing_option, state_option
from statekit.cli.output import (
    plural,
    print_json,
    print_line,
    print_table,
    progress,
    show_bytes,
    warn,
)
from statekit.cli.peers import Access, access_options
from statekit.cli.places import expand, parse_directory
from statekit.cli.sources import Source, open_source
from statekit.cli.targets import Target, local_copy, open_target
from statekit.cli.typetext import form_of, parse_type
from statekit.errors import ArgumentError, StateKitError
from statekit.homes import HomeUrl
from statekit.keys import key_codec
from statekit.native import Store
from statekit.offline.build import build
from statekit.offline.copying import check_empty
from statekit.offline.fold import declare_timed
from statekit.offline.regroup import check_key_groups
from statekit.render import PlainCodec
from statekit.schema import StateSchema
from statekit.storage import Storage

_KEY_GROUPS, _LEAVES = 128, 2048
_ROWS_SHOWN = 4096  # between two steps of a progress bar
_GROUPS = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_KEY_TYPES = {"str": "s", "int": "i", "bytes": "b"}


# ---- export


@click.command()
@click.argument("url")
@click.option("--to", required=True, type=click.Choice(list(files.SUFFIXES)), help="The format.")
@click.option(
    "--out",
    required=True,
    metavar="PLACE",
    help="A directory or any URL of fsspec; with --state the file itself, or - for stdout.",
)
@state_option
@at_option
@access_options
@json_option
def export(
    url: str,
    to: str,
    out: str,
    state: str | None,
    at: int | None,
    access: Access,
    as_json: bool,
) -> None:
    """Write states as Parquet, Arrow, CSV or JSON lines.

    One file for each state. Columns: key (key_0, key_1 ... of a tuple), value, and stamp if the
    state has a time to live. What the state is goes with it, so `import` needs no options (but not
    to stdout, unless in Parquet and Arrow). In Parquet and Arrow the columns have the types of
    docs/arrow.md, but decimals and timedeltas are text, and so is every type of which a value does
    not fit its column. URL is as for `inspect`.

    \b
    Example:
      statekit export /data/ckpt --to parquet --out s3://bucket/tables
      statekit export /data/ckpt --to csv --state visits --out visits.csv
      statekit export 127.0.0.1:7000 --to jsonl --state visits --out - | head
    """
    if out == "-" and as_json:
        raise click.UsageError("--out - has stdout for the state. Leave --json out.")
    target, name = open_target(out, files.SUFFIXES[to], is_one=state is not None)
    with open_source(url, at, access) as source:
        chosen = list(source.states.values()) if state is None else [source.schema_of(state)]
        if not chosen:
            raise ArgumentError(f"{source.name} has no states.")
        names = [name or files.file_name(schema.name, to) for schema in chosen]
        for file in names:
            if target.exists(file):  # before any is written
                raise ArgumentError(
                    f"{target.shown(file)!r} is there already. Remove it, or name another --out."
                )
        try:
            done = [
                _export(source, schema, to, target, file)
                for schema, file in zip(chosen, names, strict=True)
            ]
        except BaseException:
            with suppress(StateKitError, OSError):  # the first error is the one to report
                target.discard()
            raise
    if as_json:
        print_json(done)
    elif out != "-":
        rows = [
            [row["state"], row["file"], f"{row['entries']:,}", show_bytes(row["bytes"])]
            for row in done
        ]
        print_table(["state", "file", "entries", "size"], rows, "llrr")


def _export(
    source: Source, schema: StateSchema, to: str, target: Target, name: str
) -> dict[str, Any]:
    entries = 0

    def make(file: Path) -> list[Path]:
        nonlocal entries
        with progress(schema.name, source.size) as advance:
            entries, made = files.write_state(source, schema, to, file, advance)
        return made

    size = target.write(name, make)
    return {"state": schema.name, "file": target.shown(name), "entries": entries, "bytes": size}


# ---- import


@click.command("import")
@click.argument("names", nargs=-1, required=True, metavar="FILE...")
@click.option("--into", required=True, metavar="URL", help="A directory that is new.")
@click.option("--state", metavar="NAME", help="What the state will be called.")
@click.option(
    "--key", "keys", multiple=True, metavar="COLUMN", help="Column of the keys; several for tuples."
)
@click.option(
    "--value", metavar="COLUMN", help="Column of the values; without it, a record of the others."
)
@click.option(
    "--type", "type_", metavar="TYPE", help='Of a value: int, "list[str]", "{name: str, age: int}".'
)
@click.option(
    "--form",
    type=click.Choice(["value", "list", "map", "set"]),
    help="How it is kept; as the type suggests unless told.",
)
@click.option(
    "--key-type", metavar="TYPE", help="str, int, bytes or tuple[str, int]; as the file suggests."
)
@click.option("--key-groups", type=int, metavar="G", help="A power of 2; 128 unless told.")
@json_option
def import_(
    names: tuple[str, ...],
    into: str,
    state: str | None,
    keys: tuple[str, ...],
    value: str | None,
    type_: str | None,
    form: str | None,
    key_type: str | None,
    key_groups: int | None,
    as_json: bool,
) -> None:
    """Make a checkpoint of Parquet, Arrow, CSV or .jsonl files.

    Files that `export` wrote need no options but --into. For others say which column is the key
    and what the values are. Where a key is there twice, the later row counts. The state is built
    in memory. FILE is a path, or a URL that fsspec knows.

    \b
    Example:
      statekit import /tmp/tables/*.parquet --into /data/new
      statekit import users.csv --into /data/new --state users --key id --key-type int \\
          --type '{name: str, age: int | None}'
    """
    given = {"--state": state, "--key": keys, "--value": value, "--type": type_, "--form": form}
    given["--key-type"] = key_type
    target = parse_directory(into)
    check_empty(target)
    with ExitStack() as copies:
        paths = [copies.enter_context(local_copy(name, files.SIDECAR)) for name in names]
        sources = [_Source.of(path, given) for path in paths]
        made, counts = _build(sources, _geometry(sources, key_groups), target)
    if as_json:
        print_json({"url": made.url, "number": made.number, "rows": counts, "bytes": made.bytes})
    else:
        print_table(["state", "rows"], [[name, f"{n:,}"] for name, n in counts.items()], "lr")
        print_line(f"written: checkpoint {made.number} of {made.url}, {show_bytes(made.bytes)}")


def _build(
    sources: "list[_Source]", geometry: tuple[int, int], target: Storage
) -> tuple[Checkpoint, dict[str, int]]:
    """A checkpoint of what files hold, and how many rows each state had."""
    store = Store(*geometry)
    store.mark(0, store.leaves, "absent")  # so that entries can be installed with their stamps
    schemas: dict[str, StateSchema] = {}
    counts: dict[str, int] = {}
    for source in sources:
        schema = source.schema
        if schemas.setdefault(schema.name, schema) != schema:
            raise ArgumentError(
                f"{str(source.file)!r} has state {schema.name!r} as {schema}, another file as "
                f"{schemas[schema.name]}. Import files of one export together."
            )
        counts[schema.name] = counts.get(schema.name, 0) + _load(store, source)
    store.mark(0, store.leaves, "whole")
    marks = [source.watermark for source in sources]
    made = build(
        store,
        target,
        list(schemas.values()),
        watermark=None if None in marks else min(mark for mark in marks if mark is not None),
    )
    return made, counts


class _Source:
    """A file, and what its rows are."""

    def __init__(self, file: Path, schema: StateSchema, columns: files.Columns) -> None:
        self.file = file
        self.schema = schema
        self.columns = columns
        self.meta: files.FileMeta | None = None

    @property
    def watermark(self) -> int | None:
        return None if self.meta is None else self.meta.watermark

    @classmethod
    def of(cls, file: Path, given: dict[str, Any]) -> "_Source":
        meta = files.read_meta(file)
        if meta is None:
            return cls._of_options(file, given)
        others = [name for name, value in given.items() if value and name != "--state"]
        if others:
            raise ArgumentError(
                f"{str(file)!r} says itself what it holds: {meta.schema}. Leave {others[0]} out."
            )
        schema = meta.schema
        if given["--state"]:
            schema = schema._replace(name=given["--state"])
        source = cls(file, schema, _exported_columns(schema, files.format_of(file)))
        source.meta = meta
        return source

    @classmethod
    def _of_options(cls, file: Path, given: dict[str, Any]) -> "_Source":
        missing = [name for name in ("--state", "--key", "--type") if not given[name]]
        if missing:
            raise ArgumentError(
                f"{str(file)!r} was not written by `statekit export`, so say what it holds: "
                f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing."
            )
        kind = parse_type(given["--type"])
        form = given["--form"] or form_of(kind)
        if form != "value" and form_of(kind) != form:
            raise ArgumentError(
                f"--form {form} does not go with --type {given['--type']}, which is the type of "
                f"all that is under a key. Write {_EXAMPLES[form]}."
            )
        keys = given["--key"]
        key = _key_letters(given["--key-type"]) or files.infer_key_type(file, keys)
        codec = key_codec(key)
        if len(keys) > 1 and len(codec.parts) != len(keys):
            raise ArgumentError(
                f"{len(keys)} columns make no key of type {codec.python}. "
                "Give one --key for each part."
            )
        value = given["--value"]
        is_record = isinstance(kind, list) and kind[0] == "record"
        if value is None and not is_record:
            value = "value"
        schema = StateSchema(given["--state"], form, codec.text, kind)
        PlainCodec(schema)  # raises if the type is not valid
        return cls(file, schema, files.Columns(tuple(keys), value, None))


_EXAMPLES = {"list": "list[...]", "map": "dict[..., ...]", "set": "set[...]"}


def _exported_columns(schema: StateSchema, to: str) -> files.Columns:
    codec = key_codec(schema.key)
    keys = ["key"]
    if codec.is_tuple and to != "jsonl":
        keys = [f"key_{at}" for at in range(len(codec.parts))]
    return files.Columns(tuple(keys), "value", "stamp" if schema.timed else None)


def _key_letters(text: str | None) -> str | None:
    if text is None:
        return None
    kind = parse_type(text)
    if isinstance(kind, list) and kind[0] == "tuple":
        parts = [_KEY_TYPES.get(str(part), "?") for part in kind[1:]]
        return f"({''.join(parts)})"
    return _KEY_TYPES.get(str(kind), text)


def _geometry(sources: list[_Source], key_groups: int | None) -> tuple[int, int]:
    metas = [source.meta for source in sources if source.meta is not None]
    found = {(meta.key_groups, meta.subgroups) for meta in metas}
    groups, subgroups = found.pop() if len(found) == 1 else (_KEY_GROUPS, _LEAVES // _KEY_GROUPS)
    if key_groups is None:
        return groups, subgroups
    check_key_groups(key_groups)
    return key_groups, max(1, groups * subgroups // max(key_groups, 1))


def _load(store: Store, source: _Source) -> int:
    schema = source.schema
    raw = declare_timed(store, schema)
    rows = files.read_rows(source.file, schema, source.columns, is_ours=source.meta is not None)
    count = 0
    timed: dict[Any, tuple[bytes, int | None]] = {}
    with progress(source.file.name, None, in_bytes=False) as advance:
        for key, encoded, stamp in rows:
            count += 1
            if count % _ROWS_SHOWN == 0:
                advance(_ROWS_SHOWN)
            if schema.timed:
                timed[key] = (encoded, stamp)  # of two rows with the same key the later one counts
                continue
            try:
                raw.put_encoded(key, encoded)
            except StateKitError as error:
                raise ArgumentError(f"{str(source.file)!r}, row {count}: {error}") from None
        for key, (encoded, stamp) in timed.items():
            raw.install(key, encoded, stamp)
    return count


# ---- checkpoint and restore


@click.command()
@click.argument("home")
@click.option("--to", required=True, metavar="URL", help="The directory of checkpoints.")
@click.option("--compression", type=click.Choice(["zstd", "lz4"]), help="None unless told.")
@json_option
def checkpoint(home: str, to: str, compression: str | None, as_json: bool) -> None:
    """Take a checkpoint of a rocksdb: or redis: home.

    No other process may write to the home meanwhile.

    \b
    Example:
      statekit checkpoint rocksdb:/var/state --to s3://bucket/ckpt
    """
    check_home(home)
    target = parse_directory(to)
    with statekit.open(home) as kv:
        if not kv.schemas:
            raise ArgumentError(f"{kv.url!r} holds no states. Check the URL.")
        positions = kv.positions
        if len(positions) > 1:
            warn(
                "key-groups were committed at different positions: the checkpoint has none of them"
            )
        job = kv._checkpointer.start(
            target.url,
            compression=compression,
            metadata=positions[0][1] if len(positions) == 1 else None,
            gives_way=False,
        )
        try:
            made = job.wait()
        except BaseException:  # Ctrl-C: closing would wait for the checkpoint
            job.cancel()
            raise
    if as_json:
        print_json({"url": made.url, "number": made.number, "bytes": made.bytes})
    else:
        print_line(f"written: checkpoint {made.number} of {made.url}, {show_bytes(made.bytes)}")


def check_home(home: str) -> None:
    parsed = HomeUrl.parse(home)
    if parsed.scheme == "memory":
        raise ArgumentError('"memory:" is the memory of this command, which has nothing in it.')
    if parsed.scheme == "rocksdb":  # opening a home that does not exist would make it
        if not os.path.isdir(parsed.place):
            raise ArgumentError(f"there is no directory {parsed.place!r}. Check the URL.")
        if not os.path.lexists(os.path.join(parsed.place, "CURRENT")):
            raise ArgumentError(f"{parsed.place!r} is no RocksDB home. Check the URL.")


@click.command()
@click.argument("urls", nargs=-1, required=True, metavar="URL...")
@click.option(
    "--into",
    required=True,
    metavar="HOME",
    help="rocksdb:/path or redis://host/0, which has none of these key-groups (or --replace).",
)
@click.option(
    "--key-groups", metavar="RANGE", help="Only these, such as 0-63; all that URL has unless told."
)
@click.option("--replace", is_flag=True, help="First delete all that HOME has of these key-groups.")
@missing_option
@json_option
def restore(
    urls: tuple[str, ...],
    into: str,
    key_groups: str | None,
    replace: bool,
    missing_ok: bool,
    as_json: bool,
) -> None:
    """Put the state of checkpoints into a home.

    \b
    Example:
      statekit restore /data/ckpt@7 --into rocksdb:/var/state
      statekit restore /data/worker-0 /data/worker-1 --into redis://localhost/0
    """
    places = expand(urls)
    if len({place.at for place in places}) > 1:
        raise ArgumentError(
            f"{', '.join(urls)} are checkpoints of different numbers. Restore those of one number, "
            "or merge them into a new directory first."
        )
    if HomeUrl.parse(into).scheme == "memory":
        raise ArgumentError('"memory:" is gone when this command ends. Name a home that stays.')
    groups = None if key_groups is None else parse_groups(key_groups)
    sources = [place.storage.url for place in places]
    kv = statekit.restore(
        sources,
        key_groups=groups,
        lazy=False,
        at=places[0].at,
        home=into,
        missing="ok" if missing_ok else "error",
        replace=replace,
    )
    with kv:
        found = {"home": kv.url, "states": list(kv.schemas)}
    if as_json:
        print_json(found)
    else:
        print_line(f"restored {plural(len(found['states']), 'state')} into {found['home']}")


def parse_groups(text: str) -> list[range]:
    found = []
    for part in text.split(","):
        match = _GROUPS.fullmatch(part.strip())
        start, stop = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if start > stop:
            raise ArgumentError(
                f"{text!r} are no key-groups: {part!r} is no range. Write 0-63, or 0-15,32,40-47."
            )
        found.append(range(start, stop + 1))
    return found
