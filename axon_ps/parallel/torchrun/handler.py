"""`torchrun --rdzv-backend=axon`: torch's own rendezvous, with its state and its store at the job's coordinator.

The agents that take part in a round are chosen by torch's `DynamicRendezvousHandler`. This module stores its state. It
also sets the coordinator's address for the workers, so they join the job there.

Note: [Whose death matters]
    With torch's c10d backend the state is at one agent, and all others end with it. Here it is at the coordinator,
    which may have standbys. If an agent is silent for `keep_alive_interval` * `keep_alive_max_attempt` seconds, the
    others take it out of the state. They begin a new round as soon as their workers fail. In every round the agent of
    rank 0 serves the workers' store anew. Otherwise torch would give the workers the address of the dead agent's store.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
    Token,
)

from axon_ps.errors import AxonError, ConfigurationError
from axon_ps.observe.reminders import reminding
from axon_ps.parallel.c10d.store import KVStore
from axon_ps.parallel.torchrun.state import from_json, to_json
from axon_ps.worker.environment import job_of, security_of
from axon_ps.worker.operator_keys import OperatorKeys

NAME = "axon"
VARIABLES = {
    "job": "AXON_PS_JOB",
    "token_file": "AXON_PS_TOKEN_FILE",
    "tls_ca": "AXON_PS_TLS_CA",
    "tls_cert": "AXON_PS_TLS_CERT",
    "tls_key": "AXON_PS_TLS_KEY",
    "tls_dir": "AXON_PS_TLS_DIR",
}
"""Keys of --rdzv-conf, each with the environment variable that it sets for the workers."""

SECONDS = {
    "join_timeout": 600,
    "last_call_timeout": 10,
    "close_timeout": 30,
    "heartbeat_timeout": 5,
    "keep_alive_interval": 1,
    "connect_timeout": 30,
    "read_timeout": 60,
}
"""Keys of --rdzv-conf that are times in seconds, as for torch's backends, and their defaults."""

ATTEMPTS = "keep_alive_max_attempt"
_OF_TORCHRUN = ("timeout", "rank")
_MAX_PER_S = 32
"""Most agents that report each second. The limit is needed because all of them change one value."""

_logger = logging.getLogger(__name__)
T = TypeVar("T")


class CoordinatorBackend(RendezvousBackend):
    """The state of one rendezvous in the job's key-value store.

    Args:
        keys: the store.
        run_id: the rendezvous.
    """

    def __init__(self, keys: OperatorKeys, run_id: str) -> None:
        self._keys = keys
        self._key = f"torchrun/{run_id}/state"

    @property
    def name(self) -> str:
        """The name by which torchrun calls it."""
        return NAME

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state, pickled, and the bytes stored; None if there is none.

        Raises:
            RendezvousConnectionError: the coordinator cannot be reached.
            RendezvousStateError: the bytes stored are not a state.
        """
        stored = _calling(lambda: self._keys.kv_get(self._key))
        return (from_json(stored), stored) if stored else None

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Store a state if the stored bytes equal `token`; without a token, if none are stored.

        Returns:
            The state and bytes stored then, and True if they were replaced; None if nothing is stored.

        Raises: as `get_state`.
        """
        new, expected = to_json(state), token if isinstance(token, bytes) else b""
        done, stored = _calling(lambda: self._keys.kv_swap(self._key, expected, new))
        return (from_json(stored), stored, done) if stored else None


class AxonRendezvousHandler(DynamicRendezvousHandler):
    """torch's handler over a `CoordinatorBackend`; made by `create`."""

    keys: OperatorKeys

    def next_rendezvous(self) -> RendezvousInfo:
        """Take part in the next round; see torch's.

        Raises:
            RendezvousClosedError: a run of this id has ended.
            RendezvousConnectionError: the coordinator cannot be reached.
            RendezvousTimeoutError: too few agents came.
        """
        self._bootstrap_store_info = None  # See Note: [Whose death matters].
        self._shared_tcp_store_server = None
        try:
            return super().next_rendezvous()
        except RendezvousClosedError:
            raise RendezvousClosedError(
                f"the rendezvous {self.get_run_id()!r} is closed: a run of that id has ended, and the coordinator "
                "remembers it; give each run an --rdzv-id of its own"
            ) from None

    def shutdown(self) -> bool:
        """Close the rendezvous, and the connection to the coordinator; return True if the rendezvous was closed."""
        try:
            return super().shutdown()
        finally:
            self.keys.close()


def create(parameters: RendezvousParameters) -> AxonRendezvousHandler:
    """Make the handler of an agent, connected to the coordinator, and set the environment that its workers inherit.

    Raises:
        ConfigurationError: an option or a variable is wrong. The message names it.
        RendezvousConnectionError: the coordinator cannot be reached, or refuses us.
    """
    conf = parameters.config
    if unknown := sorted(conf.keys() - {*VARIABLES, *SECONDS, ATTEMPTS, *_OF_TORCHRUN}):
        raise ConfigurationError(
            f"--rdzv-conf has {', '.join(unknown)}; it may have {', '.join((*VARIABLES, *SECONDS, ATTEMPTS))}"
        )
    time_s = {name: _number(parameters, name, default) for name, default in SECONDS.items()}
    attempts = _number(parameters, ATTEMPTS, 5)
    given = {variable: str(conf[name]) for name, variable in VARIABLES.items() if name in conf}
    if parameters.endpoint:
        given["AXON_PS_COORDINATOR"] = parameters.endpoint
    os.environ.update(given)
    address = os.environ.get("AXON_PS_COORDINATOR", "")
    if not address:
        raise ConfigurationError("which coordinator? Give --rdzv-endpoint=host:port or set AXON_PS_COORDINATOR")
    security, job = security_of(os.environ), job_of(os.environ)
    _await_coordinator(OperatorKeys(address, security=security, job=job, timeout_s=time_s["connect_timeout"]), address)
    keys = OperatorKeys(address, security=security, job=job, timeout_s=time_s["read_timeout"])
    handler: AxonRendezvousHandler = AxonRendezvousHandler.from_backend(
        parameters.run_id,
        KVStore(keys, f"torchrun/{parameters.run_id}", time_s["read_timeout"]),
        CoordinatorBackend(keys, parameters.run_id),
        parameters.min_nodes,
        parameters.max_nodes,
        parameters.local_addr,
        RendezvousTimeout(
            *(timedelta(seconds=time_s[f"{n}_timeout"]) for n in ("join", "last_call", "close", "heartbeat"))
        ),
        keep_alive_interval=max(time_s["keep_alive_interval"], parameters.max_nodes // _MAX_PER_S),
        keep_alive_max_attempt=attempts,
    )
    handler.keys = keys
    return handler


def _number(parameters: RendezvousParameters, name: str, default: int) -> int:
    """Return a number of --rdzv-conf.

    Raises:
        ConfigurationError: it is not a whole number, or less than 1.
    """
    given = parameters.config.get(name, default)
    try:
        number = int(given)
    except ValueError:
        number = 0
    if number < 1:
        raise ConfigurationError(f"--rdzv-conf has {name}={given}; give a whole number of at least 1")
    return number


def _await_coordinator(keys: OperatorKeys, address: str) -> None:
    """Block until the coordinator answers, and accepts us."""
    try:
        with reminding(_logger, lambda: f"torchrun is waiting for the coordinator at {address}"):
            _calling(lambda: keys.kv_get("torchrun"))
    finally:
        keys.close()


def _calling(call: Callable[[], T]) -> T:
    """Return the result of a call; raise our errors as torch's."""
    try:
        return call()
    except AxonError as error:
        raise RendezvousConnectionError(f"the coordinator at {os.environ['AXON_PS_COORDINATOR']}: {error}") from error
