"""What users do to models and with them: modules put into blocks, checkpoints, backward passes of every kind."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from seqpar.comm import Comm
from seqpar.dsp import parallelize
from tests.dsp.cases import rand
from tests.dsp.models import SHARDED, WEATHER, Weather, made
from tests.dsp.planners import Planner


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def dropout(model: nn.Module) -> None:
    model.mix[0].net.append(nn.Dropout(0.5))


def functional(model: nn.Module) -> None:
    model.mix[0].net.append(Function(lambda x: F.dropout(x, 0.5)))


def dropped_attention(model: nn.Module) -> None:
    model.mix[0].net.append(Function(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)))


def drawn(model: nn.Module) -> None:
    model.mix[0].net.append(Function(lambda x: x * torch.rand_like(x)))


class Checkpointed(nn.Module):
    """A module that is recomputed in backward."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def recomputing(block: nn.Module, name: str, reentrant: bool) -> None:
    """Put a checkpoint inside a block's forward, with the arguments that it has."""
    inner = type(block).forward.__get__(block)
    if name == "core":
        block.forward = lambda x, t: checkpoint(inner, x, t, use_reentrant=reentrant)
    else:
        block.forward = lambda z: checkpoint(inner, z, use_reentrant=reentrant)


GRID = rand(3, 5, 7, 3)


def weather(comm: Comm, planner: Planner = SHARDED) -> nn.Module:
    """The model, parallel if there are several ranks."""
    model = made(Weather)
    if comm.size > 1:
        parallelize(model, comm, WEATHER, plan=planner)
    return model


def numbers(model: nn.Module, *given: Tensor) -> dict[str, Tensor]:
    """Output and all gradients there are, by default of `GRID`."""
    x, *rest = given or (GRID,)
    x = x.clone().requires_grad_()
    model.zero_grad()
    out = model(x, *rest)
    out.square().sum().backward()
    return {"out": out.detach(), "d x": x.grad} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def passes(model: nn.Module, x: Tensor, how: str) -> dict[str, Tensor]:
    """Output and gradients of a `Weather` after one or several backward passes, also of two forwards at once."""
    x = x.clone().requires_grad_()
    if how == "toggled":
        model(x).sum().backward()
        model.zero_grad()
        x.grad = None
        for name, p in model.named_parameters():
            p.requires_grad_("mix" in name)
    if how == "after no grad":
        with torch.no_grad():
            model(x)
        with torch.inference_mode():
            model(x[:1])
    out = model(x)
    if how == "part":
        out[:1, :2].square().sum().backward()
    elif how == "retained":
        out.sum().backward(retain_graph=True)
        out.square().sum().backward()
    elif how == "double":
        (d,) = torch.autograd.grad((out * x.detach()).sum(), x, create_graph=True)
        d.square().sum().backward()
    elif how == "accumulated":
        out.sum().backward()
        model(2 * x).square().sum().backward()
    elif how == "together":
        (out.square().sum() + model(2 * x).sum()).backward()
    elif how == "of some":
        ends = [model.east[1].qkv.weight, model.north[0].out.bias]
        (dx,) = torch.autograd.grad(out.sum(), [x], retain_graph=True)
        return {"out": out.detach(), "d x": dx} | dict(zip("ab", torch.autograd.grad(out.square().sum(), ends)))
    else:
        out.square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"out": out.detach(), "d x": x.grad} | grads
