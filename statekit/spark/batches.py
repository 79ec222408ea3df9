"""One micro-batch in the driver: exactly once.

    1. read what the query's checkpoint says of the batch (query.py)
    2. find where the state stands: the newest version, of which query and batch it is
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
           {due}                                       when its timers are due next (due.py)

Of a query that is run from its beginning, batch b is version b + 1. Nothing else rests between two
batches, neither in the driver nor in the workers; on Spark Connect, where the function is unpickled
somewhere for each query, there would be no place for it.

What can be wrong, and how it is noticed before anything is computed:

    the newest version is of          means
    our query, batch b - 1            as it should be
    our query, batch b, same digest   a restart
    our query, batch b or later,      the query's checkpoint was rolled back, and the batch planned
      another digest, or gone         anew: it may have other rows
    our query, before b - 1           batches went past this op, or versions were removed
    nobody, and b > 0                 the same, with all of them
    another query                     the checkpoint was deleted and the query started anew; or two
                                      queries share a place
    no query                          the initial state: of a backfill, or of any checkpoint

Two drivers at once: both may compute; publishing is exclusive, and the second is refused. The parts
are of tasks that have restored the base, so a driver that was replaced is refused as well
(checkpoint/ownership.py).
"""

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from statekit.assignment import assign, show_groups, subtract
from statekit.checkpoint.parts import Part, publish
from statekit.checkpoint.reader import Checkpoint, UnfinishedError, read_checkpoint
from statekit.checkpoint.retention import collect
from statekit.errors import (
    CheckpointError,
    FencedError,
    MissingFileError,
    NoCheckpointError,
    StatefulOpError,
    StateKitError,
    StorageError,
)
from statekit.failpoints import register, visit
from statekit.format.manifest import number_of
from statekit.spark.due import merge, noted, times_of
from statekit.spark.geometry import subgroups_of
from statekit.spark.output import OutputFile, attachments_of, log_output, read_files
from statekit.spark.query import QueryBatch
from statekit.spark.routing import plan_routing, route
from statekit.spark.task import REPORT_SCHEMA, Batch, Report
from statekit.storage import Storage, open_storage
from statekit.version import __version__

_METADATA = "spark"  # the name of ours in a checkpoint's metadata
_COLLECT_EVERY = 10  # batches
BACKFILL = ""  # stands for the query in the metadata of a backfill, whose digest is its name

_log = logging.getLogger("statekit")

register("spark.base", "spark.computed", "spark.published", "spark.sink", "spark.sunk")


@dataclass(frozen=True)
class Accepts:
    """What a user has said is all right."""

    gap: bool = False
    rollback: bool = False
    query: str | None = None  # the state of this query is to be continued


@dataclass(frozen=True)
class Standing:
    """Where the state stands before a batch."""

    number: int  # of the version that is to be made
    base: Checkpoint | None  # what it goes on from
    done: Checkpoint | None  # the version that has the batch already
    is_rollback: bool = False  # versions after the base no longer count


# ---- Where the state stands


def _versions(storage: Storage) -> list[int]:
    """The numbers of all manifests, the highest first."""
    return sorted(filter(None, (number_of(entry.name) for entry in storage.list())), reverse=True)


def _note(version: Checkpoint) -> dict[str, Any] | None:
    """What the metadata of a version say of its batch; None if it is of no query."""
    found = version.metadata.get(_METADATA)
    return found if isinstance(found, dict) else None


def find_standing(storage: Storage, wanted: QueryBatch, accepts: Accepts) -> Standing:
    """StatefulOpError if the state and the query's checkpoint do not fit together."""
    numbers = _versions(storage)
    number = max(numbers, default=0) + 1
    newest = _newest(storage, numbers)
    if newest is None:
        if wanted.batch and not accepts.gap:
            raise _gap(storage, wanted, "there is no state")
        return Standing(number, None, None)
    note = _note(newest)
    if wanted.query == BACKFILL and note is not None and wanted.digest in note["backfills"]:
        return Standing(number, None, _find_backfill(storage, numbers, wanted.digest))
    if note is None or note["query"] == BACKFILL:
        return Standing(number, newest, None)
    if note["query"] != wanted.query:
        if accepts.query != note["query"]:
            raise _another_query(storage, newest, note, wanted)
        return Standing(number, newest, None)
    if note["batch"] < wanted.batch:
        if note["batch"] < wanted.batch - 1 and not accepts.gap:
            raise _gap(storage, wanted, f"the newest is that of batch {note['batch']}")
        return Standing(number, newest, None)
    return _look_back(storage, wanted, accepts, number, newest)


def _newest(storage: Storage, numbers: Sequence[int]) -> Checkpoint | None:
    """The newest version, with the highest number that was seen."""
    for number in numbers:
        try:
            found = read_checkpoint(storage, number)
        except UnfinishedError:
            continue
        found.seen = numbers[0]
        return found
    return None


def _find_backfill(storage: Storage, numbers: Sequence[int], name: str) -> Checkpoint:
    """The version of a backfill that was done."""
    for number in numbers:
        with suppress(NoCheckpointError):
            version = read_checkpoint(storage, number)
            note = _note(version)
            if note is not None and (note["query"], note["digest"]) == (BACKFILL, name):
                return version
    raise StatefulOpError(
        f"the backfill {name!r} was done in {storage.shown!r}, and the version with its output is "
        "not kept any more. The state has it; nothing is left to do."
    )


def _look_back(
    storage: Storage, wanted: QueryBatch, accepts: Accepts, number: int, newest: Checkpoint
) -> Standing:
    """The batch is one that the state had at some time.

    Goes from each version to the one that it went on from. (The one of the next lower number may
    no longer count, since the state was rolled back to before it.)
    """
    version = newest
    note = at = _note(newest)
    while note is not None and note["query"] == wanted.query and note["batch"] >= wanted.batch:
        if (note["batch"], note["digest"]) == (wanted.batch, wanted.digest):
            return Standing(number, None, version)
        before = _version(storage, note["base"])
        if before is None:
            break
        version, note = before, _note(before)
    assert at is not None
    if not accepts.rollback:
        raise StatefulOpError(
            f"the state in {storage.shown!r} is at batch {at['batch']} of this query, and Spark "
            f"runs batch {wanted.batch} with other rows than it had then. The query's checkpoint "
            "was rolled back. Either bring back the checkpoint as it was; or pass "
            'accept="rollback": then the state, too, goes back to before this batch. The sink has '
            "been given later batches by then, and must be cleaned of them."
        )
    if note is not None and note["query"] == wanted.query and note["batch"] >= wanted.batch:
        if note["base"] is None:  # it was the first one: before it there was nothing
            return Standing(number, None, None, is_rollback=True)
        raise StatefulOpError(
            f"the state in {storage.shown!r} cannot go back to before batch {wanted.batch}: the "
            f"oldest version that is kept is that of batch {note['batch']}. Start anew with "
            "another path."
        )
    version.seen = number - 1
    return Standing(number, version, None, is_rollback=True)


def _version(storage: Storage, number: int | None) -> Checkpoint | None:
    """A version; None if it is not kept any more, or there never was one."""
    try:
        return None if number is None else read_checkpoint(storage, number)
    except NoCheckpointError:
        return None


def _gap(storage: Storage, wanted: QueryBatch, what: str) -> StatefulOpError:
    return StatefulOpError(
        f"Spark runs batch {wanted.batch}, and in {storage.shown!r} {what}. What the batches in "
        "between had is in no state here. Was the path mistyped, or the state deleted? Or did the "
        "query run without this op for a while? If the state is meant to begin, or to go on, "
        'without those batches, pass accept="gap".'
    )


def _another_query(
    storage: Storage, newest: Checkpoint, note: dict[str, Any], wanted: QueryBatch
) -> StatefulOpError:
    if wanted.query == BACKFILL:
        return StatefulOpError(
            f"the state in {storage.shown!r} is that of a running query, {note['query']}, which "
            f"has come to batch {note['batch']}. A backfill comes before the first batch."
        )
    return StatefulOpError(
        f"the state in {storage.shown!r} belongs to another query, {note['query']}, which has come "
        f"to batch {note['batch']} (version {newest.number}); this is query {wanted.query}, batch "
        f"{wanted.batch}. If that query is still in use, give this op a path of its own. If its "
        "checkpoint was deleted, this query begins to read its sources anew, perhaps with records "
        "that the state has already: see to where they start, and pass "
        f"continue_from={note['query']!r} to go on with that state. Or choose another path."
    )


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
    is_output_wanted: bool = True,
) -> Any:
    """Makes the version of a batch, unless it is there. Returns the batch's output, a DataFrame;
    None if that is not wanted.

    batch: what the tasks are told, but for the base and number, which are found here.
    """
    storage = open_storage(batch.place)
    standing = find_standing(storage, wanted, accepts)
    if standing.is_rollback and batch.output_path is not None:
        raise StatefulOpError(
            f"the state in {storage.shown!r} cannot be rolled back, since the output of later "
            f"batches is in {batch.output_path!r} for ever, where others may have read it. Start "
            "anew, with another path and output_path."
        )
    if (version := standing.done) is None:
        version = _make(df, wanted, batch, parallelism, standing, storage, ship)
        if version.number % _COLLECT_EVERY == 0:
            _collect_old(storage, keep)
    note = _note(version)
    assert note is not None
    files, output = note["files"], storage
    if note["output_path"] is not None:  # where it was when the version was made
        output = open_storage(note["output_path"])
        log_output(output, version.number, files, schema)
    return read_files(df.sparkSession, output, files, schema) if is_output_wanted else None


def _make(
    df: Any,
    wanted: QueryBatch,
    batch: Batch,
    parallelism: int,
    standing: Standing,
    storage: Storage,
    ship: Any,
) -> Checkpoint:
    base = standing.base
    if base is not None:
        _check_geometry(storage, base, batch)
    subgroups = subgroups_of(base, batch.subgroups, batch.key_groups)
    if base is not None and subgroups != base.subgroups:
        _log.info(
            "batch %d: the state of %r has grown to %d bytes. Its key-groups are cut into %d "
            "sub-groups, for which all of it is written once",
            wanted.batch, storage.shown, base.bytes, subgroups,
        )  # fmt: skip
    visit("spark.base")
    started = perf_counter()
    before = None if base is None else _note(base)
    times = times_of(base, before, batch.key_groups)
    batch = replace(batch, base=base, number=standing.number, subgroups=subgroups, due=times)
    reports = compute(df, batch, assign(batch.key_groups, parallelism), ship)
    visit("spark.computed")
    computed = perf_counter()
    outputs = [one.output for one in reports if one.output is not None]
    backfills = [] if before is None else before["backfills"]
    if wanted.query == BACKFILL:
        backfills = [*backfills, wanted.digest]
    note = {
        "query": wanted.query,
        "batch": wanted.batch,
        "digest": wanted.digest,
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
    }
    try:
        version = _publish(storage, standing.number, reports, outputs, note)
    except (FencedError, CheckpointError) as error:
        raise _refused(storage, standing.number, wanted, reports, error) from error
    visit("spark.published")
    _log.info(
        "batch %d: version %d of %r from %d tasks, computed in %.3f s, published in %.3f s: %s",
        wanted.batch, version.number, storage.shown, parallelism, computed - started,
        perf_counter() - computed, _summed(reports),
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
        metadata={_METADATA: note},
        attachments=attachments_of(outputs),
    )


def _summed(reports: Sequence[Report]) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in reports:
        for name, figure in one.figures.items():
            found[name] = round(found.get(name, 0) + figure, 6)
    return found


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
    if lost and number not in _versions(storage):
        return StatefulOpError(
            f"the parts that were written on {', '.join(sorted(lost))} are not in "
            f"{storage.shown!r} as the driver sees it. The path of a StatefulOp must be on "
            "storage that the driver and all executors reach under the same name."
        )
    if isinstance(error, StorageError) and not isinstance(error, MissingFileError):
        return error
    newest = _newest(storage, _versions(storage))
    note = None if newest is None else _note(newest)
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


def _collect_old(storage: Storage, keep: int) -> None:
    """Removes old versions. If that fails, the batch is done nevertheless."""
    try:
        collect(storage, keep)
    except StateKitError as error:
        _log.warning("old versions of %r could not be removed: %s", storage.shown, error)
