"""Ulysses with grouped key heads: ranks trade tokens for heads, even with more ranks than key heads.

Every width that divides the ranks is tried. Width 1 leaves everything to the transport, the full width everything to
the head trade, and a width between them is the two-dimensional scheme (USP). All must give the same answer.

Run ``torchrun --nproc-per-node 4 examples/ulysses.py``; plain ``python examples/ulysses.py`` runs one rank.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

import seqpar

TOKENS, HEADS, KV_HEADS, DIM = 1001, 6, 2, 32  # three query heads to a key head


def main() -> None:
    """One rank's part."""
    if "RANK" in os.environ:
        # on GPUs: torch.cuda.set_device(int(os.environ["LOCAL_RANK"])), then "cpu:gloo,cuda:nccl"
        dist.init_process_group("gloo")
    comm = seqpar.GroupComm() if dist.is_initialized() else seqpar.LocalComm()
    torch.manual_seed(0)  # every rank makes the same global tensors and keeps its rows
    q, dout = torch.randn(2, TOKENS, HEADS, DIM)
    k, v = torch.randn(2, TOKENS, KV_HEADS, DIM)

    dense = [x.clone().requires_grad_() for x in (q, k, v)]
    heads_first = (x.repeat_interleave(HEADS // x.shape[1], dim=1).transpose(0, 1) for x in dense)
    expected = F.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(0, 1)
    expected.backward(dout)

    errors = []
    layout = seqpar.Layout.contiguous(TOKENS, comm.size)
    for width in (w for w in range(1, comm.size + 1) if comm.size % w == 0):
        plan = seqpar.Plan(seqpar.Mask([TOKENS]), layout, ulysses=width)
        local = [seqpar.shard(x, plan, comm.rank).requires_grad_() for x in (q, k, v)]
        before = comm.stats.bytes_sent
        out = seqpar.attention(*local, plan, comm)
        sent = comm.stats.bytes_sent - before
        out.backward(seqpar.shard(dout, plan, comm.rank))
        found = [seqpar.unshard(x.detach(), plan, comm) for x in (out, *(x.grad for x in local))]
        pairs = zip(found, (expected.detach(), *(x.grad for x in dense)), strict=True)
        error = float(torch.stack([(a - b).abs().max() for a, b in pairs]).max())  # NaN stays NaN
        errors.append(error)
        if comm.rank == comm.size - 1:
            print(f"width {width}: rank {comm.rank} sent {sent:,} bytes forward, off by {error:.1e}", flush=True)
    worst = float(torch.tensor(errors).max())
    assert worst < 1e-5, f"rank {comm.rank}: off by {worst:.1e}"
    if comm.rank == comm.size - 1:
        print(f"PASS: every Ulysses width on {comm.size} ranks; out, dq, dk, dv within {worst:.1e}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
