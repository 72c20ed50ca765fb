"""Signatures of checkpoints: only a process with the job's key can make a manifest that the job's coordinator loads.

The hash that a manifest has of itself is signed, and so is everything in it: the job's name, the layout, every file
with its hash. The key is derived from a secret of the job that outlives a run, since a job resumes from an earlier
run's checkpoint. So it is not derived from the job's token, which `axon-ps run` may draw anew. Without a key
nothing is signed, and no signature is required.

Of a job's processes only the coordinator uses the key. It tells shard servers the hash of the manifest that it has
checked, so they load that manifest, and not a later one in its place.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from axon_ps.errors import CheckpointError, ConfigurationError
from axon_ps.storage.roots import is_in, location_of

MIN_SECRET_BYTES: Final = 32
_PURPOSE: Final = b"axon_ps checkpoint manifest"

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ManifestKey:
    """The key that signs manifests. Make it with `derive`, or `read`."""

    key: bytes = field(repr=False)

    @classmethod
    def derive(cls, secret: bytes) -> ManifestKey:
        """Derive the key from a job's secret: HKDF with SHA-256 (RFC 5869), for this purpose alone."""
        extracted = hmac.digest(bytes(hashlib.sha256().digest_size), secret, "sha256")
        return cls(hmac.digest(extracted, _PURPOSE + b"\x01", "sha256"))

    @classmethod
    def read(cls, path: Path) -> ManifestKey:
        """Derive the key from the secret in a file.

        Raises:
            ConfigurationError: the file cannot be read, or holds too little.
        """
        try:
            secret, mode = path.read_bytes().strip(), path.stat().st_mode
        except OSError as error:
            raise ConfigurationError(f"the checkpoints' key file {path} cannot be read: {error.strerror}") from error
        if len(secret) < MIN_SECRET_BYTES:
            raise ConfigurationError(
                f"the checkpoints' key file {path} holds {len(secret)} bytes; a secret has at least "
                f"{MIN_SECRET_BYTES}, such as `openssl rand -hex 32` makes"
            )
        if mode & 0o077:
            _logger.warning("the checkpoints' key file %s can be read by other users; chmod 600 it", path)
        return cls.derive(secret)

    def sign(self, digest: str) -> str:
        """Return the signature of a manifest with a hash, in hex."""
        return hmac.digest(self.key, digest.encode(), "sha256").hex()

    def signed(self, digest: str, signature: str) -> bool:
        """Return True if a signature is ours."""
        return hmac.compare_digest(self.sign(digest), signature)


_key: ManifestKey | None = None
_trusted: tuple[str, ...] = ()


def use_key(key: ManifestKey | None, trusted: Sequence[str] = ()) -> None:
    """Let this process sign the manifests that it writes, and refuse those that it did not sign.

    Args:
        key: None = neither.
        trusted: checkpoints, or directories of checkpoints, that are loaded with any signature, or with none.
    """
    global _key, _trusted
    _key, _trusted = key, tuple(location_of(uri) for uri in trusted)


def key_in_use() -> ManifestKey | None:
    """Return the key with which this process signs; None = it does not."""
    return _key


def check_signature(uri: str, digest: str, signature: str) -> None:
    """Refuse a manifest that this process must not load.

    Args:
        uri: of the checkpoint.
        digest: the hash that the manifest has of itself.
        signature: the signature in it; empty = none.

    Raises:
        CheckpointError: it is not signed with the key in use, and not trusted by name.
    """
    if _key is None or (signature and _key.signed(digest, signature)):
        return
    if any(is_in(location_of(uri), location) for location in _trusted):
        _logger.warning("%s is not signed with this job's key, and is loaded because --trust-checkpoint names it", uri)
        return
    what = "is signed with another key than this job's" if signature else "is not signed, and this job has a key"
    raise CheckpointError(
        f"{uri} {what}, so somebody else may have written it; nothing was loaded. If you know where it is from, start "
        f"the coordinator with --trust-checkpoint {uri}"
    )
