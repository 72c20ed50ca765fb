"""The run of a campaign: its faults are injected into a job one after the other; `report` has their effects."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Final, Protocol

from axon_ps.errors import AxonError
from axon_ps_lab.chaos.campaign import Campaign
from axon_ps_lab.chaos.figures import Dealt, Events, FaultOutcome, Samples, memory, outcomes
from axon_ps_lab.chaos.plan import PlannedFault, planned

WEIGHED_EVERY: Final = 10
_POLL_S: Final = 0.05

Emit = Callable[[str], None]


class Struck(Protocol):
    """A job that can be struck."""

    @property
    def newest(self) -> float:
        """The time of the newest commit that is known."""

    def wait(self, done: Callable[[], bool], limit_s: float, what: str) -> None:
        """Wait for a condition.

        Args:
            done: the condition.
            limit_s: seconds that it may take.
            what: begin of the error message.

        Raises:
            AxonError: the condition did not hold in time.
        """

    def is_complete(self) -> bool:
        """Return True if the job has all members and copies."""

    def deal(self, fault: PlannedFault) -> tuple[str, float, str]:
        """Inject a fault, and return when it is over.

        Returns:
            The name of the process that was struck, the time at which the fault began, and a note for the report.
        """

    def weigh(self, number: int) -> None:
        """Note the memory of every process."""

    def collected(self) -> Events:
        """Return all observed events."""


@dataclass(kw_only=True)
class Result:
    """The outcome of a campaign.

    Attributes:
        campaign: the campaign.
        events: the observed events.
        began: time at which it began, by the events' clock.
        seconds: duration of the faults.
        samples: the use of the samples; None = unknown.
        steps: committed steps after which the values are compared; 0 = they were not compared.
        bits_different: bits in which the values differ from those of a job without faults; None = not compared.
        problems: descriptions of errors.
        stopped: the reason why it ended before its last fault; empty = it did not.
        interrupted: whether a user has interrupted it.
    """

    campaign: Campaign
    events: Events
    began: float
    seconds: float = 0.0
    samples: Samples | None = None
    steps: int = 0
    bits_different: int | None = None
    problems: list[str] = field(default_factory=list)
    stopped: str = ""
    interrupted: bool = False

    @property
    def outcomes(self) -> list[FaultOutcome]:
        """The outcomes of the faults, in order."""
        return outcomes(self.events)

    @property
    def is_good(self) -> bool:
        """True if nothing was lost, no bit differs, memory was flat, and the campaign was not stopped."""
        lost = sum(outcome.steps_lost for outcome in self.outcomes)
        wrong = self.samples is not None and (self.samples.lost or self.samples.doubled)
        flat = all(m.is_flat for m in memory(self.events.memory))
        return not (lost or wrong or self.bits_different or self.problems or self.stopped) and flat


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True once Ctrl-C was pressed; outside the main thread it returns False.

    The `KeyboardInterrupt` itself is lost where Python ignores exceptions: in a finalizer or a callback of C code.
    """
    seen: list[int] = []

    def interrupted(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)


class Runner:
    """Injects the faults of a campaign into a job, one after the other.

    Args:
        campaign: the campaign.
        job: the job that is struck; it runs.
        emit: called with a line for every fault.
    """

    def __init__(self, campaign: Campaign, job: Struck, emit: Emit) -> None:
        self._campaign, self._job, self._emit = campaign, job, emit
        self.result = Result(campaign=campaign, events=Events(), began=time.monotonic())

    def run(self) -> Result:
        """Run the campaign until its last fault, until the job does not heal, until time is over, or until Ctrl-C."""
        result, began = self.result, time.monotonic()
        try:
            with interrupts() as interrupted:
                self._run(interrupted, began)
        except KeyboardInterrupt:
            result.stopped, result.interrupted = "it was interrupted", True
        except AxonError as error:
            result.problems.append(str(error)[:2000])
            result.stopped = "the job did not go on"
        result.seconds = time.monotonic() - began
        dealt = result.events.dealt
        result.events = self._job.collected()
        result.events.dealt = dealt
        return result

    def _run(self, interrupted: Callable[[], bool], began: float) -> None:
        self._heal(time.monotonic())
        self._job.weigh(0)
        for fault in planned(self._campaign):
            if interrupted():
                raise KeyboardInterrupt
            if time.monotonic() - began > self._campaign.at_most_s:
                self.result.stopped = f"{self._campaign.at_most_s:g} s were over (at_most_s)"
                break
            self._deal(fault)

    def _deal(self, fault: PlannedFault) -> None:
        began = time.monotonic()
        target, note, ended, complete = fault.role, "", 0.0, 0.0
        try:
            target, began, note = self._job.deal(fault)
            ended = time.monotonic()
            complete = self._heal(ended)
        finally:
            dealt = Dealt(fault=fault, target=target, began=began, ended=ended, complete=complete, note=note)
            self.result.events.dealt.append(dealt)
        if note.startswith("WRONG"):
            self.result.problems.append(f"fault {fault.number}, {fault.name}: {note}")
        self._emit(
            f"{fault.number}/{self._campaign.faults} {fault.name} ({target}): complete after "
            f"{complete - began:.2f} s{f'; {note}' if note else ''}"
        )
        if fault.number % WEIGHED_EVERY == 0:
            self._job.weigh(fault.number)

    def _heal(self, since: float) -> float:
        """Wait until the job is complete and has committed a step after `since`; returns when it was complete."""
        patience_s = self._campaign.patience_s
        self._job.wait(self._job.is_complete, patience_s, "the job had not all its members and copies again")
        complete = time.monotonic()
        self._job.wait(lambda: self._job.newest > since, patience_s, "no step was committed")
        self._job.wait(_after(self._campaign.quiet_s), patience_s + self._campaign.quiet_s, "time did not pass")
        return complete


def _after(seconds: float) -> Callable[[], bool]:
    ends = time.monotonic() + seconds
    return lambda: time.monotonic() >= ends
