"""The view of the model that the workers of a node agree on, since each is notified at another moment."""

from __future__ import annotations

from axon_ps.parallel.fsdp.hybrid.calls import NodeCalls
from axon_ps.worker.job_view import JobView
from axon_ps.worker.steps.view import ModelView


class NodeView:
    """A `ModelView` that is the same on all workers of a node, until a worker of it was lost.

    Args:
        own: this worker's view.
        calls: the calls inside the node.

    Attributes:
        agreed: the (epoch, version) that the node's workers have agreed on.
    """

    def __init__(self, own: ModelView, calls: NodeCalls) -> None:
        self._own = own
        self._calls = calls
        self.agreed = own.latest

    @property
    def job(self) -> JobView:
        """The job's members."""
        return self._own.job

    @property
    def epoch(self) -> int:
        """The number of times that the parameters were replaced, as the node's workers agreed."""
        return self.agreed[0] if self._calls.group_error is None else self._own.epoch

    @property
    def asked_epoch(self) -> int:
        """The newest epoch that this worker asked for, or waited for."""
        return self._own.asked_epoch

    @property
    def version(self) -> int:
        """Committed steps, as the node's workers agreed."""
        return self.agreed[1] if self._calls.group_error is None else self._own.version

    @property
    def copied(self) -> int:
        """See `ModelView.copied`. It is as this worker was notified."""
        return self._own.copied

    @property
    def latest(self) -> tuple[int, int]:
        """The newest (epoch, version) that this worker was notified of. The node may not have agreed on it yet."""
        return self._own.latest
