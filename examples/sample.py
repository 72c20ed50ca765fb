"""Text from an exported model, in plain torch: nothing of axon_ps is needed, or imported.

python examples/sample.py runs/gpt/export --prompt "def main("
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import safetensors.torch
import torch

from gpt import GPT, GPTConfig, generate

PROMPT = 'import os\n\n\nclass FileReader:\n    """'


def load(directory: Path) -> GPT:
    """The model of `directory`, which holds config.json and model.safetensors.

    Raises:
        FileNotFoundError: one of them is missing.
    """
    config = GPTConfig(**json.loads((directory / "config.json").read_text()))
    model = GPT(config)
    safetensors.torch.load_model(model, directory / "model.safetensors")
    return model.eval()


def sample(directory: Path, *, prompt: str = PROMPT, length: int = 300, temperature: float = 0.6, seed: int = 0) -> str:
    """`prompt` and `length` bytes after it."""
    model = load(directory)
    prefix = prompt.encode()
    text = generate(model, prefix, length, context=model.config.context, temperature=temperature, seed=seed)
    return (prefix + bytes(text)).decode(errors="replace")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="holds config.json and model.safetensors")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--length", type=int, default=500, help="bytes")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    settings = {"prompt": options.prompt, "length": options.length, "temperature": options.temperature}
    print(sample(options.directory, **settings, seed=options.seed))


if __name__ == "__main__":
    torch.set_num_threads(2)
    main()
