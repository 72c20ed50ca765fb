"""A fork server that cannot begin says so; what it does for clusters, every test of one holds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from axon_ps.errors import InternalError
from axon_ps.testing.fork_server import ForkServer


def test_a_server_that_has_ended_is_named_with_its_exit_code(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    server = ForkServer(["a_module_that_nobody_has"], dict(os.environ))
    try:
        for _ in range(2):  # the first request is lost with it, or finds it gone, as the second one does
            with pytest.raises(InternalError, match="the fork server has ended with exit code 1"):
                server.run("axon-ps --help", ["--help"], dict(os.environ), tmp_path / "log")
    finally:
        server.close()
    assert "No module named 'a_module_that_nobody_has'" in capfd.readouterr().err
