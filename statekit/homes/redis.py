"""A Redis server or cluster as a home: "redis://user:password@host:6379/0", or rediss: with TLS.

    what                          key                             holds
    rows of a leaf and state      prefix:{leaf}:state             a hash: encoded key -> value
    the meta                      prefix:meta                     the provider's record

The braces are part of the key. They make Redis Cluster place all states of a leaf in one slot;
leaves spread over the cluster. A write() goes out in chunks, each in one round trip, so a
failure may leave the first ones written: the provider writes all of them again.

A commit is one transaction (MULTI) on one server. A cluster has no transactions across its slots,
so there it takes two phases (ledger.py), which promise the same and write each row twice.

Redis has no snapshots for its users. A checkpoint copies the rows of a leaf before the provider
changes them (statekit/residence/freeze.py), which is exact as long as nobody but the provider that
owns a leaf writes to it; the same rule that write-back rests on.

Every command but the one that replaces the meta may be repeated without harm, so a lost
connection is tried again once before HomeError says so. Before anything else is written then, the
server closes the old connections: what is still on its way there must not come after it.
"""

import logging
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

from statekit.errors import ArgumentError, HomeError
from statekit.homes.home import Change, Home, HomeUrl, Named, Row, rows_of

_T = TypeVar("_T")
_log = logging.getLogger("statekit")

_PORT = 6379
_CONNECT_SECONDS_MAX = 5.0
_ANSWER_SECONDS_MAX = 10.0
_CHUNK_ROWS, _CHUNK_BYTES = 1000, 8 * 2**20  # of one round trip
_SCAN_ROWS_MAX = 1000  # a hint to Redis: how many rows an answer of HSCAN should have
_REASON_CHARS_MAX = 300

# Compare and set in one step, and on one key, so that it works in a cluster too. WATCH would
# need a connection of its own, and redis-py has it for clusters only since version 6.
_REPLACE_META = """
local now = redis.call('GET', KEYS[1])
if (ARGV[1] == 'new' and not now) or (ARGV[1] == 'old' and now == ARGV[2]) then
    redis.call('SET', KEYS[1], ARGV[3])
    return 1
end
return 0
"""

# Names of redis-py's exceptions and words of Redis, and what to do; the first that occurs counts.
_ADVICE = (
    (
        # a cluster's client tells only in words why its nodes refused
        ("AuthenticationError", "Authentication required", "HELLO must", "username-password"),
        "Check user and password: redis://user:password@host:port/db. "
        "Percent-encode special characters in them.",
    ),
    (("NoPermissionError", "NOPERM"), "Give the user the right to these commands and keys (ACL)."),
    (("BusyLoadingError", "LOADING"), "The server is still reading its data. Try again later."),
    (
        ("ReadOnlyError", "READONLY"),
        "The server is a replica that takes no writes. Connect to the primary.",
    ),
    (
        ("OutOfMemoryError", "OOM command"),
        "The server is at its memory limit. Raise maxmemory or delete data there.",
    ),
    (("MISCONF",), "The server cannot save to its disk. Free space there and look into its log."),
    (("WRONGTYPE",), "Keys with this prefix hold other data. Use another one: ?prefix=name."),
    (("DB index is out of range",), "Use a database that the server has, such as /0."),
    (
        ("Cluster mode is not enabled", "cluster support disabled"),
        "The server is no cluster. Remove cluster=1 from the URL.",
    ),
    (("MovedError", "MOVED"), "The server is part of a cluster. Add cluster=1 to the URL."),
    (
        ("ClusterDownError", "CLUSTERDOWN", "SlotNotCoveredError", "MasterDownError"),
        "Part of the cluster is down. Bring its nodes back (redis-cli --cluster check).",
    ),
    (
        ("CERTIFICATE_VERIFY_FAILED",),
        "Its certificate is not trusted. Set SSL_CERT_FILE to that of its authority.",
    ),
    (
        ("TimeoutError",),
        "The server does not answer in time. Check its load and the network, "
        "and that rediss: is used if and only if the server expects TLS.",
    ),
    (
        ("ConnectionError", "RedisClusterException", "OSError"),
        "Check that the server runs and can be reached from here, then try again.",
    ),
)
_ADVICE_ELSE = "Look into the server's log."


def open_redis(url: HomeUrl, cache_bytes: int) -> Home:
    """The Redis home of a URL. It caches nothing itself, so cache_bytes is not used.

    Options: prefix=name starts the name of every key ("statekit" unless given), so that
    several homes may share a server; cluster=1 talks to a Redis Cluster.
    """
    server = _server_of(url)
    return _RedisHome(server)


class _Server(NamedTuple):
    """What a URL says."""

    name: str  # for messages and repr: it has no user and password
    host: str
    port: int
    database: int
    user: str | None
    password: str | None
    has_tls: bool
    is_cluster: bool
    prefix: str


def _server_of(url: HomeUrl) -> _Server:
    # The text again and not url.place, where %40 has become another "@".
    try:
        parts = urlsplit(url.text)
        host, port, path = parts.hostname or "", parts.port or _PORT, parts.path.strip("/")
        database = int(path) if path else 0
        if not host or parts.fragment or database < 0:
            raise ValueError
    except ValueError:
        # Not a word of the URL: whatever is wrong with it may be in the password.
        raise ArgumentError(
            f"the URL of a home in Redis is malformed. Use {url.scheme}://host:port/db or "
            f"{url.scheme}://user:password@host:port/db, with special characters "
            "percent-encoded."
        ) from None
    name = _name(parts, host, port, database)
    prefix = url.options.pop("prefix", "statekit")
    cluster = url.options.pop("cluster", "0")
    url.refuse_rest()
    if not prefix or "{" in prefix or "}" in prefix:
        raise ArgumentError(
            f"{name!r} has prefix={prefix!r}. Use one without braces, and not an empty one."
        )
    if cluster not in ("0", "1"):
        raise ArgumentError(f"{name!r} has cluster={cluster!r}. Use cluster=1, or leave it out.")
    if cluster == "1" and database:
        raise ArgumentError(f"{name!r} names a database, but a cluster has only 0. Remove it.")
    return _Server(
        name=name,
        host=host,
        port=port,
        database=database,
        user=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
        has_tls=url.scheme == "rediss",
        is_cluster=cluster == "1",
        prefix=prefix,
    )


def _name(parts: SplitResult, host: str, port: int, database: int) -> str:
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}/{database}"


def _redis() -> Any:
    try:
        import redis
        import redis.backoff
        import redis.cluster
        import redis.retry
    except ImportError as error:
        raise HomeError(
            f"a home in Redis needs the package redis, which cannot be imported ({error}). "
            "Run: pip install statekit[redis]"
        ) from error
    return redis


def _connect(redis: Any, server: _Server, name: str) -> Any:
    common: dict[str, Any] = {
        "host": server.host,
        "port": server.port,
        "username": server.user,
        "password": server.password,
        "ssl": server.has_tls,
        "socket_connect_timeout": _CONNECT_SECONDS_MAX,
        "socket_timeout": _ANSWER_SECONDS_MAX,
        "socket_keepalive": True,
        "client_name": name,
    }
    if server.is_cluster:
        # Its retries are what follows slots to another node, so here they stay.
        backoff = redis.backoff.ExponentialBackoff(cap=1.0, base=0.05)
        return redis.cluster.RedisCluster(retry=redis.retry.Retry(backoff, 3), **common)
    never = redis.retry.Retry(redis.backoff.NoBackoff(), 0)  # _call() does it
    return redis.Redis(db=server.database, retry=never, **common)


class _RedisHome(Home):
    def __init__(self, server: _Server) -> None:
        redis = _redis()
        self._server = server
        self._failures = (redis.RedisError, redis.cluster.RedisClusterException, OSError)
        self._losses = (redis.ConnectionError,)
        self._is_late = (redis.ConnectionError, redis.TimeoutError)  # its answer may be on its way
        self._name = f"statekit-{secrets.token_hex(8)}"  # of our connections, at the server
        self._has_stragglers = False  # writes may still reach the server that we have given up
        # They are connection errors to redis-py, but trying again at once does not help.
        self._refusals = (redis.AuthenticationError, redis.BusyLoadingError)
        self._lost_count = 0
        self._client: Any = None
        try:
            self._client = _connect(redis, server, self._name)
        except self._failures as error:
            raise self._failed("opened", error) from error
        try:
            self._refuse_eviction()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        closed = "" if self._client is not None else ", closed"
        return f"<Redis home at {self._server.name}, prefix {self._server.prefix!r}{closed}>"

    def get(self, rows: Sequence[Row]) -> Sequence[bytes | None]:
        if len(rows) == 1:
            leaf, state, key = rows[0]
            name = self._hash(leaf, state)
            return [self._call("read", lambda client: client.hget(name, key))]
        values: list[bytes | None] = []
        for at in range(0, len(rows), _CHUNK_ROWS):
            values += self._get_chunk(rows[at : at + _CHUNK_ROWS])
        return values

    def _get_chunk(self, rows: Sequence[Row]) -> list[bytes | None]:
        asked: dict[str, list[int]] = defaultdict(list)  # positions in rows, by hash
        for at, (leaf, state, _) in enumerate(rows):
            asked[self._hash(leaf, state)].append(at)

        def ask(client: Any) -> list[list[bytes | None]]:
            with client.pipeline(transaction=False) as pipe:
                for name, places in asked.items():
                    pipe.hmget(name, [rows[at][2] for at in places])
                answers: list[list[bytes | None]] = pipe.execute()
            return answers

        values: list[bytes | None] = [None] * len(rows)
        for places, answer in zip(asked.values(), self._call("read", ask), strict=True):
            for at, value in zip(places, answer, strict=True):
                values[at] = value
        return values

    def load(self, leaf: int, state: int) -> Iterator[tuple[bytes, bytes]]:
        name = self._hash(leaf, state)
        seen: set[bytes] = set()  # HSCAN gives a row twice if the hash is resized meanwhile
        cursor, count = 0, _SCAN_ROWS_MAX // 10
        server = ""  # that the cursor is of: to another one it means nothing
        while True:
            cursor, page = self._call("read", _scan(name, cursor, count))
            if cursor or server:  # else one page was all
                now = self._call("read", lambda client: _run_of(client, name))
                if now != server:  # the first time, too: it may have changed after that page
                    cursor, server = 0, now
                    continue
            for key, value in page.items():
                if key not in seen:
                    seen.add(key)
                    yield key, value
            if not cursor:
                return
            is_large = sum(map(len, page.values())) > _CHUNK_BYTES // 4
            count = max(count // 2, 1) if is_large else min(count * 2, _SCAN_ROWS_MAX)

    def write(self, changes: Sequence[Change]) -> None:
        for puts, deletes in self._chunks(changes):
            self._call("written", _send(puts, deletes))

    def _chunks(self, changes: Sequence[Change]) -> Iterator[tuple["_Puts", "_Deletes"]]:
        puts: _Puts = defaultdict(dict)
        deletes: _Deletes = defaultdict(list)
        count = size = 0
        for (leaf, state, key), value in changes:
            name = self._hash(leaf, state)
            if value is None:
                deletes[name].append(key)
            else:
                puts[name][key] = value
            count += 1
            size += len(key) + len(value or b"")
            if count >= _CHUNK_ROWS or size >= _CHUNK_BYTES:
                yield puts, deletes
                puts, deletes = defaultdict(dict), defaultdict(list)
                count = size = 0
        if count:
            yield puts, deletes

    @property
    def is_atomic(self) -> bool:  # type: ignore[override]
        """One server does it in a transaction; the slots of a cluster have none in common."""
        return not self._server.is_cluster

    def write_rows(
        self, rows: Named, cleared: Iterable[tuple[int, int]] = (), durable: bool = False
    ) -> None:
        if self._server.is_cluster:
            super().write_rows(rows, cleared, durable)
            return
        gone = [self._hash(leaf, state) for leaf, state in cleared]
        puts: _Puts = defaultdict(dict)
        deletes: _Deletes = defaultdict(list)
        for (leaf, state, key), value in rows_of(rows).items():
            if value is None:
                deletes[self._hash(leaf, state)].append(key)
            else:
                puts[self._hash(leaf, state)][key] = value
        # Twice is as good as once, so it may be sent again if the answer was lost.
        self._call("written", _send(puts, deletes, gone, is_transaction=True))

    def clear_leaves(self, leaves: range, states: int) -> None:
        names = [self._hash(leaf, state) for leaf in leaves for state in range(states)]
        for at in range(0, len(names), _CHUNK_ROWS):
            self._call("written", _send({}, {}, names[at : at + _CHUNK_ROWS]))

    def clear(self, leaf: int, state: int) -> None:
        # UNLINK frees the memory of a large hash in the background; DEL would stop the server.
        self._call("written", lambda client: client.unlink(self._hash(leaf, state)))

    def read_meta(self) -> bytes | None:
        meta: bytes | None = self._call("read", lambda client: client.get(self._meta))
        return meta

    def write_meta(self, meta: bytes, expected: bytes | None) -> bool:
        # Not tried again: if the first try did it and only the answer was lost, a second one
        # would find its own record and say that another was quicker.
        is_new = "new" if expected is None else "old"
        done: int = self._call(
            "written",
            lambda client: client.eval(_REPLACE_META, 1, self._meta, is_new, expected or b"", meta),
            attempts=1,
        )
        return done == 1

    def flush(self) -> None:
        """Nothing: the server has every write, and its own settings say when it saves them."""
        self._open_client("flushed")

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def metrics(self) -> Mapping[str, float]:
        infos = self._call("read", self._memory_infos)
        return {
            "redis_used_bytes": float(sum(info.get("used_memory", 0) for info in infos)),
            "redis_limit_bytes": float(sum(info.get("maxmemory", 0) for info in infos)),
            "redis_lost_connections": float(self._lost_count),
        }

    def _refuse_eviction(self) -> None:
        """HomeError if the server would drop rows to save memory: they would just be gone."""
        for info in self._call("opened", self._memory_infos):
            policy = str(info.get("maxmemory_policy", ""))
            if policy.startswith("allkeys") and info.get("maxmemory", 0):
                raise HomeError(
                    f"the Redis home at {self._server.name} cannot be opened: the server drops "
                    f"keys when its memory is full (maxmemory-policy {policy}), and state would "
                    "be lost. Set the policy to noeviction."
                )

    def _memory_infos(self, client: Any) -> list[dict[str, Any]]:
        if not self._server.is_cluster:
            return [client.info("memory")]
        nodes = client.get_primaries()
        return [client.info("memory", target_nodes=node) for node in nodes]

    def _hash(self, leaf: int, state: int) -> str:
        return f"{self._server.prefix}:{{{leaf}}}:{state}"

    @property
    def _meta(self) -> str:
        return f"{self._server.prefix}:meta"

    def _open_client(self, done: str) -> Any:
        client = self._client
        if client is None:
            raise HomeError(
                f"the Redis home at {self._server.name} cannot be {done}: it was closed. "
                "Open it again."
            )
        return client

    def _call(self, done: str, command: Callable[[Any], _T], attempts: int = 2) -> _T:
        """command(client), again if the connection is lost. `done` is for the message."""
        while True:
            client = self._open_client(done)
            attempts -= 1
            try:
                if self._has_stragglers:
                    self._cut_off(client)
                return command(client)
            except self._failures as error:
                if done == "written" and isinstance(error, self._is_late):
                    self._has_stragglers = True
                is_lost = isinstance(error, self._losses) and not isinstance(error, self._refusals)
                self._lost_count += is_lost
                if not is_lost or not attempts:
                    raise self._failed(done, error) from error

    def _cut_off(self, client: Any) -> None:
        """Has the server close all connections of ours but one.

        What was sent on a connection that is lost to us may be on its way for long, and would
        overwrite what is written from now on.
        """
        nodes = [client]
        if self._server.is_cluster:
            nodes = [client.get_redis_connection(node) for node in client.get_primaries()]
        for node in nodes:
            node.connection_pool.disconnect()
            try:
                for other in node.client_list():
                    if other.get("name") == self._name:
                        node.client_kill_filter(_id=other["id"], skipme=True)
            except _redis().exceptions.NoPermissionError as error:
                _log.warning(
                    "the Redis home at %s was out of reach for a moment, and its server does not "
                    "let this user close connections (%s): a write that was given up may still "
                    "come. Allow CLIENT LIST and CLIENT KILL.",
                    self._server.name,
                    error,
                )
        self._has_stragglers = False

    def _failed(self, done: str, error: Exception) -> HomeError:
        # A pipeline puts the whole command, with its values, in front of the reason.
        reason = str(error).rpartition("caused error: ")[2][:_REASON_CHARS_MAX].rstrip(". ")
        found = " ".join([*(base.__name__ for base in type(error).__mro__), reason])
        advice = next(
            (advice for words, advice in _ADVICE if any(word in found for word in words)),
            _ADVICE_ELSE,
        )
        return HomeError(
            f"the Redis home at {self._server.name} cannot be {done}: {reason}. {advice}"
        )


_Puts = dict[str, dict[bytes, bytes]]  # by the name of the hash
_Deletes = dict[str, list[bytes]]


def _scan(name: str, cursor: int, count: int) -> Callable[[Any], tuple[int, dict[bytes, bytes]]]:
    return lambda client: client.hscan(name, cursor, count=count)


def _run_of(client: Any, name: str) -> str:
    """The run of the server that has a hash: another one after each start, and on each server."""
    if hasattr(client, "get_node_from_key"):
        client = client.get_redis_connection(client.get_node_from_key(name))
    run: str = client.info("server")["run_id"]
    return run


def _send(
    puts: _Puts, deletes: _Deletes, gone: Sequence[str] = (), is_transaction: bool = False
) -> Callable[[Any], None]:
    def send(client: Any) -> None:
        with client.pipeline(transaction=is_transaction) as pipe:
            for name in gone:
                pipe.unlink(name)
            for name, values in puts.items():
                pipe.hset(name, mapping=values)
            for name, keys in deletes.items():
                pipe.hdel(name, *keys)
            pipe.execute()

    return send
