"""The commands `auth init | issue | token | show | revoke | table`: secrets, certificates and tokens of a job.

All but `revoke` work without a service, since the holder of the job's secret has the job's authority. Secrets and
private keys are never printed. They are written to files that only this user can read. A token of a role is printed,
unless a file is named for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from axon_ps.cli import options as o
from axon_ps.errors import ConfigurationError

if TYPE_CHECKING:
    from axon_ps.cli.settings import Settings
    from axon_ps.rpc.auth.identity import Identity

app = o.Commands(help="Make, show and revoke the secrets, certificates and tokens of a job.")

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST_S: Final = 36500 * 86400
_FOR_TOKENS: Final = "12h"
_FOR_CERTIFICATES: Final = "24h"

Role = Annotated[str, typer.Option(help="worker, shard, coordinator, operator or observer.", show_default=False)]
Rank = Annotated[int | None, typer.Option(help="The only rank it is good for.", min=0, show_default="any")]
Expires = Annotated[str, typer.Option(help="How long it holds: 90s, 30m, 12h, 7d.")]


_of_files = partial(o.of_a_job, named=False)


@app.command()
def init(
    file: Annotated[Path, typer.Argument(help="File to write the secret to.", show_default=False)],
    add: Annotated[
        bool, typer.Option("--add", help="Add a second secret to a file that has one, to rotate it.")
    ] = False,
    if_missing: Annotated[
        bool, typer.Option("--if-missing", help="Leave a file that is there already as it is.")
    ] = False,
    authority: Annotated[
        Path | None,
        typer.Option(help="Write the certificate of the job's authority here, for browsers and Prometheus."),
    ] = None,
) -> None:
    """Make the secret of a job: the holder of the file has every role, and makes certificates and tokens from it."""
    from axon_ps.rpc.auth.authority import JobAuthority
    from axon_ps.rpc.auth.tokens import new_secret

    if if_missing and file.exists():
        print(f"{file} is there already")
        return
    secret = new_secret()
    if file.exists() != add:
        hint = "there is no such file to add to" if add else "it is there already: another name, or --add to rotate it"
        raise ConfigurationError(f"{file}: {hint}")
    before = _content(file).split() if add else []
    _write_private(file, "".join(f"{line}\n" for line in (*before, secret)), replace=add)
    print(f"{file} has a new secret: give it to all processes of the job as --token-file or AXON_PS_TOKEN_FILE")
    if add:
        print("once all have it, put its line first, everywhere; then remove the old one")
    if authority is not None:
        authority.write_bytes(JobAuthority(secret).certificate)
        print(f"{authority} has the certificate of its authority, which is not secret")


@app.command()
@_of_files
def issue(
    directory: Annotated[Path, typer.Argument(help="Directory for the files.", show_default=False)],
    role: Role,
    rank: Rank = None,
    host: Annotated[
        list[str] | None, typer.Option(help="Host name or address of a server; may be repeated.", show_default=False)
    ] = None,
    expires: Expires = _FOR_CERTIFICATES,
    *,
    settings: Settings,
) -> None:
    """Make a certificate and a key of one role, for a process without the secret: it takes --tls-dir DIRECTORY."""
    from axon_ps.rpc.auth.authority import authority_of, roots_of
    from axon_ps.rpc.auth.certificates import SPIRE_FILES

    secrets = settings.security().tokens()
    authority = authority_of(_secret(secrets))
    issued = authority.issue(_identity(settings, role, rank), _seconds(expires), hosts=host or ())
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write_private(directory / SPIRE_FILES["key_file"], issued.key.decode(), replace=True)
    for name, content in (("cert_file", issued.chain), ("ca_file", roots_of(secrets))):
        _replace(directory / SPIRE_FILES[name], content.decode(), 0o644)
    print(_certificate_text(issued.chain))


@app.command()
@_of_files
def token(
    role: Role,
    rank: Rank = None,
    expires: Expires = _FOR_TOKENS,
    out: Annotated[Path | None, typer.Option(help="File to write it to, instead of printing it.")] = None,
    *,
    settings: Settings,
) -> None:
    """Make a token of one role from the job's secret; services accept it without being told of it."""
    from axon_ps.rpc.auth.tokens import mint

    made = mint(_secret(settings.security().tokens()), _identity(settings, role, rank), _seconds(expires))
    if out is None:
        print(made)
    else:
        _write_private(out, f"{made}\n", replace=True)
        print(_token_text(made))


@app.command()
@_of_files
def show(
    file: Annotated[Path | None, typer.Argument(help="A certificate, or a file of tokens.", show_default=False)] = None,
    *,
    settings: Settings,
) -> None:
    """Show the role and the end of a certificate or a token; without a file, those of this process's tokens."""
    if file is None:
        found = settings.security().tokens()
        if not found:
            raise ConfigurationError("nothing is set: name a file, or set AXON_PS_TOKEN or AXON_PS_TOKEN_FILE")
        print("\n".join(map(_token_text, found)))
        return
    content = _content(file)
    if "PRIVATE KEY-----" in content:
        print(
            "a private key" + ("" if _is_private(file) else "; other users of this machine can read it: chmod 600 it")
        )
    elif "-----BEGIN CERTIFICATE-----" in content:
        try:
            print(_certificate_text(content.encode()))
        except ValueError as error:
            raise ConfigurationError(f"{file} holds no certificate that can be read: {error}") from error
    else:
        print("\n".join(map(_token_text, content.split())) or "nothing")


@app.command()
@o.of_a_job
def revoke(
    target: Annotated[
        str,
        typer.Argument(help="A member (worker/3), an id or serial number that `auth show` prints.", show_default=False),
    ],
    reason: Annotated[str, typer.Option(help="Reason that refused callers get.")] = "",
    timeout_s: o.Timeout = 10.0,
    *,
    settings: Settings,
) -> None:
    """Revoke credentials everywhere in a running job; a member that has them is ended within a second."""
    from axon_ps.cli.operations import client

    async def ask() -> None:
        async with client(settings) as operator:
            reply = await operator.revoke(target, reason, timeout_s)
        print(f"revoked {', '.join(reply.names)}")
        for member in reply.members:
            print(f"{member} was ended")
        if reply.has_secret:
            print(
                "it holds the job's secret, and can make itself other credentials when it is started again: rotate the "
                "secret (axon-ps auth init --add)",
                file=sys.stderr,
            )

    asyncio.run(ask())


@app.command()
def table(as_json: o.Json = False) -> None:
    """Print which role may call what."""
    from axon_ps.rpc.access import MAY_CALL, short
    from axon_ps.rpc.auth.identity import Principal

    roles = {
        short(row): None if may is None else [p.value for p in Principal if p in may] for row, may in MAY_CALL.items()
    }
    if as_json:
        print(json.dumps(roles, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    printed = Table("call", *(p.value for p in Principal), box=None)
    for row, may in roles.items():
        columns = ["anybody"] * len(Principal) if may is None else ["yes" if p.value in may else "" for p in Principal]
        printed.add_row(row, *columns)
    Console().print(printed)


def _secret(tokens: tuple[str, ...]) -> str:
    from axon_ps.rpc.auth.tokens import check_strong

    secret = next(iter(tokens), "")
    check_strong(secret, "making credentials")
    return secret


def _identity(settings: Settings, role: str, rank: int | None) -> Identity:
    from axon_ps.rpc.auth.identity import Identity, Principal

    if role not in (names := [p.value for p in Principal]):
        raise ConfigurationError(f"--role is {role!r}; it must be one of {', '.join(names)}")
    if rank is not None and role not in ("worker", "shard"):
        raise ConfigurationError(f"--rank is of workers and shard servers; the role {role} has none")
    return Identity(Principal(role), settings.job, rank)


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+)([smhd])", text)
    if match is None or not 0 < (seconds := int(match[1]) * _UNITS[match[2]]) <= _LONGEST_S:
        raise ConfigurationError(f"--expires is {text!r}; it must be like 90s, 30m, 12h or 7d, and at most 36500d")
    return float(seconds)


def _certificate_text(pem: bytes) -> str:
    from axon_ps.rpc.auth.certificates import peer_certificate
    from axon_ps.rpc.auth.tokens import as_text

    found = peer_certificate(pem)
    whose = "a certificate of no role (no SPIFFE ID)" if found.identity is None else f"a certificate: {found.identity}"
    until = f"{'until' if found.expires_s > time.time() else 'expired at'} {as_text(found.expires_s)}"
    process = f", process {found.process}" if found.process and found.identity else ""
    return f"{whose}; {until}; serial number {found.serial}{process}"


def _token_text(text: str) -> str:
    from axon_ps.rpc.auth.tokens import as_text, is_role_token, is_strong, read_unverified

    if not is_role_token(text):
        good = (
            "good" if is_strong(text) else "too short: it could be guessed, so neither TLS nor tokens are made from it"
        )
        return f"a secret of a job, of {len(text)} characters ({good})"
    claims = read_unverified(text)
    until = f"{'until' if claims.expires_s > time.time() else 'expired at'} {as_text(claims.expires_s)}"
    return f"a token: {claims.identity}; {until}; id {claims.id}"


def _content(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}") from error


def _write_private(path: Path, text: str, *, replace: bool) -> None:
    """Write a file that no other user can read, not even while it is written."""
    if not replace and path.exists():
        raise ConfigurationError(f"{path} is there already")
    _replace(path, text, 0o600)


def _replace(path: Path, text: str, mode: int) -> None:
    """Write a file aside, then rename it: a reader sees the old content or the new."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(fd, "w") as file:
            file.write(text)
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise ConfigurationError(f"{path} cannot be written: {error.strerror or error}") from error


def _is_private(path: Path) -> bool:
    return not path.stat().st_mode & 0o077
