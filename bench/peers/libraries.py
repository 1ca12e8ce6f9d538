"""Other libraries' sequence parallelism. Where one does not run on this machine, its error is the row."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bench.peers.case import Case, Method, contiguous, whole


def deepspeed(case: Case, rank: int, size: int) -> Method:
    """`DistributedAttention` of DeepSpeed-Ulysses around torch's operator, [rows, batch, heads, dim]."""
    from deepspeed import comm
    from deepspeed.sequence.layer import DistributedAttention

    if not comm.is_initialized():
        comm.init_distributed("gloo", verbose=False, auto_mpi_discovery=False)
    documents = case.documents()

    def local(q: Tensor, k: Tensor, v: Tensor, *args: object, **kwargs: object) -> Tensor:
        return whole(q[:, 0], k[:, 0], v[:, 0], documents)[:, None]

    traded = DistributedAttention(local, dist.group.WORLD, scatter_idx=2, gather_idx=0)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = traded(q[:, None], k[:, None], v[:, None], 1)
        return out[:, 0]

    return Method(contiguous(case, rank, size), attend)


def context_parallel(case: Case, rank: int, size: int) -> Method:
    """PyTorch's `context_parallel`, which shards buffers in place and replaces the operator."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel as sharded

    if len(case.lengths) > 1:
        raise ValueError("context_parallel has no packed documents: a causal mask over one sequence only")
    mesh = init_device_mesh("cpu", (size,))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        one = [x.transpose(0, 1)[None] for x in (q, k, v)]
        with sharded(mesh, buffers=[], buffer_seq_dims=[]):
            out = scaled_dot_product_attention(*one, is_causal=True, enable_gqa=case.heads != case.kv_heads)
        return out[0].transpose(0, 1)

    return Method(contiguous(case, rank, size), attend)


def diffusers(case: Case, rank: int, size: int) -> Method:
    """diffusers' `enable_parallelism`, on a Flux of one small block: it starts, or the row says why not."""
    from diffusers import ContextParallelConfig, FluxTransformer2DModel

    model = FluxTransformer2DModel(
        num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=size, in_channels=4,
        joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=size))
    raise NotImplementedError("enable_parallelism started: time its models by a benchmark of their own")
