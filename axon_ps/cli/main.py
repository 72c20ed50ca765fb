"""The command `axon-ps`: its commands, and the form in which errors reach the terminal.

After a user's mistake the command prints one line, red on a terminal, and exits with 2; after any other error with 1.
`--debug` shows the traceback as well. Only the command that is named is imported and built, and it imports what it
needs when it runs: a job starts this program once for each of its services.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer

from axon_ps.cli.options import Commands, dashes, leave
from axon_ps.errors import (
    AxonError,
    CheckpointNotFound,
    InvalidRequest,
    Misuse,
    PermissionDenied,
)
from axon_ps.observe.variables import misspelt
from axon_ps.texts import printable
from axon_ps.version import __version__

USER_ERRORS = (InvalidRequest, Misuse, PermissionDenied, CheckpointNotFound)
"""Errors that the user can fix by calling the command differently: exit code 2."""

_MODULES: Final = {
    "run": "axon_ps.cli.launch.run",
    "coordinator": "axon_ps.cli.serve",
    "shard": "axon_ps.cli.serve",
    "proxy": "axon_ps.cli.serve",
    "status": "axon_ps.cli.status",
    "top": "axon_ps.cli.status",
    "logs": "axon_ps.cli.status",
    "trace": "axon_ps.cli.terminal.trace",
    "drain": "axon_ps.cli.operate",
    "release": "axon_ps.cli.operate",
    "kill": "axon_ps.cli.kill",
    "checkpoint": "axon_ps.cli.checkpoint",
    "auth": "axon_ps.cli.auth",
    "chaos": "axon_ps_lab.commands.chaos",
    "health": "axon_ps.cli.status",
    "doctor": "axon_ps.cli.status",
    "simulate": "axon_ps_lab.commands.simulate",
}
"""The module of each command, in which it is a function of the same name, or `app` if it has commands of its own.

Those of the laboratory are found by these names alone: the product does not import it.
"""

_REGISTERED: Final[dict[str, dict[str, Any]]] = {
    "run": {  # all arguments after the script's name are the script's
        "no_args_is_help": True,
        "context_settings": {"allow_interspersed_args": False, "token_normalize_func": dashes},
    },
}
"""Options with which typer registers a command."""


def application(named: str | None = None) -> Commands:
    """Build the command line, as typer has it.

    Args:
        named: the only command that is needed; None, or another name = all.
    """
    app = Commands(help="axon_ps: a gRPC parameter server for sharded training.")
    app.callback()(_everywhere)
    for name in (named,) if named in _MODULES else _MODULES:
        module = importlib.import_module(_MODULES[name])
        if hasattr(module, name):
            app.command(name, **_REGISTERED.get(name, {}))(getattr(module, name))
        else:
            app.add_typer(module.app, name=name)
    return app


@functools.cache
def commands(named: str | None = None) -> Any:
    """Return typer's own form of `application(named)`; a fork server calls this before it forks, since it is slow."""
    return typer.main.get_command(application(named))


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"axon-ps {__version__}")
        leave(0)


def _everywhere(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    _Errors.debug = debug
    for message in misspelt(os.environ).values():
        print(f"axon-ps: {message}", file=sys.stderr)


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
        arguments = sys.argv[1:] if argv is None else argv
        named = next((argument for argument in arguments if not argument.startswith("-")), None)
        commands(named)(args=arguments, prog_name="axon-ps")
    except SystemExit as exit_:  # click ends so: usage errors, --help, leave()
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
    line = f"axon-ps: {printable(text.replace(chr(10), ' '))}"
    print(f"\x1b[31m{line}\x1b[0m" if sys.stderr.isatty() else line, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
