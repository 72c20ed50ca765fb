"""A worker that prints the state of its accelerator, and gathers values of both workers."""

from __future__ import annotations

import torch
from accelerate import DistributedType, PartialState

from axon_ps.huggingface import Accelerator

accelerator = Accelerator()
rank = accelerator.process_index
gathered = [
    accelerator.gather(torch.tensor(float(rank))).tolist(),
    accelerator.gather({"x": torch.full((2, 1), rank)})["x"].flatten().tolist(),
    accelerator.gather_for_metrics(torch.tensor([rank, rank])).tolist(),
    accelerator.reduce(torch.tensor([1.0 + rank]), "mean").tolist(),
]
assert gathered == [[0.0, 1.0], [0, 0, 1, 1], [0, 0, 1, 1], [1.5]], gathered
assert accelerator.distributed_type in (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
assert repr(PartialState()) in repr(accelerator.state)
if accelerator.is_main_process:
    print(accelerator.state)
accelerator.end_training()
