"""Whatever fsspec reaches as a storage of checkpoints: "s3://bucket/path", "memory://path".

    pip install statekit[storage]     fsspec; memory:// and, with pyarrow, hdfs://
    pip install statekit[s3]          s3fs too

There are no options in the URL. The client takes credentials, endpoint and region from its usual
sources: for S3 the environment (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...), ~/.aws, the role of
the machine, or fsspec's own configuration (FSSPEC_S3_ENDPOINT_URL, ~/.config/fsspec/*.json).

    kind            write()                 create()                                   locks
    object store    one put                 put on condition that there is none        no
    memory://       one put                 the same, under a lock of this process     yes
    all others      put, then rename        look first, then put and rename            no

A put either writes the whole object or nothing. "All others" (HDFS, SFTP, ...) look and rename in
two steps. So two processes that publish the same number at the same moment can both succeed there:
let only one process write to a directory. The same goes for a server that speaks S3 but does not
know conditional puts.

If the answer to a put is lost, the client repeats the put, and then finds its own object. So
create() succeeds if there is an object with the same bytes already. Two processes that publish the
same bytes both succeed.

Listings are never cached: a checkpoint that another machine published must be seen.
"""

import errno
import inspect
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

from statekit.errors import ArgumentError, StateKitError, StorageError
from statekit.failpoints import register, visit
from statekit.storage.storage import TEMPORARY, Entries, Entry, Names, Storage, check_sub

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

register("storage.pack.put", "storage.manifest.put")

_S3 = ("s3", "s3a")
# A put replaces an object as a whole, and there are no directories to be made.
_OBJECT_STORES = (*_S3, "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "r2")
_MEMORY = "memory"
_HAS_CONTENTS_IN_NAME = re.compile(r"\.(pack|part|attachment)$")  # equal names, equal files
_CONFLICTS_MAX = 8  # S3 asks to repeat a conditional put if another one is under way

# Where file systems keep the time of the last change, the best first.
_TIMES = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")

_ADVICE = (
    (
        ("NoCredentials", "PermissionError", "PartialCredentials", "TokenRetrieval"),
        "Check the credentials and what they allow. For S3: AWS_ACCESS_KEY_ID, "
        "AWS_SECRET_ACCESS_KEY, or the role of this machine.",
    ),
    (
        ("FileNotFoundError", "NotADirectoryError"),
        "Check that the bucket or the directory above exists; a bucket is not made for you.",
    ),
    (
        ("Connect", "Timeout", "gaierror", "ClientError"),
        "Check that the server can be reached, and its address. For S3: AWS_ENDPOINT_URL.",
    ),
    (
        ("RuntimeError",),
        "After a fork, open the storage again in the child process.",
    ),
)
_ADVICE_ELSE = "Try again; the checkpoints that are complete are not affected."


def open_fsspec(url: str) -> Storage:
    """The storage of a URL with "://". It does not talk to the server yet."""
    scheme, _, rest = url.partition("://")
    scheme = {"s3a": "s3", "gcs": "gs"}.get(scheme.lower(), scheme.lower())
    login, at, _ = rest.partition("/")[0].rpartition("@")
    user, colon, password = login.partition(":")
    shown = f"{scheme}://{user}{at}{rest[len(login) + len(at) :]}".rstrip("/")
    if not rest.strip("/") or "?" in rest or "#" in rest or "::" in url:
        raise ArgumentError(
            f"{shown.partition('?')[0]!r} names no storage. Use SCHEME://PLACE/PATH without "
            "options; they come from the environment or from fsspec's configuration."
        )
    if colon and scheme in _OBJECT_STORES:
        raise ArgumentError(
            f"{shown!r} has a secret in it. Credentials of an object store come from the "
            "environment (AWS_SECRET_ACCESS_KEY), not from the URL."
        )
    fs, path = _file_system(scheme, f"{scheme}://{rest}", shown)
    if not path.strip("/"):
        raise ArgumentError(f"{shown!r} names no directory. Name one: {shown}/checkpoints")
    if scheme in _OBJECT_STORES or scheme == _MEMORY:
        # URLs of these name no server: scheme and path are all that tells places apart.
        url = shown = f"{scheme}://{path.strip('/')}"
    else:
        url = f"{scheme}://{rest}".rstrip("/")
    return RemoteStorage(fs, path.rstrip("/"), scheme, url, shown, password)


def _file_system(scheme: str, url: str, shown: str) -> tuple[Any, str]:
    try:
        import fsspec.core
    except ImportError as error:
        raise StorageError(
            f"{shown!r} needs the package fsspec, which cannot be imported ({error}). "
            f"Run: pip install statekit[{'s3' if scheme in _S3 else 'storage'}]"
        ) from error
    # Other file systems hand unknown options to their client, which refuses them.
    options = {"use_listings_cache": False} if scheme in _OBJECT_STORES else {}
    try:
        # Without fsspec's cache of clients: it keeps every client for ever, with the environment
        # that the client was made in.
        fs, path = fsspec.core.url_to_fs(url, skip_instance_cache=True, **options)
    except ImportError as error:
        how = "pip install statekit[s3]" if scheme in _S3 else "install what fsspec asks for"
        raise StorageError(f"{shown!r} cannot be opened: {error}. Do this: {how}.") from error
    except ValueError as error:
        raise ArgumentError(
            f"{shown!r} is no URL of a storage: {error}. Use a path, s3://BUCKET/PATH, or another "
            "scheme that fsspec knows."
        ) from error
    except Exception as error:
        raise StorageError(
            f"{shown!r} cannot be opened: {error}. Check the address and the credentials."
        ) from error
    return fs, path


class RemoteStorage(Storage):
    is_local = False

    def __init__(
        self, fs: Any, path: str, scheme: str, url: str, shown: str, password: str
    ) -> None:
        super().__init__(url, shown)
        self._fs = fs
        self._root = path
        self._scheme = scheme
        self._password = password
        self._is_object_store = scheme in _OBJECT_STORES
        put = getattr(fs, "_pipe_file", fs.pipe_file)
        # A client that does not know "mode" would take it for some option, and replace the object.
        self._has_condition = self._is_object_store and "mode" in inspect.signature(put).parameters

    @property
    def has_locks(self) -> bool:
        return self._scheme == _MEMORY  # other processes cannot see it, so this one's locks suffice

    def list(self) -> Entries:
        with self._doing("listed"):
            visit("storage.list")
            found = self._infos("file")
            return sorted(
                Entry(name, int(info["size"]), self._modified(info)) for name, info in found
            )

    def subdirectories(self) -> Names:
        with self._doing("listed"):
            return sorted({name for name, _ in self._infos("directory")})

    def sub(self, name: str) -> Storage:
        check_sub(name)
        return RemoteStorage(
            self._fs,
            f"{self._root}/{name}",
            self._scheme,
            f"{self.url}/{name}",
            f"{self.shown}/{name}",
            self._password,
        )

    def size(self, name: str) -> int:
        with self._doing("read", name):
            self._fs.invalidate_cache()
            return int(self._fs.info(self._path(name))["size"])

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        with self._doing("read", name):
            visit("storage.read")
            if offset == 0 and length is None:
                return bytes(self._fs.cat_file(self._path(name)))
            data = self._read_range(name, offset, length) if length != 0 else b""
            # The answer may be empty because the offset is beyond the end: the size tells.
            end = offset + len(data) if data else min(self.size(name), offset)
            if end != offset + (len(data) if length is None else length):
                raise self.ends_early(name, end, offset, length)
            return data

    def _read_range(self, name: str, offset: int, length: int | None) -> bytes:
        end = None if length is None else offset + length
        try:
            return bytes(self._fs.cat_file(self._path(name), start=offset, end=end))
        except FileNotFoundError:
            raise
        except OSError:
            # Servers give different errors for a range behind the end. The size tells for certain.
            size = self.size(name)
            if size == offset and end is None:
                return b""
            if size < (offset if end is None else end):
                raise self.ends_early(name, size, offset, length) from None
            raise

    def write(self, name: str, parts: "Sequence[ReadableBuffer]") -> None:
        with self._doing("written", name):
            _visit_put("storage.pack.put")
            self._put_data(name, _joined(parts))

    def upload(self, name: str, file: "str | os.PathLike[str]") -> None:
        """Like write(), but of a file of this machine, which may be larger than memory."""
        with self._doing("written", name):
            self._put(name, lambda path: self._fs.put_file(os.fspath(file), path))

    def download(self, name: str, file: "str | os.PathLike[str]") -> None:
        """Copies a file of the storage into a file of this machine."""
        with self._doing("read", name):
            self._fs.get_file(self._path(name), os.fspath(file))

    def sync(self) -> None:
        """Does nothing: once a server has acknowledged a put, the name is durable, too."""

    def create(
        self, name: str, data: bytes, on_reserved: Callable[[], None] = lambda: None
    ) -> bool:
        on_reserved()
        with self._doing("written", name):
            _visit_put("storage.manifest.put")
            path = self._path(name)
            with self._place.lock:  # makes it exclusive for memory://, which has no conditional put
                if self._exists(path):
                    return False
                if not self._has_condition:
                    self._put_data(name, data)
                    return True
            return self._put_if_none(path, data)

    def delete(self, names: Sequence[str]) -> None:
        # One by one: s3fs does not tell which objects of a bulk delete could not be deleted.
        for name in names:
            with self._doing("deleted", name), suppress(FileNotFoundError):
                visit("storage.delete")
                self._fs.rm_file(self._path(name))

    def _retire(self, name: str) -> bool:
        with self._doing("deleted", name), suppress(FileNotFoundError):
            visit("storage.retire")
            self._fs.rm_file(self._path(name))
        return True

    def _path(self, name: str) -> str:
        assert "/" not in name, f"{name!r} is no name of a file"
        return f"{self._root}/{name}"

    def _exists(self, path: str) -> bool:
        return self._size(path) is not None

    def _size(self, path: str) -> int | None:
        """None if there is no such file."""
        self._fs.invalidate_cache()
        try:
            return int(self._fs.info(path)["size"] or 0)
        except FileNotFoundError:
            return None

    def _put_data(self, name: str, data: bytes) -> None:
        self._put(name, lambda path: self._fs.pipe_file(path, data))

    def _put(self, name: str, put: Callable[[str], object]) -> None:
        path = self._path(name)
        if self._is_object_store or self._scheme == _MEMORY:
            put(path)
            return
        self._fs.makedirs(self._root, exist_ok=True)
        temporary = f"{path}{TEMPORARY}{secrets.token_hex(8)}"
        try:
            put(temporary)
            size = self._size(path)
            if _HAS_CONTENTS_IN_NAME.search(name) and size == self._size(temporary):
                # The same file is there, written by another copy of a task. Removing it, even for a
                # moment, would take it from a checkpoint that may have been published since.
                self._fs.rm_file(temporary)
                return
            if size is not None:
                self._fs.rm_file(path)
            self._fs.mv(temporary, path)
        except BaseException:
            with suppress(Exception):
                self._fs.rm_file(temporary)
            raise

    def _put_if_none(self, path: str, data: bytes) -> bool:
        for at in range(_CONFLICTS_MAX):
            try:
                self._fs.pipe_file(path, data, mode="create")
                return True
            except FileExistsError:
                break
            except OSError as error:
                code = _code(error)
                if code in ("PreconditionFailed", "412"):
                    break
                if code not in ("ConditionalRequestConflict", "409") or at == _CONFLICTS_MAX - 1:
                    raise
        return bytes(self._fs.cat_file(path)) == data

    def _infos(self, kind: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The files or directories in this directory, with what the file system says of them."""
        self._fs.invalidate_cache()
        try:
            infos = self._fs.ls(self._root, detail=True)
        except FileNotFoundError:
            return
        for info in infos:
            above, _, name = info["name"].rstrip("/").rpartition("/")
            # An object store lists the directory itself too, if somebody made an object for it.
            if info["type"] == kind and above.strip("/") == self._root.strip("/"):
                yield name, info

    def _modified(self, info: Mapping[str, Any]) -> float:
        value = next((info[key] for key in _TIMES if info.get(key) is not None), None)
        if value is None:
            try:
                value = self._fs.modified(info["name"])
            except (NotImplementedError, AttributeError):
                return time.time()  # never old enough to be garbage
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        return value.timestamp() if isinstance(value, datetime) else float(value)

    # Errors

    @contextmanager
    def _doing(self, done: str, name: str | None = None) -> Iterator[None]:
        try:
            yield
        except StateKitError:
            raise
        except Exception as error:
            raise self.failed(done, name, error) from error

    def _reason(self, error: BaseException) -> str:
        reason = super()._reason(error)
        return reason.replace(self._password, "***") if self._password else reason

    def _advice(self, error: BaseException) -> str:
        kinds = " ".join(kind.__name__ for kind in type(error).__mro__)
        for words, advice in _ADVICE:
            if re.search("|".join(words), kinds):
                return advice
        return _ADVICE_ELSE


def _visit_put(point: str) -> None:
    if visit(point) == "short":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # a put that fails leaves nothing


def _code(error: BaseException) -> str:
    """S3's own word for an error, which s3fs translates into an OSError."""
    response = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def _joined(parts: "Sequence[ReadableBuffer]") -> bytes:
    if len(parts) == 1 and isinstance(parts[0], bytes):
        return parts[0]
    return b"".join(parts)
