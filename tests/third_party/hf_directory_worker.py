"""One worker of `test_hf_directories.py`: a directory in, some steps, a directory out, and DCP on both sides."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from accelerate import init_empty_weights
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

import axon_ps
from axon_ps.huggingface import pretrained, save_pretrained
from axon_ps.parallel import FSDP, AdamW


def config(tied: bool) -> LlamaConfig:
    """A tiny Llama, in two blocks."""
    return LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=tied,
    )


def empty(tied: bool) -> torch.nn.Module:
    """On the meta device, as one builds what does not fit."""
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config(tied))
    model.tie_weights()
    return model


def in_and_out(world: axon_ps.World, out: Path, tied: bool) -> None:
    """What transformers wrote, trained, as a directory that transformers reads."""
    torch.manual_seed(3)
    first = AutoModelForCausalLM.from_config(config(tied))
    if world.is_main_process:
        first.save_pretrained(out / "first", max_shard_size="20KB")
    world.barrier("written")
    model = empty(tied)
    blocks = type(first.model.layers[0])
    model = FSDP(model, unit_types={blocks}, param_init_fn=pretrained(model, out / "first"))
    for name, value in model.state_dict().items():
        assert torch.equal(value, first.state_dict()[name]), name
    optimizer = AdamW(model, lr=0.01)
    tokens = torch.arange(16).view(2, 8) + world.rank
    for _ in range(3):
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")))
    save_pretrained(model, out / "trained", tokenizer=tokenizer, max_file_bytes=20_000)
    save_pretrained(model, out / "bf16", dtype=torch.bfloat16)
    state = model.state_dict()
    if world.is_main_process:
        check(out, state)
        dcp_writes(out / "dcp", state)
    world.barrier("checked")
    again = empty(tied)
    again = FSDP(again, unit_types={blocks}, param_init_fn=pretrained(again, out / "dcp"))
    for name, value in again.state_dict().items():
        assert torch.equal(value, state[name]), name
    world.barrier("read")


def check(out: Path, state: dict[str, torch.Tensor]) -> None:
    """transformers and DCP read what is on the servers."""
    assert len(list((out / "trained").glob("model-*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(out / "trained").state_dict()
    assert loaded.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(loaded[name], value), name
    assert PreTrainedTokenizerFast.from_pretrained(out / "trained").convert_tokens_to_ids("b") == 1
    rounded = AutoModelForCausalLM.from_pretrained(out / "bf16", dtype=torch.bfloat16).state_dict()
    for name, value in state.items():
        assert torch.equal(rounded[name], value.to(torch.bfloat16)), name
    into = {name: torch.zeros_like(value) for name, value in untied(state).items()}
    dcp.load(into, storage_reader=dcp.HuggingFaceStorageReader(str(out / "trained")), no_dist=True)
    for name, value in into.items():
        assert torch.equal(value, state[name]), name


def untied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each tensor once, under its first name, as safetensors have it."""
    seen: dict[int, str] = {}
    return {n: v for n, v in state.items() if seen.setdefault(v.data_ptr(), n) == n}


def dcp_writes(directory: Path, state: dict[str, torch.Tensor]) -> None:
    """What DCP makes of it."""
    own = untied(state)
    writer = dcp.HuggingFaceStorageWriter(str(directory), fqn_to_index_mapping=dict.fromkeys(own, 1))
    dcp.save(own, storage_writer=writer, no_dist=True)


if __name__ == "__main__":
    with axon_ps.World.init() as joined:
        in_and_out(joined, Path(sys.argv[1]), sys.argv[2] == "tied")
        print("the same")
