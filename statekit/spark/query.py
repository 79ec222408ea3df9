"""What a query's own checkpoint says: which query it is, and what a batch is made of.

foreachBatch is told the number of the batch only. The rest is in the directory that
checkpointLocation names:

    metadata        {"id": "0c1e..."}, which stays for as long as the directory does
    offsets/<b>     written before batch b is run: a line "v1", one of JSON with the watermark, and
                    a line for each source

Spark runs a batch again, after a failure, from the same file, and never writes it anew. It has the
time at which the batch was planned. So its digest identifies the batch: a batch of the same number
and another digest was planned again, from a checkpoint that was rolled back, and may have other
rows.
"""

import hashlib
import json
import os
import re
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


def read_batch(spark: Any, checkpoint: str, batch: int) -> QueryBatch:
    """StatefulOpError if the directory is not that of the query, or cannot be read."""
    base = os.fspath(checkpoint).rstrip("/")
    metadata, offsets = f"{base}/metadata", f"{base}/offsets/{batch}"
    found = _read(spark, [metadata, offsets])
    try:
        query = str(json.loads(found[0])["id"])
        lines = found[1].splitlines()
        if not re.fullmatch(r"v\d+", lines[0]):
            raise ValueError(f"{offsets} begins with {lines[0]!r}")
        watermark = int(json.loads(lines[1]).get("batchWatermarkMs", 0))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise StatefulOpError(
            f"{checkpoint!r} has no checkpoint of a query that can be understood ({error}). Pass "
            "as checkpoint= what .option('checkpointLocation', ...) is given."
        ) from None
    digest = hashlib.sha256(found[1].encode()).hexdigest()
    return QueryBatch(query, batch, digest, watermark or None)


def _read(spark: Any, names: list[str]) -> list[str]:
    scheme = _SCHEME.match(names[0])
    if scheme is None or scheme[1].lower() == "file":
        return [_read_local(name) for name in names]
    from pyspark.errors import AnalysisException
    from pyspark.sql import functions as F  # noqa: N812

    # Spark has the credentials of this place, and we may have none.
    try:
        rows = (
            spark.read.text([literal(name) for name in names], wholetext=True)
            .select("value", F.input_file_name().alias("file"))
            .collect()
        )
    except AnalysisException as error:
        raise _missing(names[0], str(error).splitlines()[0]) from None
    found = []
    for name in names:
        end = name.rpartition("://")[2].partition("/")[2]
        texts = [row["value"] for row in rows if unquote(row["file"]).endswith(end)]
        if len(texts) != 1:
            raise _missing(name, "Spark does not find it")
        found.append(texts[0])
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
