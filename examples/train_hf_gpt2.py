"""A Hugging Face GPT-2, built from its config, trained with FSDP: nothing is downloaded, the text is Python's own.

    axon-ps run --nproc-per-node 2 --shards 2 examples/train_hf_gpt2.py
    axon-ps run --nproc-per-node 4 --shards 2 examples/train_hf_gpt2.py --strategy hybrid_shard --nodes 2
    python examples/train_hf_gpt2.py --plain --replicas 2

Needs the extra `examples`. The second command pretends that its four workers are on two nodes of two. The third is the
same training by transformers alone, in one process on the joined batches: it comes to the same losses. The result is a
directory that `GPT2LMHeadModel.from_pretrained` reads, and `finetune_lora.py` too.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

import axon_ps
from axon_ps.parallel import AdamW, ShardingStrategy
from axon_ps.parallel import FullyShardedDataParallel as FSDP
from corpus import Corpus


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/hf_gpt2"), help="where losses and the model go")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--channels", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=128, help="bytes of a window")
    parser.add_argument("--batch", type=int, default=8, help="windows of each worker's batch")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--clip", type=float, default=1.0, help="largest global gradient norm")
    strategies = [s.name.lower() for s in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)]
    parser.add_argument("--strategy", choices=strategies, default="full_shard")
    parser.add_argument("--nodes", type=int, default=1, help="pretend that the workers are on so many nodes")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in backward")
    parser.add_argument("--plain", action="store_true", help="transformers alone, in one process")
    parser.add_argument("--replicas", type=int, default=2, help="with --plain: join the batches of so many workers")
    return parser.parse_args(arguments)


def build(options: argparse.Namespace) -> GPT2LMHeadModel:
    """GPT-2 in the size asked for, on bytes, without dropout; the same for the same seed."""
    torch.manual_seed(options.seed)
    config = GPT2Config(
        vocab_size=256,
        n_positions=options.context,
        n_embd=options.channels,
        n_layer=options.layers,
        n_head=options.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        loss_type="ForCausalLM",
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    if options.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def batch(corpus: Corpus, options: argparse.Namespace, step: int, replica: int) -> Tensor:
    """The windows of one worker at one step: i64[batch, context]."""
    where = {"seed": options.seed, "step": step, "replica": replica}
    return corpus.batch(**where, batch=options.batch, context=options.context)[0]


def report(step: int, steps: int, loss: float) -> None:
    """A line now and then."""
    if step % max(1, steps // 10) == 0 or step == steps - 1:
        print(f"step {step + 1}/{steps}  loss {loss:.4f}", flush=True)


def finish(options: argparse.Namespace, losses: list[float], state: Callable[[], dict[str, Tensor]]) -> None:
    """Write the losses and the model as transformers does."""
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "losses.json").write_text(json.dumps(losses))
    model = build(options)
    model.load_state_dict(state())
    model.save_pretrained(options.out / "model")
    print(f"losses and model in {options.out}", flush=True)


def train_plain(options: argparse.Namespace) -> tuple[list[float], GPT2LMHeadModel]:
    """Plain transformers and torch on the joined batches of all replicas; the loss of every step, and the model."""
    model, corpus, losses = build(options), Corpus(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, eps=1e-6)
    for step in range(options.steps):
        tokens = torch.cat([batch(corpus, options, step, replica) for replica in range(options.replicas)])
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        report(step, options.steps, losses[-1])
    return losses, model


def train(world: axon_ps.World, options: argparse.Namespace) -> None:
    """The same, sharded."""
    hybrid = options.strategy == "hybrid_shard"
    model = FSDP(
        build(options),
        world.default_group,
        sharding_strategy=ShardingStrategy[options.strategy.upper()],
        unit_types={GPT2Block},
        **({"intra_node_size": world.world_size // options.nodes} if hybrid else {}),
    )
    optimizer = AdamW(model, lr=options.lr, eps=1e-6)
    corpus, losses = Corpus(), []
    for step in range(world.version, options.steps):  # not 0 in a job that was started again
        tokens = batch(corpus, options, step, world.rank)
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        model.clip_grad_norm(options.clip)
        result = optimizer.step()
        optimizer.zero_grad()
        if not result.committed:
            raise RuntimeError(f"a worker came or went, which this example does not expect: {result.reason}")
        losses.append(float(axon_ps.all_reduce_mean(loss.detach())))
        if world.is_main_process:
            report(step, options.steps, losses[-1])
    state = model.state_dict()
    if world.is_main_process:
        finish(options, losses, lambda: state)
    world.barrier("finished")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one worker from joining to leaving, or the plain training."""
    options = parse(arguments)
    if options.plain:
        losses, model = train_plain(options)
        finish(options, losses, model.state_dict)
        return
    if options.nodes > 1:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        os.environ["AXON_PS_NODE"] = f"node-{rank * options.nodes // size}"
    with axon_ps.World.init() as world:
        train(world, options)


if __name__ == "__main__":
    main()
