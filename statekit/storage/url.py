"""The storage that a path or a URL names."""

import os
import re

from statekit.errors import ArgumentError, shorten
from statekit.storage.fsspec import open_fsspec
from statekit.storage.local import open_local
from statekit.storage.storage import Storage

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")  # a single letter is part of a name, no scheme
_LOCAL = ("file", "local")


def open_storage(url: "str | os.PathLike[str]") -> Storage:
    """The storage of a path, of "file:PATH", or of any URL that fsspec knows ("s3://...").

    Nothing is made or read yet. "~" is not expanded.
    """
    if isinstance(url, os.PathLike):
        return open_local(os.fsdecode(url))
    if not isinstance(url, str):
        raise ArgumentError(
            f"{shorten(url)} names no storage. Give a path, or a URL like s3://bucket/path, as str."
        )
    if "\0" in url or not url:
        raise ArgumentError(
            f"{url!r} names no storage. Give a path, or a URL like s3://bucket/path."
        )
    if match := _URL.match(url):
        if match[1].lower() not in _LOCAL:
            return open_fsspec(url)
        if not url.startswith("/", match.end()):
            raise ArgumentError(
                f"{url!r} names a file of another machine. Use file:///path for a local directory."
            )
        return open_local(url[match.end() :])
    if match := _SCHEME.match(url):
        if match[1].lower() not in _LOCAL:
            raise ArgumentError(
                f"{url!r} is no URL of a storage. Use {match[1]}://..., or for a directory "
                f"of that name ./{url}."
            )
        return open_local(url[match.end() :])
    return open_local(url)
