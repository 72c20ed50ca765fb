"""A policy that learns by playing: a trainer in the job, and a sampler beside it that plays with the newest weights.

    axon-ps run --nproc-per-node 1 --shards 2 examples/rl_sampler.py

The sampler is a process of its own and no member of the job: it subscribes to the policy, plays rounds of a bandit game
(each state has one right action) with whatever version is newest, and sends them to the trainer through a queue, with
the version that played them. The trainer makes REINFORCE steps of them, off-policy by as many versions as came between.
Kill the sampler, or a shard server: the job goes on. In earnest the sampler is an inference engine on other GPUs
(docs/subscribe.md), and the queue whatever carries text.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import queue
from typing import Any

import torch
from torch import nn

import axon_ps
from axon_ps import parallel

STATES, ACTIONS, ROUNDS = 8, 4, 64


def policy() -> nn.Module:
    """Logits of the actions, by state."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(STATES, 32), nn.ReLU(), nn.Linear(32, ACTIONS))


def right_action(states: torch.Tensor) -> torch.Tensor:
    """What the game rewards."""
    return (3 * states + 1) % ACTIONS


def play(options: dict[str, str], rounds: mp.Queue[Any], stop: Any) -> None:
    """The sampler: play with the newest version, until told to stop."""
    torch.set_num_threads(1)
    model = policy()
    with axon_ps.subscribe("policy", changes=True, **options) as subscription:  # type: ignore[arg-type]
        while not stop.is_set():
            version = parallel.load_weights(model, subscription.latest())
            states = torch.randint(STATES, (ROUNDS,))
            with torch.no_grad():
                actions = torch.distributions.Categorical(logits=model(states)).sample()
            rewards = (actions == right_action(states)).float()
            try:
                rounds.put((version, states.tolist(), actions.tolist(), rewards.tolist()), timeout=0.5)
            except queue.Full:
                continue


def train(world: axon_ps.World, rounds: mp.Queue[Any], steps: int) -> tuple[float, int]:
    """The trainer: steps with what the sampler played; the last rewards' mean, and the oldest version that was used."""
    model = parallel.FSDP(policy(), world.default_group, name="policy")
    optimizer = parallel.AdamW(model, lr=3e-2, weight_decay=0.0)
    reward, most_behind = 0.0, 0
    for step in range(steps):
        version, *played = rounds.get(timeout=120)
        states, actions, rewards = (torch.tensor(each) for each in played)
        chosen = torch.log_softmax(model(states), -1).gather(1, actions[:, None])[:, 0]
        (-(chosen * (rewards - rewards.mean())).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        reward = 0.8 * reward + 0.2 * float(rewards.mean())
        most_behind = max(most_behind, world.version - 1 - version)
        if step % 20 == 0:
            print(f"step {step}: reward {reward:.2f}, played with version {version} of {world.version}", flush=True)
    return reward, most_behind


def main() -> None:
    """Start the sampler beside this worker, and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    torch.set_num_threads(1)
    context = mp.get_context("spawn")
    rounds, stop = context.Queue(maxsize=4), context.Event()
    sampler = context.Process(target=play, args=({}, rounds, stop), daemon=True)
    sampler.start()  # it waits for the policy, which the job does not have yet
    try:
        with axon_ps.World.init() as world:
            reward, most_behind = train(world, rounds, options.steps)
            print(f"reward {reward:.2f} after {options.steps} steps; samples were at most {most_behind} versions old")
            stop.set()
    finally:
        sampler.terminate()
        sampler.join()


if __name__ == "__main__":
    main()
