"""The command `axon-ps`: its commands, and how errors reach the terminal.

A user's mistake prints one red line and exits with 2; any other error prints one and exits with 1.
`--debug` shows the traceback as well. Each command imports what it needs when it runs, so `--help` is quick.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from axon_ps import __version__
from axon_ps.cli import auth, chaos, checkpoint, operate, serve, simulate, status
from axon_ps.cli.launch import run
from axon_ps.cli.options import Commands, leave
from axon_ps.cli.terminal import logs, top, trace
from axon_ps.errors import (
    AxonError,
    CheckpointNotFound,
    InvalidRequest,
    Misuse,
    PermissionDenied,
)
from axon_ps.observe.variables import described, misspelt

USER_ERRORS = (InvalidRequest, Misuse, PermissionDenied, CheckpointNotFound)
"""Errors that the user can fix by calling the command differently: exit code 2."""

app = Commands(help="axon_ps: a gRPC parameter server for sharded training.")
app.command(**run.COMMAND)(run.run)
app.command()(serve.coordinator)
app.command()(serve.shard)
app.command()(serve.proxy)
app.command()(status.status)
app.command()(top.top)
app.command()(logs.logs)
app.command()(trace.trace)
app.command()(operate.drain)
app.command()(operate.release)
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(auth.app, name="auth")
app.add_typer(chaos.app, name="chaos")
app.command()(status.health)
app.command()(status.doctor)
app.command()(simulate.simulate)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"axon-ps {__version__}")
        leave(0)


@app.callback()
def _everywhere(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    _Errors.debug = debug
    for name, meant in misspelt(os.environ).items():
        print(f"axon-ps: {described(name, meant)}", file=sys.stderr)


class _Errors:
    debug = False


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; prints errors, raises none.

    Args:
        argv: the arguments; None = those of the process.
    """
    try:
        from axon_ps.cli.settings import quiet_grpc

        quiet_grpc()
        app(args=argv, prog_name="axon-ps")
    except SystemExit as exit_:  # how click ends: usage errors, --help, leave()
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except KeyboardInterrupt:
        return 130
    except AxonError as error:
        return _report(error, 2 if isinstance(error, USER_ERRORS) else 1)
    except Exception as error:
        _Errors.debug = _Errors.debug or not isinstance(error, OSError)
        return _report(error, 1)
    return 0


def _report(error: Exception, code: int) -> int:
    if _Errors.debug:
        import traceback

        traceback.print_exception(error)
    text = str(error) or type(error).__name__
    line = f"axon-ps: {text.replace(chr(10), ' ')}"
    print(f"\x1b[31m{line}\x1b[0m" if sys.stderr.isatty() else line, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
