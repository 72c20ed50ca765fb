"""Places at which this process opens checkpoints: requests name URIs, and its configuration allows some.

Note: [Roots]
    A local directory is allowed if it lies in a root once every link and `..` is followed, and is looked at again when
    it is open: what it is then counts, so exchanging a directory for a link afterwards does not help. Of a URI with a
    scheme, the text decides; `..` in it is refused. A chain of file systems ("zip::s3://...") is never opened. Without
    roots, local paths and object stores are allowed: so in a process that only its own user asks.
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
    """Have this process open checkpoints only in these directories, given as paths or URIs.

    Args:
        roots: the directories; none = nothing is opened. None = every path and every object store.
    """
    global _roots
    _roots = None if roots is None else tuple(place_of(root) for root in roots)


def default_roots(*, private: bool, configured: Iterable[str]) -> list[str] | None:
    """The roots of a service for which none were given.

    Args:
        private: whether only this machine's processes that know the job's token can ask it: those of its own user.
        configured: the places that its configuration names: the job's checkpoints, and what it resumes from.

    Returns:
        None for a private service. Else what is configured, and the directory that it was started in (unless that is
        the root of the file system), so that scripts may save to `checkpoints/run-1`.
    """
    if private:
        return None
    here = os.path.realpath(os.curdir)
    return [*(place for place in configured if place), *([here] if here != os.path.realpath(os.sep) else [])]


def roots_of_children(*, private: bool, configured: Iterable[str]) -> dict[str, str]:
    """The variable by which services that this process starts have the roots that it would have; none if private."""
    roots = default_roots(private=private, configured=configured)
    return {} if roots is None else {VARIABLE: ",".join(roots)}


def restricted() -> bool:
    """Whether there are roots; then no link is followed out of them."""
    return _roots is not None


def check_allowed(uri: str) -> None:
    """Refuse a place that this process may not open.

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
    _check_place(uri, place_of(uri))


def check_opened(descriptor: int, uri: str) -> None:
    """Refuse a local directory that turns out to lie in no root now that it is open.

    Raises:
        ConfigurationError: it does.
    """
    if _roots is not None:
        _check_place(uri, os.path.realpath(f"/proc/self/fd/{descriptor}"))


def _check_place(uri: str, place: str) -> None:
    if _roots is not None and not any(is_in(place, root) for root in _roots):
        allowed = f"only in {', '.join(_roots)}" if _roots else "nowhere"
        raise ConfigurationError(f"{uri} is not opened: this process opens checkpoints {allowed}; {_HOW}")


def is_in(place: str, root: str) -> bool:
    """Whether a place is another, or in it."""
    return place == root or place.startswith(root.rstrip("/") + "/")


def place_of(uri: str) -> str:
    """A place in its only spelling: a real path, or a URI that does not lead out of its directory.

    Raises:
        InvalidRequest: it does.
    """
    scheme, colon, rest = uri.partition("://")
    if not colon or scheme == "file":
        return os.path.realpath(rest if colon else uri)
    if ".." in rest.split("/"):
        raise InvalidRequest(f"{uri} has '..' in it; give the URI of the directory itself")
    return uri.rstrip("/")
