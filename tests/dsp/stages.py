"""Models of two stages, and stages that mix, number or count the rows that ranks share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seqpar.comm import Comm
from seqpar.dsp import Block, Exit, Spec, parallelize
from seqpar.testing import run_threads
from tests.dsp.cases import rand
from tests.dsp.models import SHARDED, compare_with_one, gradients
from tests.dsp.planners import Planner

ANY = ("b", "t", "s", None)


X = rand(1, 4, 6, 3)


Mixing = Callable[[Tensor], Tensor]


ALONG_T: dict[str, Mixing] = {
    "a sum of earlier rows": lambda x: x.cumsum(1),
    "a sum of later rows": lambda x: x.flip(1).cumsum(1).flip(1),
    "the row before": lambda x: F.pad(x, (0, 0, 0, 0, 1, 0))[:, :-1],
    "the last row": lambda x: x[:, -1:].expand_as(x),
    "a softmax": lambda x: x.softmax(1),
    "statistics of groups": lambda x: F.group_norm(x.movedim(-1, 1), 2).movedim(1, -1),
    "a pool": lambda x: F.avg_pool1d(x.movedim(1, -1).flatten(0, 2)[:, None], 3, 1, 1).view(1, 6, 8, -1).movedim(-1, 1),
}


class Stage(nn.Module):
    """Row by row, but for what it is given. x [1, t, s, 8]."""

    def __init__(self, also: Mixing = lambda x: x.mean(2, keepdim=True)) -> None:
        super().__init__()
        self.linear, self.also = nn.Linear(8, 8), also
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.linear(self.also(x))


class Clip(nn.Module):
    def __init__(self, also: Mixing | None = None, returns: str = "", between: Mixing = lambda x: x) -> None:
        super().__init__()
        self.enter, self.leave, self.first = nn.Linear(3, 8), nn.Linear(8, 3), Stage()
        self.second = Stage() if also is None else Stage(also)
        self.returns, self.between = returns, between

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        h = self.enter(x)
        y = self.second(self.between(self.first(h)))
        out = self.leave(y)
        others = {"": out, "a share": (out, y), "what follows a share": (out, y * 2), "a skip": out + h[..., :3]}
        return {**others, "a skip of the input": out + x}[self.returns]


SPEC = Spec(
    "Clip",
    lambda model, given: dict(zip("bts", given["x"].shape)),
    (
        Block("first", {"x": "b t s c"}, ("s",), rest=ANY),
        Block("second", {"x": "b t s c"}, ("s",), rest=ANY),
    ),
    exit=Exit("leave", "b t s c", ANY),
    outside=("enter",),
)


def numbers(
    comm: Comm, make: Callable[[], nn.Module], spec: Spec = SPEC, x: Tensor = X, plan: Planner = SHARDED, **more: Tensor
) -> dict[str, Tensor]:
    """A model's output and gradients, parallel where there are several ranks."""
    model = make()
    if comm.size > 1:
        parallelize(model, comm, spec, plan=plan)
    return gradients(model, {"x": x, **more})


def is_one_process(ranks: int, *given: Any, **more: Any) -> None:
    """Compare `numbers` of some ranks with those of one."""
    compare_with_one(ranks, partial(numbers, **more), *given)


def refused(
    model: nn.Module, spec: Spec = SPEC, grad: str = "replicated", x: Tensor = X, ranks: int = 2, autocast: bool = False
) -> list[str]:  # fmt: skip
    """What each rank of some says to a first forward."""

    def on_a_rank(comm: Comm) -> str:
        own = copy.deepcopy(model).double()
        if x.dtype != torch.float64:  # which would change complex buffers too
            own.to(x.dtype)
        parallelize(own, comm, spec, grad=grad, plan=SHARDED)
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                own(x.clone().requires_grad_())
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    return run_threads(ranks, on_a_rank)


PLACES = torch.randn(9, 1, 8, generator=torch.Generator().manual_seed(3))


BY_PLACE: dict[str, Mixing] = {
    "numbers of rows": lambda x: x + torch.arange(x.shape[1], dtype=x.dtype)[:, None, None],
    "a table by numbers": lambda x: x + PLACES[: x.shape[1]],
    "a share of all rows": lambda x: x + torch.linspace(0, 1, x.shape[1], dtype=x.dtype)[:, None, None],
    "how many rows there are": lambda x: x / x.shape[1],
}


FAR: dict[str, Mixing] = {
    "four rows before": lambda x: F.pad(x, (0, 0, 0, 0, 4, 0))[:, :-4] if x.shape[1] > 4 else x * 0,
    "the first four": lambda x: torch.cat([x[:, :4], -x[:, 4:]], 1),
    "more than a rank has": lambda x: x if x.shape[1] <= 4 else -x,
}
