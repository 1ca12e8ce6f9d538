"""A sliding window over one long document in uneven shards: only the window's halo moves between ranks.

Run ``torchrun --nproc-per-node 4 examples/long_context.py``; plain ``python examples/long_context.py`` runs one rank.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

import seqpar

TOKENS, WINDOW, HEADS, KV_HEADS, DIM = 3000, 100, 4, 2, 32


def main() -> None:
    """One rank's part."""
    if "RANK" in os.environ:
        # on GPUs: torch.cuda.set_device(int(os.environ["LOCAL_RANK"])), then "cpu:gloo,cuda:nccl"
        dist.init_process_group("gloo")
    comm = seqpar.GroupComm() if dist.is_initialized() else seqpar.LocalComm()
    torch.manual_seed(0)  # every rank makes the same global tensors and keeps its rows
    q = torch.randn(TOKENS, HEADS, DIM)
    k, v = torch.randn(2, TOKENS, KV_HEADS, DIM)

    # rank r gets r + 1 parts, as if later ranks had more memory
    parts = comm.size * (comm.size + 1) // 2
    cuts = [TOKENS * rank * (rank + 1) // 2 // parts for rank in range(comm.size + 1)]
    layout = seqpar.Layout([range(start, end) for start, end in zip(cuts, cuts[1:], strict=False)])
    mask = seqpar.Mask([TOKENS], window=(WINDOW, 0))  # a query sees itself and WINDOW keys before it
    plan = seqpar.Plan(mask, layout)

    local = [seqpar.shard(x, plan, comm.rank) for x in (q, k, v)]
    before = comm.stats.bytes_received
    out = seqpar.attention(*local, plan, comm)
    received = comm.stats.bytes_received - before

    # the oracle reads the mask's bounds: query i sees key j iff lo[i] <= j < hi[i]
    lo, hi = (torch.from_numpy(b)[:, None] for b in mask.bounds(range(TOKENS)))
    keys = torch.arange(TOKENS)
    heads_first = (x.repeat_interleave(HEADS // x.shape[1], dim=1).transpose(0, 1) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(*heads_first, attn_mask=(lo <= keys) & (keys < hi)).transpose(0, 1)

    error = float((out - seqpar.shard(expected, plan, comm.rank)).abs().max())
    halo = min(WINDOW, cuts[comm.rank]) * KV_HEADS * 2 * DIM * q.element_size()
    passed = error < 1e-5 and received == halo
    print(
        f"{'PASS' if passed else 'FAIL'}: rank {comm.rank} of {comm.size}, {layout.tokens(comm.rank):,} tokens, "
        f"received {received:,} bytes (halo {halo:,}), out within {error:.1e}"
    )
    assert passed, f"rank {comm.rank}: off by {error:.1e}, received {received} bytes, expected {halo}"
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
