"""A fine-tune with LoRA: a GPT-2 stays as it is, and small adapters beside its projections learn.

    axon-ps run --nproc-per-node 2 --shards 2 examples/train_hf_gpt2.py
    axon-ps run --nproc-per-node 2 --shards 2 examples/finetune_lora.py --base runs/hf_gpt2/model

Needs the extra `examples`. The base has learned all of Python's library; the adapters learn one package of it. (Without
`--base` they learn beside a fresh model, which is of use for a try only.) Only the adapters have gradients and
optimizer state, and only they travel: with SHARD_GRAD_OP a worker gathers the frozen base once. What is written at the
end is the adapters alone, a few per cent of the model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

import axon_ps
from axon_ps.parallel import AdamW, ShardingStrategy
from axon_ps.parallel import FullyShardedDataParallel as FSDP
from corpus import Corpus
from train_hf_gpt2 import build

ADAPTED = ("c_attn", "c_fc")


class LoRA(nn.Module):
    """y = base(x) + scale · x A B, with a frozen base (Hu et al. 2021, https://arxiv.org/abs/2106.09685).

    Args:
        base: transformers' `Conv1D`, whose weight is [inputs, outputs].
        rank: width of the adapter.
        alpha: scale · rank.
    """

    def __init__(self, base: nn.Module, rank: int, alpha: float) -> None:
        super().__init__()
        inputs, outputs = base.weight.shape
        self.base = base
        self.scale = alpha / rank
        self.a = nn.Parameter(torch.randn(inputs, rank) * inputs**-0.5)
        self.b = nn.Parameter(torch.zeros(rank, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * (x @ self.a @ self.b)


def adapt(model: nn.Module, rank: int, alpha: float) -> nn.Module:
    """Freeze a model and put adapters beside its projections."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in ADAPTED:
                setattr(parent, name, LoRA(child, rank, alpha))
    return model


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="a directory of train_hf_gpt2.py's; without it, a fresh model")
    parser.add_argument("--out", type=Path, default=Path("runs/lora"), help="where losses and adapters go")
    parser.add_argument("--package", default="asyncio", help="what of the standard library to learn")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rank", type=int, default=8, help="width of the adapters")
    parser.add_argument("--alpha", type=float, default=16.0)
    parser.add_argument("--batch", type=int, default=8, help="windows of each worker's batch")
    parser.add_argument("--lr", type=float, default=3e-3)
    fresh = parser.add_argument_group("without --base")
    fresh.add_argument("--layers", type=int, default=4)
    fresh.add_argument("--channels", type=int, default=128)
    fresh.add_argument("--heads", type=int, default=4)
    fresh.add_argument("--context", type=int, default=128)
    options = parser.parse_args(arguments)
    options.checkpointing = False
    return options


def base_model(options: argparse.Namespace) -> GPT2LMHeadModel:
    """The model to adapt."""
    if options.base is None:
        return build(options)
    model = GPT2LMHeadModel.from_pretrained(options.base, loss_type="ForCausalLM")
    options.context = model.config.n_positions
    return model


def train(world: axon_ps.World, options: argparse.Namespace) -> None:
    """Train the adapters to the last step and write them."""
    torch.manual_seed(options.seed)
    base = base_model(options)
    before = {name: value.clone() for name, value in base.state_dict().items()}
    model = FSDP(
        adapt(base, options.rank, options.alpha),
        world.default_group,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        unit_types={GPT2Block},
    )
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=options.lr)
    corpus, losses = Corpus(Corpus().root / options.package), []
    for step in range(world.version, options.steps):  # not 0 in a job that was started again
        where = {"seed": options.seed, "step": step, "replica": world.rank}
        tokens, _ = corpus.batch(**where, batch=options.batch, context=options.context)
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(axon_ps.all_reduce_mean(loss.detach())))
        if world.is_main_process and (step % max(1, options.steps // 10) == 0 or step == options.steps - 1):
            print(f"step {step + 1}/{options.steps}  loss {losses[-1]:.4f}", flush=True)
    state = model.state_dict()
    if world.is_main_process:
        finish(options, state, before, losses)
    world.barrier("finished")


def finish(
    options: argparse.Namespace, state: dict[str, Tensor], before: dict[str, Tensor], losses: list[float]
) -> None:
    """Write the adapters; see that nothing else has changed."""
    adapters = {name: value for name, value in state.items() if name.endswith((".a", ".b"))}
    after = {name.replace(".base.", "."): value for name, value in state.items() if name not in adapters}
    changed = [name for name, value in after.items() if not torch.equal(value, before[name])]
    if changed:
        raise RuntimeError(f"frozen parameters have changed: {changed}")
    options.out.mkdir(parents=True, exist_ok=True)
    save_file(adapters, options.out / "adapters.safetensors")
    (options.out / "losses.json").write_text(json.dumps(losses))
    numel, whole = (sum(v.numel() for v in values.values()) for values in (adapters, before))
    print(f"adapters of {numel:,} parameters beside {whole:,} frozen ones in {options.out}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one worker from joining to leaving."""
    options = parse(arguments)
    with axon_ps.World.init() as world:
        train(world, options)


if __name__ == "__main__":
    main()
