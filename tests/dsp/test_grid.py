"""Two dimensions of ranks: attention inside a stage over some, switches over the others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import seqpar
from seqpar.comm import Comm
from seqpar.dsp import Space, attention_plan, gather, grid, split, switch
from seqpar.testing import run_processes, run_threads
from tests.dsp.models import compared, made

HEADS, FORM = 3, "b t s c"


class Pair(nn.Module):
    """Spatial and temporal attention, whose rows lie anywhere: `attend` does what mixes them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(12, 36) for _ in range(2))

    def stage(self, n: int, x: Tensor, attend) -> Tensor:
        q, k, v = self.qkv[n](x).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        return x + attend(q, k, v).flatten(-2)


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Along the third dimension of [b, other, mixed, heads, dim]."""
    y = F.scaled_dot_product_attention(*(x.transpose(2, 3) for x in (q, k, v)))
    return y.transpose(2, 3)


def temporal(model: Pair, x: Tensor) -> Tensor:
    return model.stage(1, x.transpose(1, 2), dense).transpose(1, 2)


def on_a_rank(comm: Comm, core: int, t: int, s: int, width: int) -> dict[str, Tensor]:
    model = made(Pair)
    g = torch.Generator().manual_seed(t)
    x = torch.randn(2, t, s, 12, generator=g, dtype=torch.float64).requires_grad_()
    if core == 0:
        y = temporal(model, model.stage(0, x, dense))
    else:
        outer, inner = grid(comm, core=core)
        whole = Space({"b": 2, "t": t, "s": s}, inner)
        part = Space({"b": 2, "t": t, "s": whole.local("s")["s"]}, outer)
        frames = part.local("t")["t"]
        y = split(split(x, whole, FORM, "s"), part, FORM, "t")
        if frames:
            plan = attention_plan(Space({"b": 2, "t": frames, "s": s}, inner), FORM, ("s",), "s", ulysses=width > 1)
            share = lambda q, k, v: seqpar.attention(*(x.flatten(0, 2) for x in (q, k, v)), plan, inner).view_as(q)  # noqa: E731
            y = model.stage(0, y, share)
        else:
            y = y + 0 * sum(p.sum() for p in model.qkv[0].parameters())
        y = switch(y, part, FORM, "t", "s")
        y = temporal(model, y)
        y = gather(gather(y, part, FORM, "s", grad="replicated"), whole, FORM, "s", grad="replicated")
    w = torch.randn(y.shape, generator=g, dtype=y.dtype)
    (y * w).sum().backward()
    return {"out": y.detach(), "d x": x.grad} | {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("ranks, core, t, s", [(4, 2, 5, 7), (6, 3, 5, 7), (6, 2, 2, 9), (8, 4, 3, 11), (3, 3, 1, 5)])
@pytest.mark.sampled(3)
def test_a_grid_of_ranks_gives_the_numbers_of_one_process(ranks, core, t, s, width) -> None:
    (want,) = run_threads(1, on_a_rank, 0, t, s, width)
    compared(run_threads(ranks, on_a_rank, core, t, s, width), want)


def test_it_is_so_on_processes() -> None:
    (want,) = run_threads(1, on_a_rank, 0, 5, 7, 1)
    compared(run_processes(4, on_a_rank, 2, 5, 7, 1), want)
