"""The whole error tree of axon_ps, and the copies of errors that are kept.

This module imports nothing of ours and nothing of gRPC. `rpc.status` is the one place that maps these errors
to gRPC statuses and back. The class says whose fault it is:

    AxonError
    ├── InvalidRequest (ValueError)          the data you gave is wrong: shape, range, name, dtype
    │   ├── LayoutMismatch                   this rank's model or optimizer differs from the job's
    │   ├── ConfigurationError               an option, environment variable or file is wrong
    │   └── Disagreement                     the ranks of a group asked for different things
    ├── Misuse (RuntimeError)                calls in the wrong order
    │   └── Closed                           you closed it, and use it still
    │       └── Drained                      a shard server was taken out of the job, as requested
    ├── PermissionDenied (PermissionError)   wrong or missing token, job name or certificate
    ├── Broken (ConnectionError)             the peer's fault: it died or the network did
    │   ├── Unreachable                      no answer at the address
    │   ├── NotLeader                        this coordinator stands by; another one leads
    │   ├── MemberLost                       a worker or shard server of the job has gone
    │   └── NcclError                        NCCL failed, or is not there
    ├── Timeout (TimeoutError)               the caller's deadline passed
    ├── Busy                                 a bounded resource is used up; retrying later may succeed
    ├── GenerationChanged                    the membership changed; `.generation` is the new one
    ├── SliceMoved                           another shard server holds the slice now
    ├── StepAborted                          the step did not commit; version and parameters are unchanged
    ├── CheckpointError                      a checkpoint cannot be written or read
    │   ├── CheckpointNotFound
    │   ├── CheckpointCorrupt                a file is truncated, altered or not ours
    │   └── StorageFull                      no space left; nothing half-written remains visible
    └── InternalError                        our bug
"""

from __future__ import annotations

from typing import TypeVar

E = TypeVar("E", bound=BaseException)


class AxonError(Exception):
    """Base of every error that axon_ps raises on purpose."""


class InvalidRequest(AxonError, ValueError):
    """The data given is wrong. The message says what was given, what is needed and what to do."""


class LayoutMismatch(InvalidRequest):
    """The model or optimizer of this rank differs from the one the job was registered with."""


class ConfigurationError(InvalidRequest):
    """An option, an environment variable or a configuration file holds a value that cannot work."""


class Disagreement(InvalidRequest):
    """The ranks of a group asked for different things in one collective. The message says which rank sent what.

    Every rank of the group gets it, and no data was used: arrays are unchanged, and the group can go on.
    """


class Misuse(AxonError, RuntimeError):
    """Calls came in an order that has no meaning."""


class Closed(Misuse):
    """The object was closed by its owner and cannot be used any more."""


class Drained(Closed):
    """This shard server was drained: it holds nothing any more and has left the job."""


class PermissionDenied(AxonError, PermissionError):
    """The peer refused us: wrong or missing job token, wrong job name, or a certificate it does not trust."""


class Broken(AxonError, ConnectionError):
    """The peer or the network failed. It may have done some, all or none of the request."""


class Unreachable(Broken):
    """There was no answer at the address."""


class NotLeader(Broken):
    """This coordinator does not lead, and has done nothing: ask the next one."""


class MemberLost(Broken):
    """A worker or a shard server that this call needs has left the job."""


class NcclError(Broken):
    """NCCL reported an error, or cannot be used here: no GPU, or cupy is not installed."""


class Timeout(AxonError, TimeoutError):
    """The caller's deadline passed. The peer may have done some, all or none of the request."""


class Busy(AxonError):
    """A bounded resource is used up; the same call may succeed later."""


class GenerationChanged(AxonError):
    """The membership changed while the call was under way, or before it.

    Attributes:
        generation: the current generation, as the peer knew it.
    """

    def __init__(self, message: str, generation: int = 0) -> None:
        super().__init__(message)
        self.generation = generation


class SliceMoved(AxonError):
    """The shard server does not hold the slice, or no longer: ask the server that the placement names."""


class StepAborted(AxonError):
    """The step did not commit: the parameters are as they were, the gradients of this step are dropped."""


class CheckpointError(AxonError):
    """A checkpoint cannot be written or read."""


class CheckpointNotFound(CheckpointError, FileNotFoundError):
    """There is no complete checkpoint at the given URI."""


class CheckpointCorrupt(CheckpointError):
    """A file of the checkpoint is missing, truncated, altered or not of this format."""


class StorageFull(CheckpointError):
    """The store has no space left. Incomplete files have been removed."""


class InternalError(AxonError):
    """A bug of axon_ps. Please report it with the message."""


def again(error: E) -> E:
    """Copy an error without its traceback, to keep the copy, or to raise it in place of a kept error.

    An error holds the frames that it has passed, and so their variables. A model refers to its world through
    PyTorch's hooks, which Python's garbage collection does not follow. So a kept error that is raised to a user would
    hold the user's model for ever.
    """
    copied = type(error).__new__(type(error), *error.args)
    copied.args = error.args
    copied.__dict__.update(error.__dict__)
    copied.__cause__, copied.__suppress_context__ = error.__cause__, error.__suppress_context__
    return copied


def forget(error: BaseException) -> None:
    """Drop the frames passed by an error and by the errors that led to it, with the frames' variables.

    It is for an error that was answered, and to which a future or gRPC still refers.
    """
    passed: BaseException | None = error
    while passed is not None:
        before, passed.__context__, passed.__traceback__ = passed.__context__ or passed.__cause__, None, None
        passed.__cause__ = None
        passed = before
