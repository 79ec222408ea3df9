"""Commands that make new checkpoints of old ones, or remove some: edit rescale merge regroup ..."""

import json
from typing import Any

import click

from statekit.assignment import show_groups
from statekit.checkpoint.parts import find_unpublished
from statekit.checkpoint.reader import Checkpoint
from statekit.checkpoint.retention import collect
from statekit.cli.options import EntryCommand, entry_text, json_option, missing_option, parse_json
from statekit.cli.output import (
    numbers,
    plural,
    print_json,
    print_line,
    print_table,
    progress,
    show_bytes,
    warn,
)
from statekit.cli.places import (
    has_checkpoints,
    open_one,
    open_several,
    parse_directory,
    parse_place,
    worker_names,
)
from statekit.cli.sources import CheckpointSource
from statekit.errors import ArgumentError, NoCheckpointError, shorten
from statekit.format.manifest import number_of
from statekit.keys import encode_key, key_codec
from statekit.offline.compact import compact as compact_checkpoint
from statekit.offline.edit import edit as edit_checkpoint
from statekit.offline.regroup import regroup as regroup_checkpoint
from statekit.offline.rescale import merge as merge_checkpoints
from statekit.offline.rescale import rescale as rescale_checkpoints
from statekit.render import PlainCodec, parse_key

out_option = click.option(
    "--out", required=True, metavar="DIR", help="Where to write it: a directory that is new."
)


force_option = click.option(
    "--force", is_flag=True, help="Also of a checkpoint that is not the newest."
)


def _check_newest(checkpoint: Checkpoint, force: bool) -> None:
    """ArgumentError if there are newer checkpoints, unless forced.

    A new checkpoint becomes the newest. Made of an older one, it overrides those in between.
    """
    newer = [
        number
        for entry in checkpoint.storage.list()
        if (number := number_of(entry.name)) is not None and number > checkpoint.number
    ]
    if newer and not force:
        raise ArgumentError(
            f"checkpoint {checkpoint.number} of {checkpoint.url!r} is not the newest: a new one "
            f"made of it would override what {numbers(newer)} changed. Give --force if that is "
            "meant, or leave the number out."
        )


def _report(made: list[Checkpoint], as_json: bool) -> None:
    """Prints what was written."""
    if as_json:
        print_json(
            [
                {
                    "url": one.url,
                    "number": one.number,
                    "key_groups": [[part.start, part.stop] for part in one.key_groups],
                    "key_group_count": one.key_group_count,
                    "bytes": one.bytes,
                    "new_bytes": one.new_bytes,
                }
                for one in made
            ]
        )
        return
    rows = [
        [
            one.url,
            str(one.number),
            f"{show_groups(one.key_groups)} of {one.key_group_count}",
            show_bytes(one.bytes),
            show_bytes(one.new_bytes),
        ]
        for one in made
    ]
    print_table(["written", "number", "key-groups", "size", "new"], rows, "lrlrr")


@click.command(cls=EntryCommand)
@click.argument("url")
@click.argument("state")
@click.argument("key", type=entry_text)
@click.argument("value", type=entry_text, required=False)
@click.option("--delete", "is_delete", is_flag=True, help="Remove the entry instead.")
@force_option
@json_option
def edit(
    url: str,
    state: str,
    key: str,
    value: str | None,
    is_delete: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Set or remove one entry, in a new checkpoint.

    The old checkpoint stays. VALUE is JSON, as `get` prints it. Only the difference is written, all
    else is shared with the old checkpoint, which is verified first. Edit while no job writes
    checkpoints there: what a running job has in memory does not change, and its next checkpoint
    there is refused, so that the edit is not lost. Of several workers, the one that has the key
    gets a new checkpoint. One made of URL@7 overrides those after 7, and so it needs --force.

    \b
    Example:
      statekit edit /data/ckpt visits alice 7
      statekit edit /data/ckpt clicks alice '[{"url": "/home", "ms": 12}]'
      statekit edit /data/ckpt visits alice --delete
    """
    if is_delete == (value is not None):
        raise click.UsageError("Give a VALUE or --delete, one of them.")
    source = CheckpointSource(parse_place(url).shown, open_several([url]))
    schema = source.schema_of(state)
    parsed = parse_key(key_codec(schema.key), key)
    encoded = None if value is None else PlainCodec(schema).write(_parse_json(value, state))
    owner = source.owner(source.leaf_of(schema, parsed, encode_key(schema.key, parsed)))
    assert owner is not None
    _check_newest(owner, force)
    _report([edit_checkpoint(owner, state, parsed, encoded)], as_json)


def _parse_json(text: str, state: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise ArgumentError(
            f"{shorten(text)} is no JSON ({error}; state {state!r}). "
            f"""Write it as `get` prints it; a text is written '{json.dumps(text)}'."""
        ) from None
    except RecursionError:
        raise ArgumentError(f"the value is nested too deeply (state {state!r}).") from None


@click.command()
@click.argument("urls", nargs=-1, required=True, metavar="URL...")
@click.option(
    "--workers",
    required=True,
    type=click.IntRange(min=1),
    metavar="N",
    help="How many there will be.",
)
@out_option
@json_option
def rescale(urls: tuple[str, ...], workers: int, out: str, as_json: bool) -> None:
    """Share state out to another number of workers.

    Writes DIR/worker-0, DIR/worker-1 ... The sources are the checkpoints of all workers: their
    directories, or one directory that has worker-0, worker-1 ... in it. Blocks are copied as they
    are, none is decoded. If it fails, what was written of DIR is removed.

    \b
    Example:
      statekit rescale /data/job --workers 3 --out /data/job-3
      statekit rescale /data/worker-0 /data/worker-1 --workers 3 --out /data/job-3
    """
    target = parse_directory(out)
    sources = open_several(urls)
    with progress("copying", sum(source.bytes for source in sources)) as advance:
        made = rescale_checkpoints(sources, target, workers, on_bytes=advance)
    _report(made, as_json)


@click.command()
@click.argument("urls", nargs=-1, required=True, metavar="URL...")
@out_option
@missing_option
@json_option
def merge(urls: tuple[str, ...], out: str, missing_ok: bool, as_json: bool) -> None:
    """Put the checkpoints of several workers together.

    The watermark is the lowest of theirs, and their metadata are under "merged".

    \b
    Example:
      statekit merge /data/worker-0 /data/worker-1 --out /data/all
      statekit merge /data/job --out /data/all
    """
    target = parse_directory(out)
    sources = open_several(urls)
    with progress("copying", sum(source.bytes for source in sources)) as advance:
        made = merge_checkpoints(sources, target, may_miss=missing_ok, on_bytes=advance)
    _report([made], as_json)


@click.command()
@click.argument("url")
@click.option(
    "--key-groups",
    required=True,
    type=int,
    metavar="G",
    help="How many there will be: a power of 2.",
)
@click.option("--out", metavar="DIR", help="A new directory; without it, a new checkpoint in URL.")
@force_option
@json_option
def regroup(url: str, key_groups: int, out: str | None, force: bool, as_json: bool) -> None:
    """Give the state another number of key-groups.

    That is the limit to the workers it can have. As long as there are no more key-groups than
    leaves (key-groups times sub-groups), no block changes. Without --out, one made of URL@7
    overrides those after 7, and so it needs --force.

    \b
    Example:
      statekit regroup /data/ckpt --key-groups 1024
    """
    source = open_one(url)
    target = None if out is None else parse_directory(out)
    if target is None:
        _check_newest(source, force)
    with progress("regrouping", source.bytes) as advance:
        made = regroup_checkpoint(source, key_groups, target, on_bytes=advance)
    _report([made], as_json)


@click.command()
@click.argument("url")
@force_option
@json_option
def compact(url: str, force: bool, as_json: bool) -> None:
    """Fold the deltas of a checkpoint into full blocks.

    Writes a new checkpoint. Restoring it reads less. Space is free once `gc` has removed the older
    ones. All of it is verified first, and over damage nothing is written. One made of URL@7
    overrides those after 7, and so it needs --force.

    \b
    Example:
      statekit compact /data/ckpt && statekit gc /data/ckpt --keep 1
    """
    source = open_one(url)
    _check_newest(source, force)
    with progress("compacting", source.bytes) as advance:
        made = compact_checkpoint(source, on_bytes=advance)
    if made is None:
        warn(f"checkpoint {source.number} of {source.url!r} is compact already")
    if made is not None or as_json:
        _report([] if made is None else [made], as_json)


@click.command()
@click.argument("url")
@click.option(
    "--keep",
    required=True,
    type=click.IntRange(min=1),
    metavar="N",
    help="Newest checkpoints to keep.",
)
@click.option(
    "--unpublished",
    is_flag=True,
    help="Remove parts that may still be published, too: only if nobody will.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@json_option
def gc(url: str, keep: int, unpublished: bool, dry_run: bool, as_json: bool) -> None:
    """Remove old checkpoints, and files that none needs.

    Checkpoints that somebody is restoring from stay. So do parts that may still be published: those
    of a number above the newest checkpoint. Files that belong to no checkpoint are left
    alone while one is being written, and for good if they are no packs of statekit. A directory
    with worker-0, worker-1 ... in it stands for all of them.

    \b
    Example:
      statekit gc /data/ckpt --keep 3 --dry-run
    """
    storage = parse_directory(url)
    places = [storage]
    if not has_checkpoints(storage) and not find_unpublished(storage):
        places = [storage.sub(name) for name in worker_names(storage)]
        if not places:
            raise NoCheckpointError(f"there is no checkpoint in {storage.shown!r}. Check the URL.")
    done = [
        (place, collect(place, keep, dry_run=dry_run, unpublished=unpublished)) for place in places
    ]
    if as_json:
        print_json([{"url": place.shown, **found._asdict()} for place, found in done])
        return
    for place, found in done:
        verb = "would be removed" if dry_run else "removed"
        files = len(found.packs) + len(found.parts) + len(found.temporaries)
        print_line(
            f"{place.shown}: kept {numbers(found.kept)}; {verb}: {numbers(found.removed)}, "
            f"{plural(files, 'other file')}, {show_bytes(found.bytes_freed)} in all"
        )
        if found.in_use:
            print_line(f"  in use, so kept: {numbers(found.in_use)}")
        if found.unpublished:
            print_line(
                f"  parts that may still be published, so kept: of {numbers(found.unpublished)}"
            )
        for name in found.foreign:
            print_line(f"  {name} has the name of a pack and is none: it was left alone")
        if found.is_busy:
            print_line("  a checkpoint is being written: what belongs to none was left alone")
