"""What a query's own checkpoint says: which query it is, and what a batch is made of.

foreachBatch is told the number of the batch only. The rest is in the directory that
checkpointLocation names:

    metadata        {"id": "0c1e..."}, which stays for as long as the directory does
    offsets/<b>     written before batch b is run: a line "v1", one of JSON with the watermark, and
                    a line for each source

Spark runs a batch again, after a failure, from the same file, and never writes it anew. It has the
time at which the batch was planned. So its digest identifies the batch: a batch of the same number
and another digest was planned again, from a checkpoint that was rolled back, and may have other
rows. The file of the batch before is still there, and tells whether the state has that very batch.
"""

import hashlib
import json
import os
import re
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import unquote

from statekit.errors import StatefulOpError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")


class QueryBatch(NamedTuple):
    """A batch, as the checkpoint of its query describes it."""

    query: str  # its id
    batch: int
    digest: str
    watermark: int | None  # event time in ms; None if the query has none yet
    before: str | None = None  # the digest of the batch before; None: there is none, or no file


def read_batch(spark: Any, checkpoint: str, batch: int) -> QueryBatch:
    """StatefulOpError if the directory is not that of the query, or cannot be read."""
    base = os.fspath(checkpoint).rstrip("/")
    metadata, offsets = f"{base}/metadata", f"{base}/offsets/{batch}"
    before = [f"{base}/offsets/{batch - 1}"] if batch else []
    found = _read(spark, [metadata, offsets], before)
    try:
        query = str(json.loads(found[metadata])["id"])
        lines = found[offsets].splitlines()
        if not re.fullmatch(r"v\d+", lines[0]):
            raise ValueError(f"{offsets} begins with {lines[0]!r}")
        watermark = int(json.loads(lines[1]).get("batchWatermarkMs", 0))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise StatefulOpError(
            f"{checkpoint!r} has no checkpoint of a query that can be understood ({error}). Pass "
            "as checkpoint= what .option('checkpointLocation', ...) is given."
        ) from None
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in found.items()}
    last = digests.get(before[0]) if before else None
    return QueryBatch(query, batch, digests[offsets], watermark or None, last)


def _read(spark: Any, needed: list[str], others: list[str]) -> dict[str, str]:
    """The contents of files, and of others if they are there."""
    scheme = _SCHEME.match(needed[0])
    if scheme is not None and scheme[1].lower() != "file":
        from pyspark.errors import AnalysisException

        try:
            return _read_by_spark(spark, [*needed, *others])
        except AnalysisException:
            try:
                return _read_by_spark(spark, needed)
            except AnalysisException as error:
                raise _missing(needed[0], str(error).splitlines()[0]) from None
    found = {name: _read_local(name) for name in needed}
    with suppress(StatefulOpError):
        found.update({name: _read_local(name) for name in others})
    return found


def _read_by_spark(spark: Any, names: list[str]) -> dict[str, str]:
    """Spark has the credentials of this place, and we may have none."""
    from pyspark.sql import functions as F  # noqa: N812

    rows = (
        spark.read.text([literal(name) for name in names], wholetext=True)
        .select("value", F.input_file_name().alias("file"))
        .collect()
    )
    found = {}
    for name in names:
        end = "/" + name.rpartition("://")[2].partition("/")[2]
        texts = [row["value"] for row in rows if unquote(row["file"]).endswith(end)]
        if len(texts) != 1:
            raise _missing(name, "Spark does not find it")
        found[name] = texts[0]
    return found


def literal(path: str) -> str:
    """A path as Spark reads it, who would take some letters for a pattern."""
    return re.sub(r"([\\\[\]{}*?])", r"\\\1", path)


def _read_local(name: str) -> str:
    path = re.sub(r"^file:(//)?", "", name, flags=re.IGNORECASE)
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise _missing(name, error.strerror or str(error)) from None


def _missing(name: str, why: str) -> StatefulOpError:
    return StatefulOpError(
        f"{name!r} cannot be read: {why}. Every query has this file in its checkpoint. Pass as "
        "checkpoint= exactly what .option('checkpointLocation', ...) is given; from an absolute "
        "path, if the driver may run in another directory."
    )
