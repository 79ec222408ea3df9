"""HTTP: what may be asked of a running job from outside, on this machine only.

    POST /scale?stage=count&workers=4       without workers, one more
    POST /drain?worker=count-0              its key-groups go to the others, and it ends
    POST /move?stage=count&key-groups=0-9&to=count-1
    POST /abort-rescale                     what has moved goes back; &number= of one that waits
    GET  /rescales                          what was done and what is being done
    GET  /metrics                           for Prometheus, of all processes

The first three may have strategy=, step=, gap= and pace= (strategies.py).

A web page that a user of this machine looks at must not be able to scale a job: every request needs
the token, and Host and Origin must be ours (a page of another site can send neither).
"""

import hmac
import json
import secrets
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from statekit.engine.metrics import exposition
from statekit.engine.rescales import Rescale
from statekit.engine.running import Running
from statekit.errors import EngineError, StateKitError

_HOSTS = ("127.0.0.1", "localhost")
_HOW = ("strategy", "step", "gap", "pace")
#: What each request may say; what it must say comes first, and how many of these there are.
_POSTS = {
    "/scale": (1, ("stage", "workers", *_HOW)),
    "/drain": (1, ("worker", *_HOW)),
    "/move": (3, ("stage", "key-groups", "to", *_HOW)),
    "/abort-rescale": (0, ("number",)),
}


class Api:
    """A server for one job. `token` must come with every request."""

    def __init__(self, running: Running, port: int = 0, token: str | None = None) -> None:
        self.token = token or secrets.token_urlsafe(24)
        api = self

        class Handler(_Handler):
            job, expected = running, api.token

        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        except OSError as error:
            why = error.strerror or str(error)
            raise EngineError(
                f"cannot listen at port {port}: {why}. Pass another one, or 0 for any."
            ) from None
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> "Api":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Handler(BaseHTTPRequestHandler):
    job: Running
    expected: str

    def do_POST(self) -> None:
        if self._is_refused():
            return
        target = urlsplit(self.path)
        if target.path not in _POSTS:
            known = ", ".join(_POSTS)
            self._answer(404, {"error": f"there is no {target.path!r} to post to, but {known}."})
            return
        try:
            query = _checked(target.path, parse_qs(target.query, keep_blank_values=True))
            rescale = self._do(target.path, query)
        except (ValueError, StateKitError) as error:
            self._answer(400, {"error": str(error)})
        else:
            self._answer(200, rescale.as_dict())

    def do_GET(self) -> None:
        if self._is_refused():
            return
        path = urlsplit(self.path).path
        if path == "/rescales":
            self._answer(200, [rescale.as_dict() for rescale in self.job.rescales])
        elif path == "/metrics":
            self._send(200, "text/plain; version=0.0.4", exposition(self.job.figures).encode())
        else:
            self._answer(404, {"error": f"there is no {path!r}: GET /rescales or /metrics."})

    def _do(self, path: str, query: dict[str, str]) -> Rescale:
        job = self.job
        if path == "/abort-rescale":
            return job.abort_rescale(_number(query, "number"))
        how: dict[str, Any] = {"step": _number(query, "step"), "pace": _number(query, "pace")}
        if "gap" in query:
            how["gap_s"] = _seconds(query["gap"])
        strategy = query.get("strategy")
        if path == "/drain":
            return job.drain(query["worker"], strategy, **how)
        if path == "/move":
            groups = key_groups(query["key-groups"])
            return job.move(query["stage"], groups, query["to"], strategy, **how)
        workers = _number(query, "workers")
        if workers is None:
            workers = job.workers(query["stage"]) + 1
        return job.scale(query["stage"], workers, strategy, **how)

    def _is_refused(self) -> bool:
        host = self.headers.get("Host", "")
        origin = self.headers.get("Origin")
        ours = {f"{name}:{self.server.server_address[1]}" for name in _HOSTS}  # type: ignore[index]
        if host not in ours or (origin is not None and origin.removeprefix("http://") not in ours):
            self._answer(403, {"error": "this is for programs of this machine only."})
            return True
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.expected.encode()):
            self._answer(401, {"error": "the token is missing or wrong: Authorization: Bearer ..."})
            return True
        return False

    def _answer(self, code: int, what: Any) -> None:
        self._send(code, "application/json", json.dumps(what).encode() + b"\n")

    def _send(self, code: int, kind: str, data: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing: it would print the query of every request."""


def _checked(path: str, query: dict[str, list[str]]) -> dict[str, str]:
    """What a request says. ValueError if it says too much or too little."""
    needed, known = _POSTS[path]
    if wrong := [name for name, values in query.items() if name not in known or values[1:]]:
        raise ValueError(f"{wrong[0]!r}: pass {', '.join(known)}, each once at most.")
    if missing := [name for name in known[:needed] if name not in query]:
        raise ValueError(f"{missing[0]} is missing.")
    return {name: values[0] for name, values in query.items()}


def _number(query: dict[str, str], name: str) -> int | None:
    text = query.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise ValueError(f"{name}={text!r} is no number.")
    return int(text)


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"gap={text!r} is no number of seconds.") from None


def key_groups(text: str) -> list[int]:
    """Key-groups as "3", "3-9" or "3-9,12". EngineError if it is none of these."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        ends = (first, last) if dash else (first, first)
        if not all(end.isascii() and end.isdecimal() and len(end) < 7 for end in ends):
            raise EngineError(f"{part!r} names no key-groups. Pass numbers, such as 3-9,12.")
        found += range(int(ends[0]), int(ends[1]) + 1)
    if not found:
        raise EngineError(f"there is no key-group in {text!r}: the first comes before the last.")
    return found
