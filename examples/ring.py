"""Ring attention in place of ordinary attention, forward and backward, checked against it.

Run ``torchrun --nproc-per-node 4 examples/ring.py``; plain ``python examples/ring.py`` runs one rank.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

import seqpar

LENGTHS = [700, 13, 311]  # packed documents; no number of ranks divides their sum
HEADS, DIM = 4, 32


def main() -> None:
    """One rank's part."""
    if "RANK" in os.environ:
        # on GPUs: torch.cuda.set_device(int(os.environ["LOCAL_RANK"])), then "cpu:gloo,cuda:nccl"
        dist.init_process_group("gloo")
    comm = seqpar.GroupComm() if dist.is_initialized() else seqpar.LocalComm()
    torch.manual_seed(0)  # every rank makes the same global tensors and keeps its rows
    q, k, v, dout = torch.randn(4, sum(LENGTHS), HEADS, DIM)

    # an ordinary model: every document attends to itself, causally
    dense = [x.clone().requires_grad_() for x in (q, k, v)]
    documents = zip(*(x.transpose(0, 1).split(LENGTHS, dim=1) for x in dense), strict=True)
    expected = torch.cat([F.scaled_dot_product_attention(*d, is_causal=True) for d in documents], 1).transpose(0, 1)
    expected.backward(dout)

    # the same function on a ring of ranks: each starts with its own keys and passes them on
    plan = seqpar.Plan(seqpar.Mask(LENGTHS), seqpar.Layout.zigzag(LENGTHS, comm.size), transport="ring")
    local = [seqpar.shard(x, plan, comm.rank).requires_grad_() for x in (q, k, v)]
    out = seqpar.attention(*local, plan, comm)
    out.backward(seqpar.shard(dout, plan, comm.rank))

    found = [seqpar.unshard(x.detach(), plan, comm) for x in (out, *(x.grad for x in local))]
    pairs = zip(found, (expected.detach(), *(x.grad for x in dense)), strict=True)
    error = float(torch.stack([(a - b).abs().max() for a, b in pairs]).max())  # NaN stays NaN
    if comm.rank == 0:
        verdict = "PASS" if error < 1e-5 else "FAIL"
        print(f"{verdict}: ring attention on {comm.size} ranks; out, dq, dk, dv within {error:.1e}")
    assert error < 1e-5, f"rank {comm.rank}: off by {error:.1e}"
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
