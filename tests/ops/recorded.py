"""What passes through a comm in a call, recorded; and one step of a rank, for the tests of guarantees."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

import seqpar
from seqpar.comm import Comm
from seqpar.plan import Plan
from tests.ops.cases import inputs, poisoned

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


class Recorder:
    """A comm that records (phase, stage, bytes sent, bytes received), messages sent by phase, and requested memory."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.exchanges: list[tuple[int, int, int, int]] = []
        self.messages: Counter[int] = Counter()
        self.buffers: list[Tensor] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self.comm, name)

    def exchange(self, sends, recvs, *, tag):
        sent, received = (sum(t.nbytes for ts in side.values() for t in ts) for side in (sends, recvs))
        if sent or received:
            self.exchanges.append((tag.phase, tag.stage, sent, received))
            self.messages[tag.phase] += sum(t.numel() > 0 for ts in sends.values() for t in ts)
        return self.comm.exchange(sends, recvs, tag=tag)

    def empty(self, shape, dtype, device, *, kept=False):
        self.buffers.append(self.comm.empty(shape, dtype, device, kept=kept))
        return self.buffers[-1]

    def posted(self, phase: int) -> list[int]:
        """Stages in which the rank posted something in a phase."""
        return [stage for p, stage, *_ in self.exchanges if p == phase]


def step(comm: Comm, plan: Plan, heads, dims, seed, dtype, backward=True, with_lse=True, **options) -> list[Tensor]:
    """One rank's out, lse, and gradients if there is a backward."""
    q, k, v, dout, dlse = (x.to(dtype) for x in inputs(plan, heads, dims, seed))
    mine = [poisoned(x, plan, comm.rank, s).requires_grad_() for x, s in ((q, "q"), (k, "kv"), (v, "kv"))]
    result = seqpar.attention(*mine, plan, comm, return_lse=with_lse, **options)
    out, *lse = result if with_lse else (result,)
    found = [x.detach() for x in (out, *lse)]
    if backward:
        incoming = [poisoned(dout, plan, comm.rank, "q")]
        if with_lse:
            incoming.append(poisoned(dlse, plan, comm.rank, "q").to(lse[0].dtype))
        torch.autograd.backward([out, *lse], incoming)
        found += [x.grad for x in mine]
    return found


def counted(comm: Comm, plan: Plan, heads, dims, dtype, with_lse, kv_grads=True) -> list[dict[int, int]]:
    q, k, v, *_ = (x.to(DTYPES[dtype]) for x in inputs(plan, heads, dims, 0))
    mine = [poisoned(x, plan, comm.rank, s) for x, s in ((q, "q"), (k, "kv"), (v, "kv"))]
    for x in mine if kv_grads else mine[:1]:
        x.requires_grad_()
    result = seqpar.attention(*mine, plan, comm, return_lse=with_lse)
    forward = dict(comm.stats.sent_to)
    assert sum(forward.values()) == comm.stats.bytes_sent
    comm.stats.reset()
    torch.autograd.backward(
        result if with_lse else [result],
        [torch.ones_like(x) for x in result] if with_lse else [torch.ones_like(result)],
    )
    return [forward, dict(comm.stats.sent_to)]


def recorded(comm: Comm, plan: Plan, heads=(2, 2), dims=(4, 4), dtype=torch.float64) -> Recorder:
    recorder = Recorder(comm)
    step(recorder, plan, heads, dims, 0, dtype)
    recorder.comm = None
    return recorder


def assert_same_bits(a: list[list[Tensor]], b: list[list[Tensor]]) -> None:
    for rank, (ours, theirs) in enumerate(zip(a, b, strict=True)):
        for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), ours, theirs, strict=True):
            assert torch.equal(x, y), f"{name} of rank {rank}"
            assert not x.isnan().any(), f"{name} of rank {rank}"
