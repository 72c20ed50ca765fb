"""What the scripts beside this file train: a GPT-2 made from its config, on text in memory. Nothing is downloaded.

And the options that all of them have.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

CONTEXT = 32
TEXT = "a worker may die and a server may die, and the parameters are still there; " * 40


def gpt2(seed: int = 0) -> GPT2LMHeadModel:
    """A GPT-2 of 0.1M parameters on bytes, without dropout; the same for the same seed."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=256,
        n_positions=CONTEXT,
        n_embd=64,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        loss_type="ForCausalLM",
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


class Windows(Dataset):
    """Windows of the text, as bytes: {"input_ids": i64[context], "labels": the same}."""

    def __init__(self, count: int = 64) -> None:
        self._bytes = torch.tensor(list(TEXT.encode()))
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self._bytes[index * 17 % 1000 :][:CONTEXT]
        return {"input_ids": window, "labels": window}


def parser(description: str | None, out: str) -> argparse.ArgumentParser:
    """A command line with the options of all scripts.

    Args:
        description: of the script.
        out: where it writes what it has trained, its checkpoints and `losses.json`.
    """
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=Path(out))
    made.add_argument("--steps", type=int, default=16)
    made.add_argument("--accumulate", type=int, default=1, help="batches of a step")
    made.add_argument("--bf16", action="store_true")
    made.add_argument("--compile", help="a backend of torch.compile")
    made.add_argument("--checkpointing", action="store_true", help="recompute activations in backward")
    made.add_argument("--save-every", type=int, help="save a checkpoint after every so many steps")
    made.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    return made
