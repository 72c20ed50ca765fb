"""The commands `checkpoint save | ls | restore | export | verify`.

`save` and `restore` ask the running coordinator; the others read the store themselves and need no job.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from axon_ps.cli import options as o
from axon_ps.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    from axon_ps.cli.settings import Settings
    from axon_ps.coordinator.client.operator import OperatorClient
    from axon_ps.storage.manifest import Manifest
    from axon_ps.wire.events import CheckpointReply

app = o.Commands(help="Write, list, load, export and check checkpoints.")

Uri = Annotated[str, typer.Argument(help="Directory or fsspec URI.", show_default=False)]
LongTimeout = Annotated[float, typer.Option(help="Seconds it may take.")]


@app.command()
@o.of_a_job
def save(
    uri: Uri,
    extra: Annotated[str, typer.Option(help="A JSON object to store with it.")] = "{}",
    timeout_s: LongTimeout = 600.0,
    no_progress: o.NoProgress = False,
    *,
    settings: Settings,
) -> None:
    """Have the shard servers write a running job's state to URI."""
    extra_json = _json_object(extra)

    from axon_ps.storage.files import absolute

    async def write(operator: OperatorClient) -> CheckpointReply:
        return await operator.save_checkpoint(absolute(uri), extra_json, timeout_s=timeout_s)

    _operate(settings, write, ("snapshot", "saving", "saved"), no_progress)


@app.command()
@o.of_a_job
def restore(
    uri: Uri,
    timeout_s: LongTimeout = 600.0,
    no_progress: o.NoProgress = False,
    *,
    settings: Settings,
) -> None:
    """Have a running job's shard servers load URI (the newest complete checkpoint of a directory)."""

    from axon_ps.storage.files import absolute

    async def load(operator: OperatorClient) -> CheckpointReply:
        return await operator.restore_checkpoint(absolute(uri), timeout_s=timeout_s)

    _operate(settings, load, ("restore", "restoring", "restored"), no_progress)


@app.command("ls")
def list_(uri: Uri, as_json: o.Json = False) -> None:
    """List the complete checkpoints in a directory, newest last; exit code 2 if there is none."""
    from axon_ps.errors import AxonError, CheckpointNotFound
    from axon_ps.storage.manifest import list_checkpoints, log_damaged, none_readable, nothing_at

    damaged: list[AxonError] = []

    def leave_out(where: str, error: AxonError) -> None:
        damaged.append(error)
        log_damaged(where, error)

    found = list_checkpoints(uri, leave_out)
    if as_json:
        print(json.dumps([_facts(c) for c in found], indent=2))
    else:
        for c in found:
            facts = _facts(c)
            print(f"{facts['uri']}  {_versions(c)}  {facts['bytes']:,} bytes  {facts['created']}")
    if not found:
        raise CheckpointNotFound(str(none_readable(uri, damaged))) if damaged else nothing_at(uri)


@app.command()
def export(
    uri: Uri,
    target: Annotated[
        str, typer.Argument(help="File to write; or, if it ends in /, a Hugging Face directory.", show_default=False)
    ] = "model.safetensors",
    dtype: Annotated[
        str | None, typer.Option(help="Dtype of all tensors, such as bfloat16.", show_default="as the model had them")
    ] = None,
    model: Annotated[str, typer.Option(help="Name of the model, of several.", show_default="the only one")] = "",
    like: Annotated[
        str | None,
        typer.Option(help="Directory whose config and tokenizer are copied into TARGET/.", show_default="none"),
    ] = None,
    prefix: Annotated[
        str, typer.Option(help="For TARGET/: what to leave out of the parameters' names.", show_default="nothing")
    ] = "",
    no_progress: o.NoProgress = False,
) -> None:
    """Write a checkpoint's parameters as one safetensors file that plain PyTorch loads, or as a directory that
    transformers loads."""
    from axon_ps.cli.terminal.progress import Progress
    from axon_ps.errors import InvalidRequest
    from axon_ps.observe.work import LongWork
    from axon_ps.storage.export import export_model
    from axon_ps.storage.hf_directory import export_directory
    from axon_ps.types import parse_dtype

    as_dtype = parse_dtype(dtype, "--dtype") if dtype else None
    work, directory = LongWork("export"), target.endswith("/")
    if (like or prefix) and not directory:
        raise InvalidRequest("--like and --prefix are for a directory; end TARGET in /")
    with Progress("exporting", work, None if no_progress else sys.stderr):
        if directory:
            written = export_directory(
                uri, target.rstrip("/"), as_dtype, model=model, like=like, prefix=prefix, work=work
            )
        else:
            written = export_model(uri, target, as_dtype, model=model, work=work)
    print(f"exported {target} ({written:,} bytes)")


@app.command()
def verify(uri: Uri, no_progress: o.NoProgress = False, checkpoint_key_file: o.CheckpointKeyFile = None) -> None:
    """Read every file of a checkpoint and compare it with its manifest, and say whether that is signed."""
    from axon_ps.cli.settings import load
    from axon_ps.cli.terminal.progress import Progress
    from axon_ps.observe.work import LongWork
    from axon_ps.storage import contents

    work, key_file = LongWork("verify"), load(checkpoint_key_file=checkpoint_key_file).checkpoint_key_file
    with Progress("verifying", work, None if no_progress else sys.stderr):
        verified = contents.verify(uri, work=work)
    signed = _signed(verified, key_file)
    print(f"{verified.uri} is complete and unaltered: {_versions(verified)}, {verified.bytes:,} bytes; {signed}")


def _signed(manifest: Manifest, key_file: Path | None) -> str:
    """Return the signer of a manifest, in words.

    Raises:
        CheckpointError: it is not signed with the key that was given.
    """
    from axon_ps.storage.signature import ManifestKey

    if key_file is None:
        return "signed, and no --checkpoint-key-file was given to compare" if manifest.signature else "not signed"
    if not (manifest.signature and ManifestKey.read(key_file).signed(manifest.sha256, manifest.signature)):
        raise CheckpointError(
            f"{manifest.uri} is complete, but "
            + (f"signed with another key than that of {key_file}" if manifest.signature else "not signed")
        )
    return f"signed with the key of {key_file}"


def _operate(settings: Settings, action: Any, names: tuple[str, str, str], no_progress: bool) -> None:
    """Let the coordinator do something long; `names` are its kind on servers, and the words for it here."""
    from axon_ps.cli.operations import client
    from axon_ps.cli.terminal.members import follow_work
    from axon_ps.cli.terminal.progress import Progress
    from axon_ps.observe.work import LongWork

    kind, doing, done = names
    work = LongWork(kind)

    async def perform() -> CheckpointReply:
        async with client(settings) as operator:
            following = asyncio.ensure_future(follow_work(operator.status, work))
            try:
                info: CheckpointReply = await action(operator)
                return info
            finally:
                following.cancel()

    with Progress(doing, work, None if no_progress else sys.stderr):
        info = asyncio.run(perform())
    several = ", ".join(f"{name} at version {version}" for name, version in info.versions.items())
    print(f"{done} {info.uri}: {several or f'version {info.version}'}, {info.bytes:,} bytes")


def _json_object(text: str) -> str:
    from axon_ps.texts import value_of_json

    value = value_of_json(text, "--extra")
    if not isinstance(value, dict):
        raise ConfigurationError(f"--extra must be a JSON object; {type(value).__name__} given")
    return text


def _versions(c: Manifest) -> str:
    if not c.others:
        return f"version {c.version}"
    return ", ".join(f"{section.name} at version {section.version}" for section in c.sections)


def _facts(c: Manifest) -> dict[str, Any]:
    models = {section.name: section.version for section in c.sections}
    return {"uri": c.uri, "version": c.version, "models": models, "bytes": c.bytes, "created": c.created}
