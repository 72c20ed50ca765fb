"""The directories in which this process opens checkpoints: requests name URIs, and its configuration allows some.

Note: [Roots]
    A local directory is allowed if it lies in a root once every link and `..` is followed. It is checked again when it
    is open, so it does not help to exchange a directory for a link after the first check. A URI with a scheme is
    checked by its text, and refused if that has `..` in it. A chain of file systems ("zip::s3://...") is never opened.
    Without roots, all of `SCHEMES` are allowed: this is for a process that only its own user can send requests to.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Final

from axon_ps.errors import ConfigurationError, InvalidRequest

OBJECT_STORES: Final = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})
SCHEMES: Final = OBJECT_STORES | {"file", "memory"}

VARIABLE: Final = "AXON_PS_CHECKPOINT_ROOTS"
"""Roots, with commas between them."""

_HOW: Final = "--checkpoint-dir or AXON_PS_CHECKPOINT_ROOTS, with the directory of the checkpoints, lets it"

_roots: tuple[str, ...] | None = None


def allow_roots(roots: Sequence[str] | None) -> None:
    """Let this process open checkpoints only in these directories, given as paths or URIs.

    Args:
        roots: the directories; empty = nothing is opened, None = every location of `SCHEMES`.
    """
    global _roots
    _roots = None if roots is None else tuple(location_of(root) for root in roots)


def default_roots(*, private: bool, configured: Iterable[str]) -> list[str] | None:
    """Return the roots of a service for which none were given.

    Args:
        private: whether only this machine's processes that know the job's token can call it: those of its own user.
        configured: the directories that its configuration names: for the job's checkpoints, and to resume from.

    Returns:
        None for a private service. Else the configured directories, and the process's first working directory (unless
        it is the root of the file system), so that scripts may save to `checkpoints/run-1`.
    """
    if private:
        return None
    here = os.path.realpath(os.curdir)
    return [*filter(None, configured), *([here] if here != os.path.realpath(os.sep) else [])]


def roots_of_children(*, private: bool, configured: Iterable[str]) -> dict[str, str]:
    """Return the variable that gives services started by this process its own default roots; empty if private."""
    roots = default_roots(private=private, configured=configured)
    return {} if roots is None else {VARIABLE: ",".join(roots)}


def restricted() -> bool:
    """Return True if there are roots. Then no link is followed out of them."""
    return _roots is not None


def check_allowed(uri: str) -> None:
    """Refuse a location that this process may not open.

    Raises:
        ConfigurationError: it has another scheme than allowed, or lies in no root.
        InvalidRequest: it is empty, or is a URI with `..` in it.
    """
    if not uri:
        raise InvalidRequest("the URI of a checkpoint is empty; give a directory or a URI")
    scheme = uri.partition("://")[0] if "://" in uri else "file"
    allowed = SCHEMES | {root.partition("://")[0] for root in _roots or () if "://" in root}
    if "::" in uri or scheme not in allowed:
        raise ConfigurationError(
            f"{uri} is not opened: a checkpoint is at a path or an URI of {', '.join(sorted(SCHEMES))}; "
            "AXON_PS_CHECKPOINT_ROOTS can allow others"
        )
    _check_location(uri, location_of(uri))


def check_opened(descriptor: int, uri: str) -> None:
    """Refuse a local directory that turns out to lie in no root now that it is open.

    Raises:
        ConfigurationError: it lies in no root.
    """
    if _roots is not None:
        _check_location(uri, os.path.realpath(f"/proc/self/fd/{descriptor}"))


def _check_location(uri: str, location: str) -> None:
    if _roots is not None and not any(is_in(location, root) for root in _roots):
        allowed = f"only in {', '.join(_roots)}" if _roots else "nowhere"
        raise ConfigurationError(f"{uri} is not opened: this process opens checkpoints {allowed}; {_HOW}")


def is_in(location: str, root: str) -> bool:
    """Return True if a location is the root, or lies in it."""
    return location == root or location.startswith(root.rstrip("/") + "/")


def location_of(uri: str) -> str:
    """Return a location in its only spelling: a real path, or a URI that does not lead out of its directory.

    Raises:
        InvalidRequest: the URI leads out.
    """
    scheme, colon, rest = uri.partition("://")
    if not colon or scheme == "file":
        return os.path.realpath(rest if colon else uri)
    if ".." in rest.split("/"):
        raise InvalidRequest(f"{uri} has '..' in it; give the URI of the directory itself")
    return uri.rstrip("/")
