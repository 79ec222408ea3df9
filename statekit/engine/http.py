"""HTTP: what may be asked of a running job from outside, on this machine only.

    POST /scale?stage=count&workers=4&strategy=prioritised     without workers, one more
    GET  /rescales                                             what was done

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

from statekit.engine.running import Running
from statekit.errors import StateKitError

_HOSTS = ("127.0.0.1", "localhost")
_FIELDS = ("stage", "workers", "strategy")


class Api:
    """A server for one job. `token` must come with every request."""

    def __init__(self, running: Running, port: int = 0, token: str | None = None) -> None:
        self.token = token or secrets.token_urlsafe(24)
        api = self

        class Handler(_Handler):
            job, expected = running, api.token

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
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
        if target.path != "/scale":
            self._answer(404, {"error": f"there is no {target.path!r} to post to: POST /scale."})
            return
        try:
            rescale = self._scale(parse_qs(target.query, keep_blank_values=True))
        except (ValueError, StateKitError) as error:
            self._answer(400, {"error": str(error)})
        else:
            self._answer(200, rescale)

    def do_GET(self) -> None:
        if self._is_refused():
            return
        if urlsplit(self.path).path != "/rescales":
            self._answer(404, {"error": f"there is no {self.path!r}: GET /rescales."})
            return
        self._answer(200, [rescale.as_dict() for rescale in self.job.rescales])

    def _scale(self, query: dict[str, list[str]]) -> dict[str, Any]:
        if wrong := [name for name, values in query.items() if name not in _FIELDS or values[1:]]:
            raise ValueError(f"{wrong[0]!r}: pass stage, workers and strategy, each once.")
        if "stage" not in query:
            raise ValueError("stage is missing: which one is to be scaled?")
        stage = query["stage"][0]
        if "workers" in query:
            text = query["workers"][0]
            if not (text.isascii() and text.isdecimal() and len(text) < 9):
                raise ValueError(f"workers={text!r} is no number of workers.")
            workers = int(text)
        else:
            workers = self.job.workers(stage) + 1
        strategy = query.get("strategy", ["seamless"])[0]
        return self.job.scale(stage, workers, strategy).as_dict()

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
        data = json.dumps(what).encode() + b"\n"
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing: it would print the query of every request."""
