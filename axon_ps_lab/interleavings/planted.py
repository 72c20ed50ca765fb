"""Bugs planted one at a time, which the simulation has to find: `python -m axon_ps_lab.interleavings.planted`.

Each is a small change of the product's source, made while it is imported. For each the first seed that fails is
printed, with its error.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.machinery
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, Final

from axon_ps_lab import report

ROOT: Final = Path(__file__).parents[2]


@dataclass(frozen=True)
class Plant:
    """A bug.

    Attributes:
        name: name of the bug.
        path: the file, below the package.
        right: text that occurs there once.
        wrong: the text that is there instead.
        real: its effect when it was a bug of the product; empty = it never was one.
        rare: whether fewer than one seed in 3,000 shows it, since the faults for it seldom come together.
    """

    name: str
    path: str
    right: str
    wrong: str
    real: str = ""
    rare: bool = False

    @property
    def module(self) -> str:
        """The module that it is in."""
        return "axon_ps." + self.path.removesuffix(".py").replace("/", ".")

    def source(self) -> str:
        """Return the source of the module with the bug."""
        text = (ROOT / "axon_ps" / self.path).read_text(encoding="utf-8")
        if text.count(self.right) != 1:
            raise LookupError(f"{self.name}: its text is {text.count(self.right)} times in {self.path}, not once")
        return text.replace(self.right, self.wrong)


_HOLDERS: Final = "coordinator/core/placement/holders.py"
_STEPPING: Final = "coordinator/core/steps/stepping.py"
_DELIVERY: Final = "coordinator/client/delivery.py"
_MODEL_SHELL: Final = "shard/server/model_shell.py"

PLANTS: Final = (
    # ------------------------------------------------------------------ the coordinator
    Plant(
        "a step is decided before the shard servers have everything",
        "coordinator/core/steps/decision.py",
        "all(w in self.votes for w in workers) and all(self._is_ready(o) for o in owners)",
        "all(w in self.votes for w in workers)",
    ),
    Plant(
        "the version is not written with the decision",
        _STEPPING,
        "self._out.persist([records.decision_record(decision), records.progress_record(model.progress)])",
        "self._out.persist([records.decision_record(decision)])",
    ),
    Plant(
        "a decision is not written",
        _STEPPING,
        "self._out.persist([records.decision_record(decision), records.progress_record(model.progress)])",
        "self._out.persist([records.progress_record(model.progress)])",
    ),
    Plant(
        "a dead shard server stays the primary",
        _HOLDERS,
        "self.change_placement(p.placement.without(rank))",
        "self.change_placement(p.placement)",
    ),
    Plant(
        "a shard server that was lost holds its slices after other steps, too",
        _HOLDERS,
        "now = p.initialized and p.lost_version == version",
        "now = p.initialized",
    ),
    Plant(
        "members are never missed",
        "coordinator/core/evictions.py",
        "        if expired := self._assembly.roster.expired(now):\n",
        "        if expired := []:\n",
    ),
    Plant(
        "a placement that changes is not written",
        "coordinator/core/placement/placements.py",
        "        self._out.persist([records.parameters_record(model.number, model.holders.parameters)])\n"
        "        self._assembly.announce(model, full=False)",
        "        self._assembly.announce(model, full=False)",
    ),
    Plant(
        "a server whose connection broke has lost everything",
        "coordinator/core/assembly.py",
        "model.holders.take_back(member, self.shards(), model.version)",
        "pass",
        real="parameters were lost although a server was back after 30 ms: the other holder was dead, and not missed",
    ),
    Plant(
        "a server that missed the optimizer gets the decision before it",
        "coordinator/core/assembly.py",
        "if is_shard and model.decisions and model.holders.is_loaded(entry.member):",
        "if False:",
        real="a shard server ended that had missed the optimizer's registration and the first commit (seed 306426)",
        rare=True,
    ),
    Plant(
        "first values are awaited from a server that is gone",
        "coordinator/core/checkpoints/restores.py",
        "        if not gone or len(here) < self._assembly.needed_shards:",
        "        if True:",
        real="another server had come with another rank, and the job waited for the dead one for ever",
        rare=True,
    ),
    Plant(
        "a member that comes back is not told what was decided",
        "coordinator/core/assembly.py",
        "                for decision in model.decisions:\n                    self._out.push(to, decision)",
        "                pass",
    ),
    Plant(
        "a generation is not written",
        "coordinator/core/assembly.py",
        "        self._out.persist(self.records())\n        now_initialized",
        "        now_initialized",
    ),
    Plant(
        "a coordinator that is started again has forgotten who holds what",
        "coordinator/core/records.py",
        "holders=dict(message.holders)",
        "holders={}",
    ),
    # ------------------------------------------------------------------ the shard servers
    Plant(
        "a gradient that comes before its turn is dropped",
        "shard/core/gradients.py",
        "            return Push.QUEUED if done else Push.WAIT",
        "            return Push.QUEUED",
    ),
    Plant(
        "a step is decided with the sums of fewer addends",
        "coordinator/core/steps/decision.py",
        "return self._addends.get(owner) == self.last_addend",
        "return owner in self._addends",
    ),
    Plant(
        "a server counts nothing anew when another addend begins",
        "shard/core/gradients.py",
        "        attempt.addend = addend\n",
        "        return\n",
    ),
    Plant(
        "a backup takes the sum of the first addend alone",
        "shard/core/gradients.py",
        "        if accumulator.summed[index] >= count:\n",
        "        if accumulator.summed[index]:\n",
    ),
    Plant(
        "a server reports the first addend alone",
        _MODEL_SHELL,
        "name = (engine.generation, step, engine.gradients.attempts[replica].addend)",
        "name = (engine.generation, step, 0)",
    ),
    Plant(
        "what is queued stays in the queue",
        "shard/core/gradients.py",
        "found or accumulator.add_queued(index, attempt.replicas)",
        "found",
    ),
    Plant(
        "what is queued is in the sum of the next attempt",
        "shard/core/accumulator.py",
        "        self.queued.clear()\n",
        "",
    ),
    Plant(
        "what is forwarded in one generation goes on in the next",
        _MODEL_SHELL,
        "                self._forwarding.restart()\n",
        "",
        rare=True,
    ),
    Plant(
        "workers of a state without servers are not waited for",
        "coordinator/core/restart/comeback.py",
        "if assembly.roster.awaited(self._awaited) else",
        "if assembly.roster.awaited(Role.SHARD) else",
        rare=True,
        real="a newcomer was the first after a restart, in a generation that had been announced with other members",
    ),
    Plant(
        "a server that is not in an older state is not waited for",
        "coordinator/core/restart/comeback.py",
        "if now < self._until and (self._is_older or any(missing)):",
        "if now < self._until and any(missing):",
        rare=True,
        real="generations were announced again with other members before the server came that knew them (seed 307325)",
    ),
    Plant(
        "a worker of another state is checked before a server has joined, and not after",
        "shard/server/calls/fence.py",
        "                        self._check_job(context)  # this server may have joined meanwhile\n",
        "",
        rare=True,
        real="a worker of a state that was lost ended with PermissionDenied, instead of trying again (seed 419019)",
    ),
    Plant(
        "a server with values of a later version begins again at that version",
        "shard/core/engine.py",
        "        self.version = version\n        self.parameters.withdraw()\n",
        "        self.parameters.withdraw()\n",
        rare=True,
        real="a job that began again after a loss stopped: servers with old values reported them (seed 427507)",
    ),
    Plant(
        "sums of one generation are forwarded as those of the newest",
        "shard/server/forwarding.py",
        "generation=engine.generation, placement=known)",
        "placement=known)",
        rare=True,
        real="a server that joined took the sum of one worker for that of two, and both committed it",
    ),
    Plant(
        "a gradient that comes twice is summed twice",
        "shard/core/gradients.py",
        "        if summed > order or (index, order) in accumulator.queued:\n",
        "        if False:\n",
    ),
    Plant(
        "gradients of an attempt that was aborted stay in the sum",
        "shard/core/slices.py",
        "        self.accumulators[accumulator].restart()",
        "        pass",
    ),
    Plant(
        "a backup applies nothing",
        "shard/server/apply.py",
        "    assert owned.change is not None\n",
        "    if not owned.primary:\n        return\n    assert owned.change is not None\n",
    ),
    Plant(
        "a server is ready while a slice is still being copied",
        "shard/core/gradients.py",
        "not (s.copying or s.corrupt)",
        "not s.corrupt",
    ),
    Plant(
        "sums are not forwarded to a server that is copying",
        "sharding/placement.py",
        "return self.complete[1:] + self.copying",
        "return self.complete[1:]",
        rare=True,
    ),
    Plant(
        "a server that follows anew gets no sums of before",
        "shard/server/forwarding.py",
        "known, follower.slices = frozenset() if missed else follower.slices, frozenset(numbers)",
        "known, follower.slices = frozenset(numbers), frozenset(numbers)",
    ),
    Plant(
        "a server reports once, wherever slices are since",
        _MODEL_SHELL,
        "        self._reported.clear()\n",
        "",
    ),
    Plant(
        "an old version is served for a new one",
        "shard/server/calls/reads.py",
        "self._engine.parameters.available(unit, begin, min_version)",
        "self._engine.parameters.available(unit, begin, 0)",
    ),
    Plant(
        "a call that is cancelled loses the events that wait for its work",
        "shard/server/waiters.py",
        "        finally:\n            self._long -= 1\n",
        "        except asyncio.CancelledError:\n            self._waiting.clear()\n            raise\n"
        "        finally:\n            self._long -= 1\n",
        real="a server never learned of a generation, and its worker waited for ever",
    ),
    # ------------------------------------------------------------------ memory that fails
    Plant(
        "a corrupt slice is served",
        "shard/core/slices.py",
        "        if self.corruptions:\n            self.lose_values()\n        else:\n"
        "            self._publish_mapped()",
        "        self._publish_mapped()",
    ),
    Plant(
        "a sum that is corrupt is added to",
        "shard/core/accumulator.py",
        "            found = [] if first else list(self.digests.check_digests(blocks, read))\n",
        "            found = []\n",
    ),
    Plant(
        "a sum that is corrupt is taken",
        "shard/core/accumulator.py",
        "            if digest is not None and digest != self.digest(index):\n",
        "            if False:\n",
    ),
    Plant(
        "that a slice is corrupt is said once",
        _DELIVERY,
        "            reports += [*model.corrupted.values(), *model.corrupted_sums.values()]\n",
        "            reports += model.corrupted_sums.values()\n",
    ),
    Plant(
        "that a sum is corrupt is said once",
        _DELIVERY,
        "            reports += [*model.corrupted.values(), *model.corrupted_sums.values()]\n",
        "            reports += model.corrupted.values()\n",
        real="a step was never decided: the coordinator had been killed before it was told",
        rare=True,
    ),
    Plant(
        "a corrupt slice is lost though another copy comes back",
        _HOLDERS,
        "            for index in set(held) & p.corrupt.keys():",
        "            for index in ():",
        real="a job waited for a restore, since the other copy's connection had been reset",
        rare=True,
    ),
    Plant(
        "a server that comes back is taken to hold what it has lost",
        _HOLDERS,
        "held = tuple(i for i in complete if p.corrupt.get(i) != incarnation)",
        "held = tuple(complete)",
        real="a server that had lost a slice was to sum it, and nobody copied it to it; or the slice had no server at "
        "all, and the coordinator failed at every join",
        rare=True,
    ),
    Plant(
        "a coordinator that is started again has forgotten what lost servers hold",
        "coordinator/core/records.py",
        "lost={incarnation: tuple(slices.numbers) for incarnation, slices in message.lost.items()}",
        "lost={}",
        real="a job waited for a restore, since a connection had been reset just before the coordinator was killed",
        rare=True,
    ),
    Plant(
        "a copy that is complete when its source is dead is a second one",
        "sharding/placement.py",
        "return Holders((*(r for r in h.complete if r in present), rank),",
        "return Holders((*h.complete, rank),",
        real="workers waited for another server of the dead one's rank, which had nothing",
        rare=True,
    ),
    # ------------------------------------------------------------------ collectives
    Plant(
        "data of a rank that broke off counts as added",
        "aggregation/core/participants.py",
        "        if self.pending is not None:\n            self._take()\n",
        "        if self.pending is not None:\n            self.consume()\n",
        real="an all-reduce lacked what a rank had sent that broke off before it was added, and nobody was told",
        rare=True,
    ),
    Plant(
        "a rank that breaks off says nothing",
        "aggregation/client/client.py",
        "        except Broken:\n            task",
        "        except ZeroDivisionError:\n            task",
        real="the others waited until their deadline, when its connection broke before its first message had come",
    ),
    Plant(
        "what a broken stream has left goes on",
        "aggregation/core/operations.py",
        "            self._suspects[rank] = now_s + GRACE_S\n",
        "            pass\n",
    ),
    Plant(
        "a deadline that ends nothing is due again and again",
        "aggregation/core/operations.py",
        "*(p.deadline_s for p in self._awaited())]",
        "*(p.deadline_s for p in self._participants.values() if not p.left)]",
        real="a shard server did nothing else any more, while ranks waited at a stripe that decides nothing",
    ),
    Plant(
        "a shard server that leaves closes what is under way",
        "aggregation/client/client.py",
        "            if self._peers.closed:\n",
        "            if True:\n",
        real="a rank was told that it had cancelled a collective itself",
    ),
    # ------------------------------------------------------------------ the members' sessions and steps
    Plant(
        "what a broken session had to say is not said again",
        _DELIVERY,
        "        return [*reports, *(step_message_to_proto(message) for model in models for message in "
        "model.messages.values())]",
        "        return reports",
    ),
    Plant(
        "a worker that was let in and not told so asks for its rank",
        "coordinator/client/session.py",
        "requested_rank=self._requested_rank if self.membership is None else self.rank,",
        "requested_rank=self.rank if self.rank >= 0 else self._requested_rank,",
        real="a server ended, since the rank that it had never used was given away meanwhile",
        rare=True,
    ),
    Plant(
        "a call is given up when its connection is replaced",
        "coordinator/client/session.py",
        "return self._closing or self._availability.error is not None",
        "return True",
        real="a worker could not register, since it had joined again meanwhile",
    ),
    Plant(
        "the upload of one who is no member any more goes on",
        "worker/steps/parameters.py",
        "        await self._calls.run(\n            lambda _: self._shards.upload(",
        "        await (lambda run: run(None))(\n            lambda _: self._shards.upload(",
        real="a worker that was given up while it uploaded first values said so after five minutes",
    ),
    Plant(
        "a coordinator without its state is taken for the one of before",
        "coordinator/core/state.py",
        'if request.state_id not in ("", self.id):',
        "if False:",
    ),
    Plant(
        "a Join that is late is a member's fault",
        "coordinator/server/member_sessions.py",
        'raise Broken(f"a stream stayed silent',
        'raise InvalidRequest(f"a stream stayed silent',
        real="a worker ended for good, since its Join took ten seconds",
        rare=True,
    ),
)


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, plant: Plant, path: str) -> None:
        super().__init__(plant.module, path)
        self._plant = plant

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._plant.source().encode(), self.path)


class _Finder:
    """Finds one module, with a bug."""

    def __init__(self, plant: Plant) -> None:
        self._plant = plant

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self._plant.module:
            return None
        file = str(ROOT / "axon_ps" / self._plant.path)
        return importlib.machinery.ModuleSpec(fullname, _Loader(self._plant, file), origin=file)


def plant(wanted: Plant) -> None:
    """Let this process import the product with a bug; nothing of it may be imported yet."""
    assert not any(name.startswith("axon_ps.") for name in sys.modules)
    sys.meta_path.insert(0, _Finder(wanted))


def find(number: int, seeds: str) -> tuple[str, float]:
    """Simulate with a bug in a process of its own; return its first failure as text, and the seconds that it took."""
    began_s = time.perf_counter()
    command = [sys.executable, "-m", "axon_ps_lab.interleavings", "--seeds", seeds, "--first"]
    done = subprocess.run([*command, "--plant", str(number)], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("seed ")]
    unforeseen = "" if done.returncode == 0 else f"? {done.stderr[-300:]}"
    return lines[0] if lines else unforeseen, time.perf_counter() - began_s


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:3000", help="from:to, of each; ends with the first that fails")
    parser.add_argument("--only", default=[""], nargs="+", help="parts of names")
    parser.add_argument("--rare", action="store_true", help="those, too, that so many seeds may not show")
    options = parser.parse_args()
    tried = [(number, p) for number, p in enumerate(PLANTS) if options.rare or not p.rare]
    chosen = [(number, p) for number, p in tried if any(text in p.name for text in options.only)]
    rows: list[dict[str, object]] = []
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda each: find(each[0], options.seeds), chosen)
        for (_, p), (output, took_s) in zip(chosen, found, strict=True):
            is_found = output.startswith("seed")
            row = {
                "bug": p.name,
                "real": p.real,
                "rare": p.rare,
                "found": is_found,
                "s": round(took_s, 1),
                "by": output,
            }
            rows.append(row)
            print(f"{'found' if is_found else 'NOT FOUND'} {took_s:6.1f} s  {p.name}\n    {output[:160]}", flush=True)
    missed = sum(not row["found"] and not row["rare"] for row in rows)
    rare = sum(not row["found"] for row in rows) - missed
    print(f"{len(chosen)} bugs, {missed} not found" + (f", and {rare} rare ones" if rare else ""))
    if chosen == tried:
        print("wrote", report.write("planted", rows, seeds=options.seeds))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
