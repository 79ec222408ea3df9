"""Where the state stands before a batch: what the versions and the query's checkpoint say together.

Everything that is wrong is noticed here, before anything is computed:

    the newest version is of          means
    our query, batch b - 1            as it should be
    our query, batch b, same digest   a restart
    our query, batch b or later,      the query's checkpoint was rolled back, and the batch planned
      another digest, or gone         anew: it may have other rows
    our query, batch b - 1, but       the same, and batch b - 1 as planned anew is in another state,
      another digest than Spark has   or in none
    our query, before b - 1           batches went past this op, or versions were removed
    nobody, and b > 0                 the same, with all of them; also if there is an initial state
    another query                     the checkpoint was deleted and the query started anew; or two
                                      queries share a place
    no query                          the initial state: of a backfill, or of any checkpoint. But if
                                      versions before it are of batches, it was written over them,
                                      and nobody knows which of these it has
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from statekit.checkpoint.reader import Checkpoint, UnfinishedError, list_numbers, read_checkpoint
from statekit.errors import NoCheckpointError, StatefulOpError
from statekit.spark.query import QueryBatch
from statekit.storage import Storage

METADATA = "spark"  # the name of ours in a checkpoint's metadata
BACKFILL = ""  # stands for the query in the metadata of a backfill, whose digest is its name


@dataclass(frozen=True)
class Accepts:
    """What a user has said is all right."""

    gap: bool = False
    rollback: bool = False
    query: str | None = None  # the state of this query is to be continued


class BackfillGoneError(StatefulOpError):
    """A backfill was done, and its output is not kept any more."""


@dataclass(frozen=True)
class Standing:
    """Where the state stands before a batch."""

    number: int  # of the version that is to be made
    base: Checkpoint | None  # what it goes on from
    done: Checkpoint | None  # the version that has the batch already


def versions(storage: Storage) -> list[int]:
    """The numbers of all manifests, the highest first."""
    return sorted(list_numbers(storage), reverse=True)


def note_of(version: Checkpoint) -> dict[str, Any] | None:
    """What the metadata of a version say of its batch; None if it is of no query."""
    found = version.metadata.get(METADATA)
    return found if isinstance(found, dict) else None


def find_standing(storage: Storage, wanted: QueryBatch, accepts: Accepts) -> Standing:
    """StatefulOpError if the state and the query's checkpoint do not fit together."""
    numbers = versions(storage)
    number = max(numbers, default=0) + 1
    newest = newest_of(storage, numbers)
    if newest is None:
        if wanted.batch and not accepts.gap:
            raise _gap(storage, wanted, "there is no state")
        return Standing(number, None, None)
    note = note_of(newest)
    if wanted.query == BACKFILL and note is not None and wanted.digest in note["backfills"]:
        return Standing(number, None, _find_backfill(storage, numbers, wanted.digest))
    if note is None:
        _check_initial(storage, newest, numbers)
    elif note["query"] not in (BACKFILL, wanted.query) and accepts.query != note["query"]:
        raise _another_query(storage, newest, note, wanted)
    if note is None or note["query"] == BACKFILL or note["query"] != wanted.query:
        if wanted.batch and not accepts.gap:
            raise _gap(storage, wanted, "the newest is of no batch of this query")
        return Standing(number, newest, None)
    if note["batch"] < wanted.batch:
        if note["batch"] < wanted.batch - 1 and not accepts.gap:
            raise _gap(storage, wanted, f"the newest is that of batch {note['batch']}")
        if note["batch"] == wanted.batch - 1 and wanted.before not in (None, note["digest"]):
            raise StatefulOpError(
                f"the state in {storage.shown!r} has batch {note['batch']} of this query with "
                "other rows than the query's checkpoint says. The checkpoint was rolled back, and "
                "the batch was done anew, but not here. Go on with the path where it was done; or "
                "bring back the checkpoint of this state; or start anew with another path."
            )
        return Standing(number, newest, None)
    return _look_back(storage, wanted, accepts, number, newest)


def newest_of(storage: Storage, numbers: Sequence[int]) -> Checkpoint | None:
    """The newest version, with the highest number that was seen."""
    for number in numbers:
        try:
            found = read_checkpoint(storage, number)
        except UnfinishedError:
            continue
        found.seen = numbers[0]
        return found
    return None


def _check_initial(storage: Storage, newest: Checkpoint, numbers: Sequence[int]) -> None:
    """The newest version is of no batch. StatefulOpError if one before it is."""
    for number in numbers:
        version = _version(storage, number) if number < newest.number else None
        note = None if version is None else note_of(version)
        if note is not None:
            what = f"backfill {note['digest']!r}"
            if note["query"] != BACKFILL:
                what = f"batch {note['batch']} of query {note['query']}"
            raise StatefulOpError(
                f"version {newest.number} in {storage.shown!r} was written by another program, "
                f"after version {number} of {what}. It does not say which batches it has, so some "
                "could be lost or counted twice. If it is that version with changes, write it once "
                f"more with the metadata of version {number}: kv.checkpoint(url, metadata=...). "
                "(`statekit edit` keeps them.) If not, choose another path."
            )


def _find_backfill(storage: Storage, numbers: Sequence[int], name: str) -> Checkpoint:
    """The version of a backfill that was done."""
    for number in numbers:
        with suppress(NoCheckpointError):
            version = read_checkpoint(storage, number)
            note = note_of(version)
            if note is not None and (note["query"], note["digest"]) == (BACKFILL, name):
                return version
    raise BackfillGoneError(
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
    note = at = note_of(newest)
    kept = None  # where output of batches is that would be undone
    while note is not None and note["query"] == wanted.query and note["batch"] >= wanted.batch:
        if (note["batch"], note["digest"]) == (wanted.batch, wanted.digest):
            return Standing(number, None, version)
        kept = note["output_path"] or kept
        before = _version(storage, note["base"])
        if before is None:
            break
        version, note = before, note_of(before)
    assert at is not None
    if not accepts.rollback:
        raise StatefulOpError(
            f"the state in {storage.shown!r} is at batch {at['batch']} of this query, and Spark "
            f"runs batch {wanted.batch} with other rows than it had then. The query's checkpoint "
            "was rolled back. Either bring back the checkpoint as it was; or pass "
            'accept="rollback": then the state, too, goes back to before this batch. The sink has '
            "been given later batches by then, and must be cleaned of them."
        )
    if kept is not None:
        raise StatefulOpError(
            f"the state in {storage.shown!r} cannot be rolled back, since the output of later "
            f"batches is in {kept!r} for ever, where others may have read it. Start anew, with "
            "another path and output_path."
        )
    if note is not None and note["query"] == wanted.query and note["batch"] >= wanted.batch:
        if note["base"] is None:  # it was the first one: before it there was nothing
            return Standing(number, None, None)
        raise StatefulOpError(
            f"the state in {storage.shown!r} cannot go back to before batch {wanted.batch}: the "
            f"oldest version that is kept is that of batch {note['batch']}. Start anew with "
            "another path."
        )
    version.seen = number - 1
    return Standing(number, version, None)


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
