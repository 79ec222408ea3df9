"""Commands that look at state and change nothing: ls inspect get diff (verify: verifying.py)."""

from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from typing import Any, NamedTuple

import click

from statekit.assignment import show_groups
from statekit.checkpoint.parts import Unpublished, find_unpublished
from statekit.checkpoint.reader import Checkpoint, find_checkpoints, open_checkpoint
from statekit.cli.options import (
    EntryCommand,
    at_option,
    entry_text,
    json_option,
    limit_option,
    state_option,
)
from statekit.cli.output import (
    cut,
    plural,
    print_bars,
    print_json,
    print_line,
    print_table,
    progress,
    show_bytes,
    show_time,
    warn,
)
from statekit.cli.peers import Access, access_options
from statekit.cli.places import Place, expand_all, parse_place
from statekit.cli.sources import Source, describe_checkpoint, open_source
from statekit.errors import ArgumentError, CheckpointError, KeyTypeError, NoCheckpointError
from statekit.keys import key_codec
from statekit.offline.diff import Difference, StateDiff
from statekit.offline.diff import diff as diff_sources
from statekit.render import PlainCodec, key_json, key_text, parse_key, to_json
from statekit.schema import StateSchema, show

_BARS_MAX = 16  # of a chart; with more key-groups, a bar stands for several


# ---- ls


@click.command()
@click.argument("url")
@json_option
def ls(url: str, as_json: bool) -> None:
    """List the checkpoints of a directory and its workers.

    Also attempts that were not published: parts that kv.write_part() has written for a checkpoint
    that is not there (in JSON, "published" is false).

    \b
    Example:
      statekit ls /data/job
      statekit ls s3://bucket/job/worker-0 --json
    """
    places = expand_all(url)
    rows: list[dict[str, Any]] = []
    errors: list[CheckpointError] = []
    attempts: list[tuple[str, Unpublished]] = []
    for name, place in places:
        good, bad = _find(place)
        rows += [{"worker": name or None, "published": True, **_describe(one)} for one in good]
        errors += bad
        if place.at is None:
            attempts += [(name, one) for one in find_unpublished(place.storage)]
    if not rows and not errors and not attempts:
        raise NoCheckpointError(
            f"there is no checkpoint in {parse_place(url).storage.shown!r}. Check the URL; "
            "kv.checkpoint(url) makes one."
        )
    if as_json and (rows or attempts):
        print_json([*rows, *(_describe_attempt(name, one) for name, one in attempts)])
    elif rows:
        _print_checkpoints(rows, any(name for name, _ in places))
    for name, one in () if as_json else attempts:
        where = f"{name}: " if name else ""
        print_line(
            f"{where}not published: {plural(len(one.parts), 'part')} of checkpoint {one.number}, "
            f"key-groups {show_groups(one.key_groups)} of {one.key_group_count or 'unknown'}, "
            f"{show_bytes(one.bytes)}"
        )
    for error in errors:
        warn(str(error))
    if errors:
        raise SystemExit(1)


def _find(place: Place) -> tuple[list[Checkpoint], list[CheckpointError]]:
    """The checkpoints of a place, or the one that it names, and why others cannot be read."""
    if place.at is None:
        return find_checkpoints(place.storage)
    try:
        return [open_checkpoint(place.storage, place.at)], []
    except CheckpointError as error:
        return [], [error]


def _describe(checkpoint: Checkpoint) -> dict[str, Any]:
    return {**describe_checkpoint(checkpoint), "states": list(checkpoint.states)}


def _describe_attempt(worker: str, attempt: Unpublished) -> dict[str, Any]:
    return {
        "worker": worker or None,
        "published": False,
        "number": attempt.number,
        "key_groups": [[part.start, part.stop] for part in attempt.key_groups],
        "key_group_count": attempt.key_group_count or None,
        "bytes": attempt.bytes,
        "parts": [*attempt.parts],
        "attachments": [*attempt.attachments],
    }


def _print_checkpoints(rows: list[dict[str, Any]], has_workers: bool) -> None:
    titles = ["number", "time", "key-groups", "states", "size", "new", "base"]
    cells = [
        [
            str(row["number"]),
            show_time(datetime.fromisoformat(row["time"])),
            f"{_groups(row)} of {row['key_group_count']}",
            str(len(row["states"])),
            show_bytes(row["bytes"]),
            show_bytes(row["new_bytes"]),
            "-" if row["base"] is None else str(row["base"]),
        ]
        for row in rows
    ]
    if has_workers:
        titles.insert(0, "worker")
        for row, line in zip(rows, cells, strict=True):
            line.insert(0, row["worker"] or "-")
    print_table(titles, cells, ("l" if has_workers else "") + "rllrrrr")


def _groups(row: dict[str, Any]) -> str:
    return show_groups(range(start, stop) for start, stop in row["key_groups"])


# ---- inspect


class _Figures(NamedTuple):
    """What a pass over a checkpoint counts."""

    entries: Counter[str]  # by state
    bytes: Counter[str]  # of keys and values, by state
    groups: Counter[int]  # entries by key-group
    samples: dict[str, list[tuple[Any, Any]]]


@click.command()
@click.argument("url")
@at_option
@state_option
@click.option("--key", metavar="KEY", help="Show what is under this key, in every state.")
@limit_option(5, "Entries of each state to show.")
@click.option("--quick", is_flag=True, help="Read no entries: no counts.")
@access_options
@json_option
def inspect(
    url: str,
    at: int | None,
    state: str | None,
    key: str | None,
    limit: int,
    quick: bool,
    access: Access,
    as_json: bool,
) -> None:
    """Show schemas, sizes, skew and some entries.

    URL is a checkpoint, a directory with those of several workers, a home that nobody has open, or
    the address of a process that serves, which is shown as it is at one moment.

    \b
    Example:
      statekit inspect /data/ckpt
      statekit inspect /data/ckpt --at 7 --state visits --limit 20
      statekit inspect rocksdb:/var/state --key alice
    """
    with open_source(url, at, access) as source:
        chosen = list(source.states.values()) if state is None else [source.schema_of(state)]
        if key is not None:
            _show_key(source, chosen, key, as_json)
            return
        figures = None if quick else _count(source, chosen, limit)
        if as_json:
            print_json(_inspected(source, chosen, figures))
        else:
            _print_inspected(source, chosen, figures)


def _count(source: Source, chosen: list[StateSchema], limit: int) -> _Figures:
    figures = _Figures(Counter(), Counter(), Counter(), {schema.name: [] for schema in chosen})
    codecs = {schema.name: PlainCodec(schema) for schema in chosen}
    only = chosen[0].name if len(chosen) == 1 else None
    with progress("reading", source.size) as advance:
        for leaf in source.leaves():
            for name, rows in source.leaf_rows(leaf, only).items():
                if name not in codecs:
                    continue
                codec, samples = codecs[name], figures.samples[name]
                figures.entries[name] += len(rows)
                figures.groups[leaf // source.subgroups] += len(rows)
                for encoded, (value, _) in rows.items():
                    size = len(value) if isinstance(value, bytes) else 8
                    figures.bytes[name] += len(encoded) + size
                    if len(samples) < limit:
                        samples.append((codec.key.decode(encoded), codec.read(value)))
            advance(source.leaf_bytes(leaf))
    return figures


def _inspected(
    source: Source, chosen: list[StateSchema], figures: _Figures | None
) -> dict[str, Any]:
    states = []
    for schema in chosen:
        row: dict[str, Any] = schema._asdict()
        if figures is not None:
            row["entries"] = figures.entries[schema.name]
            row["bytes"] = figures.bytes[schema.name]
            row["sample"] = [
                {"key": key_json(key), "value": value}
                for key, value in figures.samples[schema.name]
            ]
        states.append(row)
    found = {**source.describe(), "states": states}
    if figures is not None:
        found["entries_by_key_group"] = {
            str(group): figures.groups[group] for part in source.key_groups for group in part
        }
    return found


def _print_inspected(source: Source, chosen: list[StateSchema], figures: _Figures | None) -> None:
    print_line(source.title)
    about = source.lines()
    width = max(len(title) for title, _ in about)
    for title, text in about:
        print_line(f"  {title.ljust(width)}  {text}")
    print_line()
    titles = ["state", "form", "type", "keys", "time to live"]
    rows = [
        [
            schema.name,
            schema.form,
            show(schema.type),
            key_codec(schema.key).python,
            f"in {schema.clock} time" if schema.clock else "-",
        ]
        for schema in chosen
    ]
    if figures is not None:
        titles += ["entries", "bytes"]
        for schema, row in zip(chosen, rows, strict=True):
            row += [f"{figures.entries[schema.name]:,}", show_bytes(figures.bytes[schema.name])]
    print_table(titles, rows, "lllllrr"[: len(titles)])
    if figures is not None:
        _print_skew(source, figures.groups)
        _print_samples(chosen, figures)


def _print_skew(source: Source, groups: Counter[int]) -> None:
    owned = [group for part in source.key_groups for group in part]
    total = sum(groups.values())
    if not owned or not total:
        return
    mean = total / len(owned)
    largest = max(owned, key=lambda group: groups[group])
    print_line()
    print_line(
        f"entries per key-group: {mean:,.1f} on average, most in {largest}: "
        f"{groups[largest]:,} ({groups[largest] / mean:.1f}x)"
    )
    size = -(-len(owned) // _BARS_MAX)
    bars = []
    for start in range(0, len(owned), size):
        part = owned[start : start + size]
        count = sum(groups[group] for group in part)
        label = str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}"
        bars.append((label, count / len(part), f"{count:,}"))
    print_bars(bars)


def _print_samples(chosen: list[StateSchema], figures: _Figures) -> None:
    for schema in chosen:
        samples = figures.samples[schema.name]
        if not samples:
            continue
        codec = key_codec(schema.key)
        print_line()
        print_line(f"{schema.name}: {len(samples)} of {figures.entries[schema.name]:,} entries")
        rows = [[cut(key_text(codec, key), 40), cut(to_json(value))] for key, value in samples]
        print_table(["key", "value"], rows)


def _show_key(source: Source, chosen: list[StateSchema], text: str, as_json: bool) -> None:
    found: dict[str, Any] = {}
    misfit: KeyTypeError | None = None
    for schema in chosen:
        try:
            key = parse_key(key_codec(schema.key), text)
        except KeyTypeError as error:  # states may have keys of different types
            misfit = error
            continue
        value = source.find(schema, key)
        if value is not None:
            found[schema.name] = value[0]
    if misfit is not None and len(chosen) == 1:
        raise misfit
    if as_json:
        print_json({"key": text, "states": found})
    elif found:
        print_table(["state", "value"], [[name, to_json(value)] for name, value in found.items()])
    else:
        raise ArgumentError(
            f"no state of {source.name} has the key {text!r}. "
            "Check the key; `inspect` without --key shows some."
        )


# ---- get


@click.command(cls=EntryCommand)
@click.argument("url")
@click.argument("state")
@click.argument("key", type=entry_text)
@at_option
@access_options
@json_option
def get(url: str, state: str, key: str, at: int | None, access: Access, as_json: bool) -> None:
    """Print the value under one key, as JSON.

    Exit code 1 if there is none. Keys: text as it is, 7 for an int, 0x6162 for bytes, '["alice",
    7]' for a tuple. Entries with a time to live are shown even if they have expired. URL is as
    for `inspect`.

    \b
    Example:
      statekit get /data/ckpt visits alice
      statekit get /data/ckpt@7 seats '["row a", 7]'
      statekit get 127.0.0.1:7000 visits alice
    """
    with open_source(url, at, access) as source:
        schema = source.schema_of(state)
        parsed = parse_key(key_codec(schema.key), key)
        found = source.find(schema, parsed)
        if found is None:
            raise ArgumentError(
                f"there is nothing under {key!r} in state {state!r} of {source.name}. "
                f"Check the key; `inspect --state {state}` shows some."
            )
    if as_json:
        print_json({"state": state, "key": key_json(parsed), "value": found[0]})
    else:
        print_line(to_json(found[0]))


# ---- diff


@click.command()
@click.argument("a")
@click.argument("b")
@limit_option(10, "Differences of each state to show.")
@access_options
@json_option
def diff(a: str, b: str, limit: int, access: Access, as_json: bool) -> None:
    """Show what differs between two checkpoints, homes or processes.

    Exit code 0 if nothing does, 1 if something does, 2 if that cannot be said. In the counts,
    "touched" are entries whose value is the same and whose time to live starts at another time.
    A and B are as URL of `inspect`.

    \b
    Example:
      statekit diff /data/ckpt@6 /data/ckpt@7
      statekit diff /data/before /data/after --json
    """
    with open_source(a, None, access) as before, open_source(b, None, access) as after:
        sizes = [one.size for one in (before, after) if one.size is not None]
        with progress("comparing", sum(sizes) if len(sizes) == 2 else None) as advance:
            found = diff_sources(before, after, limit=limit, on_bytes=advance)
    if as_json:
        print_json([_diff_json(state) for state in found])
    else:
        _print_diff(found)
    if not all(state.is_same for state in found):
        raise SystemExit(1)


def _diff_json(state: StateDiff) -> dict[str, Any]:
    return {
        "state": state.name,
        "before": None if state.before is None else str(state.before),
        "after": None if state.after is None else str(state.after),
        "added": state.added,
        "removed": state.removed,
        "changed": state.changed,
        "touched": state.touched,
        "first": [
            {"kind": one.kind, "key": key_json(key), "before": was, "after": now}
            for one, key, was, now in _plain_differences(state)
        ],
    }


def _plain_differences(state: StateDiff) -> Iterator[tuple[Difference, Any, Any, Any]]:
    schemas = {"before": state.before, "after": state.after}
    codecs = {side: PlainCodec(schema) for side, schema in schemas.items() if schema is not None}
    for one in state.first:
        key = codecs["after" if one.kind == "added" else "before"].key.decode(one.key)
        was = None if one.kind == "added" else codecs["before"].read(one.before)
        now = None if one.kind == "removed" else codecs["after"].read(one.after)
        yield one, key, was, now


def _print_diff(found: list[StateDiff]) -> None:
    different = [state for state in found if not state.is_same]
    if not different:
        print_line("no differences")
        return
    titles = ["state", "added", "removed", "changed", "touched"]
    counts = [
        [one.name, *(f"{n:,}" for n in (one.added, one.removed, one.changed, one.touched))]
        for one in different
    ]
    print_table(titles, counts, "lrrrr")
    for state in different:
        print_line()
        if state.before != state.after:
            print_line(f"{state.name}: was {state.before or 'not there'}")
            print_line(f"{' ' * len(state.name)}  now {state.after or 'not there'}")
        for one, key, was, now in _plain_differences(state):
            text = cut(f"{state.name}[{to_json(key_json(key))}]", 60)
            if one.kind == "added":
                print_line(f"+ {text} = {cut(to_json(now))}")
            elif one.kind == "removed":
                print_line(f"- {text} = {cut(to_json(was))}")
            elif one.kind == "changed":
                print_line(f"~ {text}: {cut(to_json(was))} -> {cut(to_json(now))}")
            else:
                print_line(f"t {text} = {cut(to_json(now))}")
        hidden = state.added + state.removed + state.changed + state.touched - len(state.first)
        if hidden:
            print_line(f"  and {hidden:,} more in {state.name}; --limit shows more")
