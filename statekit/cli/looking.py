"""Commands that look at checkpoints and change nothing: ls inspect get verify diff."""

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

import click

from statekit.assignment import show_groups
from statekit.checkpoint.diff import Difference, StateDiff
from statekit.checkpoint.diff import diff as diff_checkpoints
from statekit.checkpoint.manifest import PackRef, Segment
from statekit.checkpoint.pack import verify_pack
from statekit.checkpoint.reader import Checkpoint, find_checkpoints
from statekit.checkpoint.storage import Storage, is_temporary
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
from statekit.cli.places import has_checkpoints, open_one, parse_place, worker_names
from statekit.errors import ArgumentError, CheckpointError, KeyTypeError, NoCheckpointError
from statekit.keys import encode_key, key_codec
from statekit.plain import PlainCodec, key_json, key_text, parse_key, to_json
from statekit.schema import StateSchema, show

_BARS_MAX = 16  # of a chart; key-groups beyond that are put together
_EXIT_DAMAGED = 3


def schema_of(checkpoint: Checkpoint, name: str) -> StateSchema:
    """ArgumentError, with the names there are, if there is no such state."""
    schema = checkpoint.states.get(name)
    if schema is None:
        raise ArgumentError(
            f"checkpoint {checkpoint.number} of {checkpoint.url!r} has no state {name!r}. "
            f"It has: {', '.join(checkpoint.states) or 'none'}."
        )
    return schema


# ---- ls


@click.command()
@click.argument("url")
@json_option
def ls(url: str, as_json: bool) -> None:
    """List the checkpoints of a directory and its workers.

    \b
    Example:
      statekit ls /data/job
      statekit ls s3://bucket/job/worker-0 --json
    """
    storage = parse_place(url).storage
    names = worker_names(storage)
    places: list[tuple[str, Storage]] = [(name, storage.sub(name)) for name in names]
    if has_checkpoints(storage) or not places:
        places.insert(0, ("", storage))
    rows: list[dict[str, Any]] = []
    errors: list[CheckpointError] = []
    for name, place in places:
        found = find_checkpoints(place)
        rows += [{"worker": name or None, **_describe(one)} for one in found.good]
        errors += found.errors
    if as_json:
        print_json(rows)
    elif rows:
        _print_checkpoints(rows, bool(names))
    elif not errors:
        raise NoCheckpointError(
            f"there is no checkpoint in {storage.shown!r}. Check the URL; "
            "kv.checkpoint(url) makes one."
        )
    for error in errors:
        warn(str(error))
    if errors:
        raise SystemExit(1)


def _describe(checkpoint: Checkpoint) -> dict[str, Any]:
    manifest = checkpoint.manifest
    return {
        "number": checkpoint.number,
        "time": checkpoint.modified.isoformat(),
        "key_groups": [[part.start, part.stop] for part in checkpoint.key_groups],
        "key_group_count": checkpoint.key_group_count,
        "subgroups": checkpoint.subgroups,
        "states": list(checkpoint.states),
        "bytes": checkpoint.bytes,
        "new_bytes": checkpoint.new_bytes,
        "base": manifest.base,
        "compression": manifest.compression,
        "watermark": checkpoint.watermark,
        "metadata": checkpoint.metadata,
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
@click.option("--quick", is_flag=True, help="Read the manifest only: no entries, no counts.")
@json_option
def inspect(
    url: str,
    at: int | None,
    state: str | None,
    key: str | None,
    limit: int,
    quick: bool,
    as_json: bool,
) -> None:
    """Show schemas, sizes, skew and some entries of a checkpoint.

    \b
    Example:
      statekit inspect /data/ckpt
      statekit inspect /data/ckpt --at 7 --state visits --limit 20
      statekit inspect /data/ckpt --key alice
    """
    checkpoint = open_one(url, at)
    chosen = [schema_of(checkpoint, state)] if state else list(checkpoint.states.values())
    if key is not None:
        _show_key(checkpoint, chosen, key, as_json)
        return
    figures = None if quick else _count(checkpoint, chosen, limit)
    if as_json:
        print_json(_inspected(checkpoint, chosen, figures))
    else:
        _print_inspected(checkpoint, chosen, figures)


def _count(checkpoint: Checkpoint, chosen: list[StateSchema], limit: int) -> _Figures:
    figures = _Figures(Counter(), Counter(), Counter(), {schema.name: [] for schema in chosen})
    codecs = {schema.name: PlainCodec(schema) for schema in chosen}
    with progress("reading", checkpoint.bytes) as advance:
        for leaf, chain in checkpoint.manifest.chains():
            for name, rows in checkpoint.leaf_rows(leaf).items():
                if name not in codecs:
                    continue
                codec, samples = codecs[name], figures.samples[name]
                figures.entries[name] += len(rows)
                figures.groups[leaf // checkpoint.subgroups] += len(rows)
                for encoded, (value, _) in rows.items():
                    size = len(value) if isinstance(value, bytes) else 8
                    figures.bytes[name] += len(encoded) + size
                    if len(samples) < limit:
                        samples.append((codec.key.decode(encoded), codec.read(value)))
            advance(sum(segment.length for segment in chain))
    return figures


def _inspected(
    checkpoint: Checkpoint, chosen: list[StateSchema], figures: _Figures | None
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
    found = {**_describe(checkpoint), "url": checkpoint.url, "states": states}
    if figures is not None:
        found["entries_by_key_group"] = {
            str(group): figures.groups[group] for part in checkpoint.key_groups for group in part
        }
    return found


def _print_inspected(
    checkpoint: Checkpoint, chosen: list[StateSchema], figures: _Figures | None
) -> None:
    about = _describe(checkpoint)
    watermark = checkpoint.watermark
    print_line(f"checkpoint {checkpoint.number} of {checkpoint.url}")
    print_line(f"  time         {show_time(checkpoint.modified)}")
    print_line(
        f"  key-groups   {_groups(about)} of {about['key_group_count']}, "
        f"{about['subgroups']} sub-groups each"
    )
    print_line(f"  size         {show_bytes(about['bytes'])}, {show_bytes(about['new_bytes'])} new")
    print_line(f"  base         {'none' if about['base'] is None else about['base']}")
    print_line(f"  compression  {about['compression'] or 'none'}")
    print_line(f"  watermark    {'none' if watermark is None else _moment(watermark)}")
    if checkpoint.metadata:
        print_line(f"  metadata     {cut(to_json(checkpoint.metadata))}")
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
        _print_skew(checkpoint, figures.groups)
        _print_samples(chosen, figures)


def _moment(ms: int) -> str:
    try:
        return f"{ms} ({datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC)"
    except (ValueError, OverflowError, OSError):
        return str(ms)


def _print_skew(checkpoint: Checkpoint, groups: Counter[int]) -> None:
    owned = [group for part in checkpoint.key_groups for group in part]
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


def _show_key(checkpoint: Checkpoint, chosen: list[StateSchema], text: str, as_json: bool) -> None:
    found: dict[str, Any] = {}
    misfit: KeyTypeError | None = None
    for schema in chosen:
        try:
            key = parse_key(key_codec(schema.key), text)
        except KeyTypeError as error:  # states may have keys of different types
            misfit = error
            continue
        value = read_entry(checkpoint, schema, key)
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
            f"no state of checkpoint {checkpoint.number} has the key {text!r}. "
            "Check the key; `inspect` without --key shows some."
        )


def read_entry(checkpoint: Checkpoint, schema: StateSchema, key: Any) -> tuple[Any] | None:
    """The plain value under a key, in a tuple of one; None if there is nothing."""
    found = checkpoint.find(schema, encode_key(schema.key, key))
    return None if found is None else (PlainCodec(schema).read(found),)


# ---- get


@click.command(cls=EntryCommand)
@click.argument("url")
@click.argument("state")
@click.argument("key", type=entry_text)
@at_option
@json_option
def get(url: str, state: str, key: str, at: int | None, as_json: bool) -> None:
    """Print the value under one key, as JSON.

    Exit code 1 if there is none. Keys: text as it is, 7 for an int, 0x6162 for bytes, '["alice",
    7]' for a tuple. Entries with a time to live are shown even if they have
    expired.

    \b
    Example:
      statekit get /data/ckpt visits alice
      statekit get /data/ckpt@7 seats '["row a", 7]'
    """
    checkpoint = open_one(url, at)
    schema = schema_of(checkpoint, state)
    parsed = parse_key(key_codec(schema.key), key)
    found = read_entry(checkpoint, schema, parsed)
    if found is None:
        raise ArgumentError(
            f"there is nothing under {key!r} in state {state!r} of checkpoint "
            f"{checkpoint.number}. Check the key; `inspect --state {state}` shows some."
        )
    if as_json:
        print_json({"state": state, "key": key_json(parsed), "value": found[0]})
    else:
        print_line(to_json(found[0]))


# ---- verify


class _Verified(NamedTuple):
    checkpoints: int
    packs: int
    bytes: int
    damage: list[CheckpointError]
    orphans: list[tuple[str, int]]  # files that nothing names, and their sizes


@click.command()
@click.argument("url")
@json_option
def verify(url: str, as_json: bool) -> None:
    """Read every block of every checkpoint, report all damage.

    Exit code 3 if there is any. Orphans are files that no checkpoint needs, left by attempts that
    failed: `gc` removes them.

    \b
    Example:
      statekit verify /data/ckpt
    """
    storage = parse_place(url).storage
    names = worker_names(storage)
    places = [storage.sub(name) for name in names]
    if has_checkpoints(storage) or not places:
        places.insert(0, storage)
    found = [_verify(place) for place in places]
    if not any(one.checkpoints or one.damage for one in found):
        raise NoCheckpointError(f"there is no checkpoint in {storage.shown!r}. Check the URL.")
    damage = [error for one in found for error in one.damage]
    orphans = [orphan for one in found for orphan in one.orphans]
    checked = [sum(one[at] for one in found) for at in range(3)]  # type: ignore[misc]
    if as_json:
        print_json(
            {
                "checkpoints": checked[0],
                "packs": checked[1],
                "bytes": checked[2],
                "damage": [
                    {
                        "file": getattr(error, "file", ""),
                        "offset": getattr(error, "offset", None),
                        "message": str(error),
                    }
                    for error in damage
                ],
                "orphans": [{"file": name, "bytes": size} for name, size in orphans],
            }
        )
    else:
        verdict = f"damaged in {plural(len(damage), 'place')}" if damage else "all good"
        print_line(
            f"read {plural(checked[0], 'checkpoint')}, {plural(checked[1], 'pack')}, "
            f"{show_bytes(checked[2])}: {verdict}"
        )
        for error in damage:
            print_line(f"  {error}")
        for name, size in orphans:
            print_line(f"  orphan: {name}, {show_bytes(size)}; `statekit gc` removes it")
    if damage:
        raise SystemExit(_EXIT_DAMAGED)


def _verify(storage: Storage) -> _Verified:
    found = find_checkpoints(storage)
    segments: dict[PackRef, set[Segment]] = {}
    newest: dict[PackRef, int] = {}
    for checkpoint in found.good:
        packs = checkpoint.manifest.packs
        for segment in checkpoint.manifest.segments:
            ref = packs[segment.pack]
            # The same bytes in several manifests are looked at once.
            segments.setdefault(ref, set()).add(segment._replace(pack=0, is_delta=False))
            newest[ref] = checkpoint.number
    damage: list[CheckpointError] = list(found.errors)
    with progress("verifying", sum(ref.size for ref in segments)) as advance:
        for ref, wanted in segments.items():
            damage += verify_pack(storage, ref, wanted, number=newest[ref])
            advance(ref.size)
    # An unreadable manifest may name any pack: then nothing is known to be an orphan.
    orphans = [] if found.errors else list(_orphans(storage, {ref.name for ref in segments}))
    total = sum(ref.size for ref in segments)
    return _Verified(len(found.good), len(segments), total, damage, orphans)


def _orphans(storage: Storage, named: set[str]) -> Iterator[tuple[str, int]]:
    for entry in storage.list():
        is_pack = entry.name.endswith(".pack") and entry.name not in named
        if is_pack or is_temporary(entry.name):
            yield storage.file(entry.name), entry.size


# ---- diff


@click.command()
@click.argument("a")
@click.argument("b")
@limit_option(10, "Differences of each state to show.")
@json_option
def diff(a: str, b: str, limit: int, as_json: bool) -> None:
    """Show what differs between two checkpoints.

    Exit code 0 if nothing does, 1 if something does, 2 if that cannot be said. In the counts,
    "touched" are entries whose value is the same and whose time to live starts at another time.

    \b
    Example:
      statekit diff /data/ckpt@6 /data/ckpt@7
      statekit diff /data/before /data/after --json
    """
    before, after = open_one(a), open_one(b)
    with progress("comparing", before.bytes + after.bytes) as advance:
        found = diff_checkpoints(before, after, limit=limit, on_bytes=advance)
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
