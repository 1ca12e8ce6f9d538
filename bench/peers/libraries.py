"""Other libraries' sequence parallelism. Where one does not run on this machine, its error is the row."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from bench.peers.case import Case, Method, contiguous, whole, zigzag


def deepspeed(case: Case, rank: int, size: int) -> Method:
    """`DistributedAttention` of DeepSpeed-Ulysses around torch's operator, [rows, batch, heads, dim]."""
    from deepspeed import comm
    from deepspeed.sequence.layer import DistributedAttention

    if not comm.is_initialized():
        comm.init_distributed("gloo", verbose=False, auto_mpi_discovery=False)
    documents = case.documents()

    def local(q: Tensor, k: Tensor, v: Tensor, *args: object, **kwargs: object) -> Tensor:
        return whole(q[:, 0], k[:, 0], v[:, 0], documents, case.causal)[:, None]

    traded = DistributedAttention(local, dist.group.WORLD, scatter_idx=2, gather_idx=0)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = traded(q[:, None], k[:, None], v[:, None], 1)
        return out[:, 0]

    return Method(contiguous(case, rank, size), attend)


def context_parallel(case: Case, rank: int, size: int) -> Method:
    """PyTorch's `context_parallel`, which replaces the operator; rows are sharded as its load balancer does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel as sharded

    if len(case.lengths) > 1:
        raise ValueError("context_parallel has no packed documents")
    mesh = init_device_mesh("cpu", (size,))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        one = [x.transpose(0, 1)[None] for x in (q, k, v)]
        # it shards the buffers it is given, at least one; these rows are sharded already
        with sharded(mesh, buffers=[torch.empty(case.tokens)], buffer_seq_dims=[0]):
            out = functional.scaled_dot_product_attention(
                *one, is_causal=case.causal, enable_gqa=case.heads != case.kv_heads
            )
        return out[0].transpose(0, 1)

    return Method(np.concatenate(zigzag(case, rank, size)), attend)


def diffusers(case: Case, rank: int, size: int) -> Method:
    """diffusers' Ulysses. `enable_parallelism` divides by the number of accelerators, so its steps are taken here."""
    from diffusers import ContextParallelConfig
    from diffusers.models._modeling_parallel import ParallelConfig
    from diffusers.models.attention_dispatch import dispatch_attention_fn
    from torch.distributed.device_mesh import init_device_mesh

    if len(case.lengths) > 1:
        raise ValueError("diffusers has no packed documents")
    config = ParallelConfig(context_parallel_config=ContextParallelConfig(ulysses_degree=size))
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("ring", "ulysses"))
    config.setup(rank, size, torch.device("cpu"), mesh=mesh)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        one = [x[None] for x in (q, k, v)]
        grouped = case.heads != case.kv_heads
        out = dispatch_attention_fn(
            *one, is_causal=case.causal, enable_gqa=grouped, backend="native", parallel_config=config
        )
        return out[0]

    return Method(contiguous(case, rank, size), attend)
