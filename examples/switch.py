"""Dynamic sequence parallelism: a block attends over space, then over time; the sharded dim switches in between.

A video is ``x [time, space, dim]``. Attention over space needs whole frames, attention over time whole pixels. One
`switch` before the temporal half and one after it are all the communication. Neither dim needs to be divisible by the
number of ranks.

Run ``torchrun --nproc-per-node 4 examples/switch.py``; plain ``python examples/switch.py`` runs one rank.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import seqpar

TIME, SPACE, DIM = 13, 21, 32


def attend(x: Tensor, weight: Tensor) -> Tensor:
    """Self-attention of one head along dim 1 of ``x [batch, length, dim]``, with a residual."""
    q, k, v = (x @ weight).chunk(3, dim=-1)
    return x + F.scaled_dot_product_attention(q, k, v)


def dense_block(x: Tensor, space: Tensor, time: Tensor) -> Tensor:
    """The block on one device."""
    x = attend(x, space)
    return attend(x.transpose(0, 1), time).transpose(0, 1)


def sharded_block(x: Tensor, space: Tensor, time: Tensor, comm, frames: list[int], pixels: list[int]) -> Tensor:
    """The block on this rank's frames: ``[frames, SPACE, DIM]`` in and out, ``[TIME, pixels, DIM]`` in between."""
    x = attend(x, space)
    x = seqpar.switch(x, comm, split_dim=1, concat_dim=0, sizes=(pixels, frames))
    x = attend(x.transpose(0, 1), time).transpose(0, 1).contiguous()
    return seqpar.switch(x, comm, split_dim=0, concat_dim=1, sizes=(frames, pixels))


def main() -> None:
    """One rank's part."""
    if "RANK" in os.environ:
        # on GPUs: torch.cuda.set_device(int(os.environ["LOCAL_RANK"])), then "cpu:gloo,cuda:nccl"
        dist.init_process_group("gloo")
    comm = seqpar.GroupComm() if dist.is_initialized() else seqpar.LocalComm()
    torch.manual_seed(0)  # every rank makes the same global tensors
    x, dout = torch.randn(2, TIME, SPACE, DIM)
    space, time = torch.randn(2, DIM, 3 * DIM) / DIM**0.5

    whole = x.clone().requires_grad_()
    expected = dense_block(whole, space, time)
    expected.backward(dout)

    frames, pixels = ([len(part) for part in torch.arange(n).tensor_split(comm.size)] for n in (TIME, SPACE))
    local = x.split(frames)[comm.rank].clone().requires_grad_()
    out = sharded_block(local, space, time, comm, frames, pixels)
    out.backward(dout.split(frames)[comm.rank])

    pairs = ((out.detach(), expected.detach()), (local.grad, whole.grad))
    errors = [(a - b.split(frames)[comm.rank]).abs().max() for a, b in pairs]
    error = float(torch.stack(errors).max())  # NaN stays NaN
    verdict = "PASS" if error < 1e-5 else "FAIL"
    print(f"{verdict}: rank {comm.rank} of {comm.size}, {frames[comm.rank]} frames, out and dx within {error:.1e}")
    assert error < 1e-5, f"rank {comm.rank}: off by {error:.1e}"
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
