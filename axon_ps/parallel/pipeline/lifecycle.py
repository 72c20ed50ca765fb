"""`Lifecycle`: the end of each step on all ranks alike, and the end of the pipeline.

Owns: the exchange of statuses after a step, and the error by which a pipeline is over. Refuses: to do steps, and to
know what a stage is.

Note: [A step's end]
    When a rank has done its actions, or cannot go on, all ranks exchange their status: the loss, or the error. So a
    step ends on all ranks alike. A rank that fails first sends the error on every edge on which others may still wait
    for it (`Channel.poison`). A rank that receives this does the same. Hence every rank comes to the exchange.

Invariant: a pipeline that is over stays so, with its first error.
"""

from __future__ import annotations

import json
from typing import Any

from axon_ps.collectives.process_group import ProcessGroup
from axon_ps.errors import AxonError, Broken, again
from axon_ps.parallel.pipeline.channel import Channel, PeerFailed
from axon_ps.parallel.pipeline.exchange import end_together, exchange
from axon_ps.parallel.pipeline.executor import StageFailed

_ERROR_CHARACTERS = 800


class Lifecycle:
    """The end of a pipeline's steps and of the pipeline; see the module.

    Args:
        group: the pipeline's own group, which ends with it; None = all stages are here, and errors end nothing.
        channel: this rank's edges, which end with the group.
    """

    def __init__(self, group: ProcessGroup | None, channel: Channel) -> None:
        self._group = group
        self._channel = channel
        self._over: AxonError | None = None

    def check_open(self) -> None:
        """Check that the pipeline is not over.

        Raises:
            AxonError: it is over, by this error.
        """
        if self._over is not None:
            raise again(self._over)

    def conclude(self, loss: float | None, failure: StageFailed | PeerFailed | None) -> list[float | None]:
        """End a step on all ranks. Collective. See Note: [A step's end].

        Args:
            loss: the step's loss, on the rank of the last stage, if nothing failed here.
            failure: the reason for which this rank could not go on.

        Returns:
            The loss as each rank has it.

        Raises:
            Exception: a stage of this rank failed with it. A note names the stage.
            Broken: a stage of another rank failed.
            AxonError: the group is over.

        After an error: with a group, the pipeline is over on every rank.
        """
        text = _short(str(failure)) if failure is not None else None
        own = isinstance(failure, StageFailed)
        statuses: list[Any] = [{"error": text, "own": own, "loss": loss}]
        group_error: AxonError | None = None
        if self._group is not None:
            try:
                if text is not None:
                    self._channel.poison(text)
                statuses = exchange(self._group, statuses[0])
                if not any(s["error"] for s in statuses):
                    self._channel.flush()
                else:
                    end_together(self._group)
            except AxonError as error:
                group_error = error
        errors = sorted((not s["own"], s["error"]) for s in statuses if s["error"])  # a rank's own errors come first
        if not errors and group_error is None:
            return [status["loss"] for status in statuses]
        self.break_off(group_error or Broken(f"{errors[0][1]}; the pipeline is over on every rank, make another"))
        if isinstance(failure, StageFailed):
            failure.error.add_note(failure.description)
            raise failure.error
        assert self._over is not None
        raise again(self._over)

    def break_off(self, error: BaseException) -> None:
        """Break off a step. With a group the pipeline is then over, without one it can be used further."""
        if self._group is None:
            self._channel.close()
        elif isinstance(error, AxonError):
            self.end(error)
        else:
            reason = f"{type(error).__name__}: {_short(str(error))}"
            self.end(Broken(f"rank {self._group.rank} left the pipeline by {reason}"))

    def end(self, error: AxonError) -> None:
        """End the pipeline, its group and its threads on this rank. Repeated calls change nothing."""
        self._over = self._over or again(error)
        if self._group is not None:
            self._group.abort(error)
        self._channel.close()
        if self._group is not None:
            self._group.close()


def _short(text: str) -> str:
    """Put a text on one line, and cut it to fit in a header."""
    text = " ".join(text.split())
    while len(json.dumps(text)) > _ERROR_CHARACTERS:
        text = text[: len(text) * 3 // 4]
    return text
