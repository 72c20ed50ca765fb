"""All-reduce of sparse tensors: DDP's sparse gradients of embeddings.

Algorithm: the numbers of non-zeros are gathered, then indices, then values. Every rank adds up all of them in rank
order, so the result has the same bits everywhere. The call always blocks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from axon_ps.errors import InvalidRequest
from axon_ps.parallel.c10d.calls import Performer, seconds
from axon_ps.parallel.c10d.tensors import native, native_numel
from axon_ps.parallel.c10d.work import AxonWork


def all_reduce_sparse(performer: Performer, tensor: Tensor, options: Any) -> AxonWork:
    """Replace a sparse COO tensor by the coalesced sum (or average) of all ranks' tensors.

    Raises:
        InvalidRequest: it has another layout, or the operation is neither SUM nor AVG.
    """
    if tensor.layout is not torch.sparse_coo:
        raise InvalidRequest(f"a tensor has the layout {tensor.layout}; of sparse ones only COO can be reduced")
    average = options.reduceOp == dist.ReduceOp.AVG
    if not average and options.reduceOp != dist.ReduceOp.SUM:
        raise InvalidRequest("sparse tensors can only be summed and averaged")
    group = performer.group
    timeout_s = seconds(options.timeout) or performer.timeout_s
    ours = tensor.detach().coalesce()
    indices, values = ours.indices(), ours.values()
    count = torch.tensor([values.shape[0]], dtype=torch.int64, device=values.device)
    nonzeros = group.all_gather(count, timeout_s=timeout_s).tolist()
    rows, dims = sum(nonzeros), indices.shape[0]

    all_indices = indices.new_empty((rows, dims))
    group.all_gather(indices.t().contiguous(), out=all_indices, counts=nonzeros, timeout_s=timeout_s)
    all_values = values.new_empty((rows, *values.shape[1:]))
    width = all_values[:1].numel() if rows else 0
    counts = [native_numel(n * width, values.dtype) for n in nonzeros]
    flat = native(values.contiguous().view(-1))
    group.all_gather(flat, out=native(all_values.view(-1)), counts=counts, timeout_s=timeout_s)

    if average:
        all_values /= group.world_size
    dtype, device = all_values.dtype, all_values.device
    total = torch.sparse_coo_tensor(
        all_indices.t(), all_values, tensor.shape, dtype=dtype, device=device, check_invariants=False
    )
    with torch.no_grad():
        tensor.copy_(total.coalesce())  # a copy into a detached tensor would leave this one as it was
    return AxonWork.done([tensor], "all_reduce")
