"""One micro-batch in the driver: exactly once.

    1. read what the query's checkpoint says of the batch (query.py)
    2. find where the state stands: the newest version, of which query and batch it is (standing.py)
    3. the batch is in it already    give its stored output to the sink again, and compute nothing
       else                          it is the base. Tasks compute, write their parts, and report
    4. publish the next version: put if absent. From here on the batch is done
    5. give the output to the sink, and return. Then Spark records that the batch is done

A crash before 4 leaves the base as it was: Spark runs the batch again, from the same offsets, and
nobody reads what the dead attempt wrote. A crash after 4 is step 3 of the next attempt. So each
batch changes the state once, and the sink is given the same rows under the same batch id, once or,
if a crash comes between 5 and Spark's record, again.

A version is a checkpoint (checkpoint/parts.py) with the metadata

    spark: {query, batch, digest, files, rows, ...}    of whose batch it is, and its output
           {version}                                   its number. Another one means that an edit or
                                                       a regroup has made this version of that one
           {due}                                       when its timers are due next (due.py)

Of a query that is run from its beginning, batch b is version b + 1. Nothing else rests between two
batches, neither in the driver nor in the workers; on Spark Connect, where the function is unpickled
somewhere for each query, there would be no place for it.

What can be wrong with 2 is in standing.py; it is noticed before anything is computed.

Two drivers at once: both may compute; publishing is exclusive, and the second is refused. The parts
are of tasks that have restored the base, so a driver that was replaced is refused as well
(checkpoint/ownership.py).
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from statekit.assignment import assign, show_groups, subtract
from statekit.checkpoint.parts import Part, publish
from statekit.checkpoint.reader import (
    Checkpoint,
)
from statekit.checkpoint.retention import collect
from statekit.errors import (
    CheckpointError,
    FencedError,
    MissingFileError,
    StatefulOpError,
    StateKitError,
    StorageError,
)
from statekit.failpoints import register, visit
from statekit.spark.due import merge, noted, times_of
from statekit.spark.geometry import subgroups_of
from statekit.spark.output import (
    OutputFile,
    attachments_of,
    collect_output,
    log_output,
    prepare_output,
    read_files,
)
from statekit.spark.progress import NOTE, Measured, Progress
from statekit.spark.query import QueryBatch
from statekit.spark.routing import plan_routing, route
from statekit.spark.standing import (
    BACKFILL,
    METADATA,
    Accepts,
    Standing,
    find_standing,
    newest_of,
    note_of,
    versions,
)
from statekit.spark.task import REPORT_SCHEMA, Batch, Report
from statekit.storage import Storage, open_storage
from statekit.version import __version__

_COLLECT_EVERY = 10  # batches

_log = logging.getLogger("statekit")

register("spark.base", "spark.computed", "spark.published", "spark.sink", "spark.sunk")


# ---- Computing


def compute(df: Any, batch: Batch, tasks: Sequence[range], ship: Any) -> list[Report]:
    """Runs the tasks. Returns their reports, which together have all key-groups.

    ship: makes of a Batch the function that Spark is to call.
    """
    routed = route(df, plan_routing(df.schema, batch.key), batch.key_groups, len(tasks))
    batch = replace(batch, ranges=tuple(tasks))
    reports = _collect(routed.mapInArrow(ship(batch), REPORT_SCHEMA))
    reported = {one.at for one in reports}
    if left := [one for one in tasks if one.start not in reported]:
        # Spark leaves out partitions that it knows to be empty, for example all of an empty batch.
        # Their timers may be due, and their key-groups belong into the version as well.
        batch = replace(batch, ranges=tuple(left), is_empty=True)
        numbers = df.sparkSession.range(0, len(left), 1, len(left))
        reports += _collect(numbers.mapInArrow(ship(batch), REPORT_SCHEMA))
    return reports


def _collect(df: Any) -> list[Report]:
    reports = [Report.from_json(row[0]) for row in df.collect()]
    errors = [one.error for one in reports if one.error]
    if errors:
        more = f" ({len(errors) - 1} more tasks failed like this.)" if errors[1:] else ""
        raise StatefulOpError(f"{errors[0]}{more}")
    return reports


# ---- The whole


def run_batch(
    df: Any,
    wanted: QueryBatch,
    batch: Batch,
    parallelism: int,
    accepts: Accepts,
    keep: int,
    schema: Any,
    ship: Any,
    measured: Measured,
    is_output_wanted: bool = True,
) -> tuple[Any, Progress]:
    """Makes the version of a batch, unless it is there. Returns the batch's output, a DataFrame,
    or None if that is not wanted; and its figures so far.

    batch: what the tasks are told, but for the base and number, which are found here.
    """
    storage = open_storage(batch.place)
    with measured.phase("plan"):
        standing = find_standing(storage, wanted, accepts)
    if (version := standing.done) is None:
        version = _make(df, wanted, batch, parallelism, standing, storage, schema, ship, measured)
        if version.number % _COLLECT_EVERY == 0:
            with measured.phase("collect"):
                _collect_old(storage, keep, batch.output_path, version.number)
    note = note_of(version)
    assert note is not None
    files, output = note["files"], storage
    found = None
    with measured.phase("output"):
        if note["output_path"] is not None:  # where it was when the version was made
            output = open_storage(note["output_path"])
        _log_output(version)
        if is_output_wanted:
            found = read_files(df.sparkSession, output, files, schema)
    return found, measured.progress(note, version.number, standing.done is not None)


def _log_output(version: Checkpoint) -> None:
    """Makes output count that is kept for ever."""
    note = note_of(version)
    if note is not None and note["output_path"] is not None:
        # Under the number that it was written for: `version` may be an edit, or a regroup, of it.
        number = note.get("version", version.number)
        log_output(open_storage(note["output_path"]), number, note["files"])


def _make(
    df: Any,
    wanted: QueryBatch,
    batch: Batch,
    parallelism: int,
    standing: Standing,
    storage: Storage,
    schema: Any,
    ship: Any,
    measured: Measured,
) -> Checkpoint:
    base = standing.base
    before = None if base is None else note_of(base)
    if base is not None:
        _check_geometry(storage, base, batch)
        if before is not None and (before["query"], before["batch"] + 1) != wanted[:2]:
            # Its driver may have died before it could; and nobody will run that batch again.
            _log_output(base)
    if batch.output_path is not None:
        is_new = before is None or before["output_path"] != batch.output_path
        prepare_output(open_storage(batch.output_path), standing.number, schema, is_new)
    subgroups = subgroups_of(base, batch.subgroups, batch.key_groups)
    if base is not None and subgroups != base.subgroups:
        _log.info(
            "batch %d: the state of %r has grown to %d bytes. Its key-groups are cut into %d "
            "sub-groups, for which all of it is written once",
            wanted.batch, storage.shown, base.bytes, subgroups,
        )  # fmt: skip
    visit("spark.base")
    times = times_of(base, before, batch.key_groups)
    batch = replace(batch, base=base, number=standing.number, subgroups=subgroups, due=times)
    with measured.phase("compute"):
        reports = compute(df, batch, assign(batch.key_groups, parallelism), ship)
    visit("spark.computed")
    outputs = [one.output for one in reports if one.output is not None]
    backfills = [] if before is None else before["backfills"]
    if wanted.query == BACKFILL:
        backfills = [*backfills, wanted.digest]
    note = {
        "query": wanted.query,
        "batch": wanted.batch,
        "digest": wanted.digest,
        "version": standing.number,
        "base": None if base is None else base.number,
        "files": [one.file for one in outputs],
        "output_path": batch.output_path,
        "rows": sum(one.rows for one in outputs),
        "parallelism": parallelism,
        "backfills": backfills,
        "due": noted(
            merge(times, (one.due for one in reports), batch.key_groups),
            [Part.from_json(one.part).file for one in reports],
        ),
        "statekit": __version__,
        NOTE: measured.add_tasks(one.figures for one in reports),
    }
    try:
        with measured.phase("publish"):
            version = _publish(storage, standing.number, reports, outputs, note)
    except (FencedError, CheckpointError) as error:
        raise _refused(storage, standing.number, wanted, reports, error) from error
    visit("spark.published")
    _log.info(
        "batch %d: version %d of %r from %d tasks, computed in %.3f s, published in %.3f s: %s",
        wanted.batch, version.number, storage.shown, parallelism, measured.seconds["compute"],
        measured.seconds["publish"], measured.figures,
    )  # fmt: skip
    return version


def _publish(
    storage: Storage,
    number: int,
    reports: Sequence[Report],
    outputs: Sequence[OutputFile],
    note: dict[str, Any],
) -> Checkpoint:
    parts = [Part.from_json(one.part) for one in reports]
    return publish(
        storage,
        parts,
        number=number,
        metadata={METADATA: note},
        attachments=attachments_of(outputs),
    )


def _refused(
    storage: Storage,
    number: int,
    wanted: QueryBatch,
    reports: Sequence[Report],
    error: StateKitError,
) -> StateKitError:
    """What to raise when the version cannot be published."""
    names = {entry.name for entry in storage.list()}
    parts = {Part.from_json(one.part).file: one.host for one in reports}
    lost = {host for file, host in parts.items() if file not in names}
    if lost and number not in versions(storage):
        return StatefulOpError(
            f"the parts that were written on {', '.join(sorted(lost))} are not in "
            f"{storage.shown!r} as the driver sees it. The path of a StatefulOp must be on "
            "storage that the driver and all executors reach under the same name."
        )
    if isinstance(error, StorageError) and not isinstance(error, MissingFileError):
        return error
    newest = newest_of(storage, versions(storage))
    note = None if newest is None else note_of(newest)
    if newest is None or newest.number < number or note is None:
        return error
    return StatefulOpError(
        f"another driver has published version {newest.number} of {storage.shown!r} (batch "
        f"{note['batch']} of query {note['query']}) while this one computed batch {wanted.batch}. "
        "Nothing of this attempt counts. See whether an old process of this query is still "
        "running, end it, and start the query again."
    )


def _check_geometry(storage: Storage, base: Checkpoint, batch: Batch) -> None:
    wanted = batch.subgroups
    if base.key_group_count != batch.key_groups or wanted not in (None, base.subgroups):
        given = "" if wanted is None else f" of {wanted}"
        also = "" if wanted is None else f" and subgroups={base.subgroups} (or leave that out)"
        raise StatefulOpError(
            f"the state in {storage.shown!r} has {base.key_group_count} key-groups of "
            f"{base.subgroups} sub-groups; this op has {batch.key_groups}{given}. Pass "
            f"key_groups={base.key_group_count}{also}, or `statekit regroup` the state while the "
            "query is stopped."
        )
    if hidden := subtract((range(batch.key_groups),), base.key_groups):
        raise StatefulOpError(
            f"version {base.number} in {storage.shown!r} has not all key-groups: "
            f"{show_groups(hidden)} are not there. It is the checkpoint of one worker. Merge it "
            "with the others first."
        )


def _collect_old(storage: Storage, keep: int, output_path: str | None, number: int) -> None:
    """Removes old versions, and what dead attempts have left. If that fails, the batch is done
    nevertheless.
    """
    try:
        collect(storage, keep)
        if output_path is not None:
            # Twice as far back as need be: a slow attempt may have written since.
            collect_output(open_storage(output_path), number, 2 * _COLLECT_EVERY)
    except StateKitError as error:
        _log.warning("old versions of %r could not be removed: %s", storage.shown, error)
