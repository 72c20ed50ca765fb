"""What the command line makes of a command, without running it: for what documents, images and compose files say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from typer.main import get_command

from axon_ps.cli.main import application

ROOT = Path(__file__).parents[2]


def entry_point(service: str) -> list[str]:
    """The options with which services/*/main.py begins."""
    spec = importlib.util.spec_from_file_location(f"entry_{service}", ROOT / "services" / service / "main.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.DEFAULTS)


def understood(arguments: list[str]) -> dict[str, Any]:
    """The values of a command's options and arguments, its sub-command resolved; fails where it would be refused."""
    command: Any = get_command(application(*arguments[:1]))
    name = "axon-ps"
    while hasattr(command, "commands"):
        assert arguments, f"{name} needs a command"
        name, arguments = arguments[0], arguments[1:]
        assert name in command.commands, f"there is no command {name}"
        command = command.commands[name]
    return dict(command.make_context(name, arguments).params)
