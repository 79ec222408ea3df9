"""Who may connect, and to whom: addresses, certificates and the shared token.

The rules, in one place:

- A server listens on loopback or a Unix socket only, unless it has TLS and asks its peers who they
  are: for a token, or for certificates of their own (mutual TLS).
- A token goes over TLS, or stays in this machine.
- insecure=True lifts both rules, and is for networks that nobody else can reach.
- A peer may say that a later generation has begun, so that this process owns nothing any more. That
  is believed only if the peer has shown who it is, by the token or by a certificate.
"""

import hmac
import ipaddress
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

from statekit.errors import ArgumentError, PeerRefusedError, shorten

PEM: TypeAlias = str | os.PathLike[str] | bytes  # the path of a file, or its contents

TOKEN_CHARS_MIN = 16  # 96 bits, if it is random and in base64
TOKEN_CHARS_MAX = 1024  # the token is sent with every call
TOKEN_KEY = "authorization"
_TOKEN = re.compile(r"[!-~]+")
_HOST = re.compile(r"[A-Za-z0-9_.-]{1,253}")
_PORT = re.compile(r"[0-9]{1,5}")
_UNIX_BYTES_MAX = 107  # of a path: sun_path is that long


class Address(NamedTuple):
    """Where a process listens: "host:port", "[::1]:7000" or "unix:/path"."""

    host: str  # without brackets; a path if port is None
    port: int | None

    @property
    def is_local(self) -> bool:
        """Nobody outside this machine can listen in."""
        if self.port is None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def at(self, port: int) -> "Address":
        return self if self.port is None else Address(self.host, port)

    def __str__(self) -> str:
        if self.port is None:
            return f"unix:{self.host}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(address: str) -> Address:
    """The parts of an address.

    >>> parse_address("[::1]:7000")
    Address(host='::1', port=7000)
    >>> str(parse_address("localhost:0")), parse_address("10.0.0.1:7000").is_local
    ('localhost:0', False)
    """
    if not isinstance(address, str):
        raise _bad_address(address)
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        if not path or "\0" in path or len(os.fsencode(path)) > _UNIX_BYTES_MAX:
            raise _bad_address(address)
        return Address(os.path.abspath(path), None)
    host, colon, port = address.rpartition(":")
    if not colon or not _PORT.fullmatch(port) or int(port) > 65535:
        raise _bad_address(address)
    if host.startswith("[") and host.endswith("]"):
        try:
            return Address(str(ipaddress.IPv6Address(host[1:-1])), int(port))
        except ValueError:
            raise _bad_address(address) from None
    if not _HOST.fullmatch(host):
        raise _bad_address(address)
    return Address(host.lower(), int(port))


def _bad_address(address: object) -> ArgumentError:
    return ArgumentError(
        f"{shorten(address)} is no address. "
        'Use "host:port", "[::1]:port" for IPv6, or "unix:/path/of/a/socket".'
    )


@dataclass(frozen=True, slots=True)
class TLS:
    """Certificates, as paths of PEM files or as their contents.

    cert, key    who this process is: needed by a server, and by a client of a server with `ca`
    ca           who signed the certificates of the other side. A server that has a ca lets nobody
                 in without a certificate (mutual TLS). A client without a ca trusts what the system
                 trusts
    server_name  the name that a client expects in the server's certificate, if it is not the host
                 in the address
    """

    cert: PEM | None = None
    key: PEM | None = field(default=None, repr=False)
    ca: PEM | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ArgumentError("TLS needs both cert and key, or neither of them.")

    def __repr__(self) -> str:
        parts = [
            f"{name}={'<bytes>' if isinstance(value, bytes) else repr(str(value))}"
            for name in ("cert", "ca", "server_name")
            if (value := getattr(self, name)) is not None
        ]
        return f"TLS({', '.join(parts)})"

    def read(self) -> "Certificates":
        """What is in the files. ArgumentError if one cannot be read."""
        return Certificates(
            _pem(self.cert, "cert", b"CERTIFICATE"),
            _pem(self.key, "key", b"PRIVATE KEY"),
            _pem(self.ca, "ca", b"CERTIFICATE"),
        )


class Certificates(NamedTuple):
    """The contents of the files of a TLS. Never shown, because the key is a secret."""

    cert: bytes | None
    key: bytes | None
    ca: bytes | None

    def __repr__(self) -> str:
        return "<Certificates>"


def _pem(given: PEM | None, name: str, kind: bytes) -> bytes | None:
    if given is None:
        return None
    if isinstance(given, bytes):
        data, place = given, "the bytes given"
    else:
        place = repr(os.fspath(given))
        try:
            data = Path(given).read_bytes()
        except (OSError, ValueError) as error:
            raise ArgumentError(
                f"TLS.{name}: {place} cannot be read ({error}). Give the path of a PEM file."
            ) from None
    if b"-----BEGIN " not in data or kind not in data:
        raise ArgumentError(
            f"TLS.{name}: {place} hold no {kind.decode().lower()} in PEM. "
            f"Give what begins with -----BEGIN {kind.decode()}-----."
        )
    return data


# ---- The token


def check_token(token: str | None) -> str | None:
    """Returns the token. ArgumentError, which does not show it, if it is not a possible token."""
    if token is None:
        return None
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        raise ArgumentError(
            "the token must be a str of visible ASCII characters, without spaces. "
            "Make one with secrets.token_urlsafe(32)."
        )
    if not TOKEN_CHARS_MIN <= len(token) <= TOKEN_CHARS_MAX:
        raise ArgumentError(
            f"the token has {len(token)} characters; it must have {TOKEN_CHARS_MIN} to "
            f"{TOKEN_CHARS_MAX}. Make one with secrets.token_urlsafe(32)."
        )
    return token


def bearer(token: str) -> str:
    """What is sent with a call, under TOKEN_KEY."""
    return f"Bearer {token}"


def shows(expected: bytes, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
    """True if the metadata of a call contain the token. Takes as long for any wrong token."""
    for key, value in metadata:
        if key == TOKEN_KEY:
            given = value.encode() if isinstance(value, str) else value
            if hmac.compare_digest(given, expected):
                return True
    return False


# ---- The rules


def knows_callers(tls: TLS | None, token: str | None) -> bool:
    """Whether a server knows that its callers are members of the job."""
    return bool(token) or (tls is not None and tls.ca is not None)


def knows_servers(tls: TLS | None, token: str | None) -> bool:
    """Whether a caller knows that the server is a member: by its certificate or a shared token."""
    return bool(token) or tls is not None


def unbelieved(generation: int, ours: int, who: str = "a peer") -> PeerRefusedError:
    """The exception for a stranger who says that our generation is over."""
    return PeerRefusedError(
        f"{who} says that generation {generation} has begun; this process is of generation {ours}. "
        "They have shown each other neither a token nor a certificate, so this is not believed, "
        f"and nothing was done. If it is so, call kv.fence({generation}) here. With a token or "
        "TLS on both sides it is obeyed."
    )


def check_server(address: Address, tls: TLS | None, token: str | None, insecure: bool) -> None:
    """ArgumentError if a server there would let strangers in."""
    if tls is not None and tls.cert is None:
        raise ArgumentError("a server with TLS needs its certificate: give TLS(cert=..., key=...).")
    if address.is_local or insecure or (tls is not None and (token or tls.ca is not None)):
        return
    lacks = "TLS" if tls is None else "a token, or a ca for the certificates of its peers"
    raise ArgumentError(
        f"a server at {str(address)!r} can be reached from outside this machine, and has no "
        f"{lacks}. Give tls= and token=, listen on 127.0.0.1, or say insecure=True if nobody else "
        "is in that network."
    )


def check_client(address: Address, tls: TLS | None, token: str | None, insecure: bool) -> None:
    """ArgumentError if the token would be sent where others can read it."""
    if address.port == 0:
        raise ArgumentError(f"{str(address)!r} has no port. Use the address that the server tells.")
    if token and tls is None and not (address.is_local or insecure):
        raise ArgumentError(
            f"the token would go to {str(address)!r} in the clear. Give tls=, or say insecure=True "
            "if nobody else is in that network."
        )
