"""How other processes are reached: token, certificates, patience. Options of several commands."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from statekit.errors import ArgumentError
from statekit.migration.strategies import TIMEOUT_S
from statekit.remote.security import TLS, check_token

if TYPE_CHECKING:
    from statekit.remote.channel import PeerChannel

C = TypeVar("C", bound=Callable[..., Any])


class Access(NamedTuple):
    """What this side shows to a process that serves, and how long that may take to answer."""

    tls: TLS | None
    token: str | None
    timeout_s: float

    def connect(self, address: str) -> "PeerChannel":
        from statekit.remote.channel import PeerChannel

        return PeerChannel(address, tls=self.tls, token=self.token, timeout_s=self.timeout_s)


def token_option(text: str) -> Callable[[C], C]:
    return click.option("--token-file", metavar="PATH", help=text)


def tls_options(command: C) -> C:
    for name, text in (
        ("--tls-ca", "Who signed the certificates of the other side. PEM."),
        ("--tls-key", "Its private key. PEM."),
        ("--tls-cert", "The certificate of this side. PEM."),
    ):
        command = click.option(name, metavar="PATH", help=text)(command)
    return command


def access_options(command: C) -> C:
    """The options of a command that talks to other processes. It gets an Access as `access`."""

    @wraps(command)
    def call(
        *args: Any,
        token_file: str | None,
        tls_cert: str | None,
        tls_key: str | None,
        tls_ca: str | None,
        timeout: float,
        **given: Any,
    ) -> Any:
        access = Access(read_tls(tls_cert, tls_key, tls_ca), read_token(token_file), timeout)
        return command(*args, access=access, **given)

    patience = click.option(
        "--timeout",
        type=click.FloatRange(min=0.1),
        default=TIMEOUT_S,
        show_default=True,
        metavar="S",
        help="Seconds after which a process that does not answer is lost.",
    )
    return token_option("A file with the token to show.")(tls_options(patience(call)))  # type: ignore[return-value]


def read_tls(cert: str | None, key: str | None, ca: str | None) -> TLS | None:
    if (cert is None) != (key is None):
        raise click.UsageError("--tls-cert and --tls-key go together.")
    return None if cert is None and ca is None else TLS(cert, key, ca)


def read_token(file: str | None) -> str | None:
    if file is None:
        return None
    try:
        return check_token(Path(file).read_text(encoding="utf-8").strip())
    except UnicodeDecodeError:
        raise ArgumentError(
            f"{file!r} is no text. Put a token into it, and nothing else."
        ) from None
    except ArgumentError as error:
        raise ArgumentError(f"{file!r} holds no token: {error}") from None
