"""Random numbers: which functions of torch draw them, which modules drop numbers, and what stands for both in trials.

Ranks would draw other numbers for their shares than one process for the whole.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from seqpar.private import torch as torch_private

# functions that draw, unless their arguments say no
_DROPPING = {F.dropout, F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d}
_ALSO_DROPPING = {F.multi_head_attention_forward, F.scaled_dot_product_attention, F.rrelu}  # and do more
_OF_TORCH = {  # these have no signature: (x, p, train)
    torch.dropout, torch.dropout_, torch.alpha_dropout, torch.alpha_dropout_, torch.feature_dropout,
    torch.feature_dropout_, torch.feature_alpha_dropout, torch.feature_alpha_dropout_,
}  # fmt: skip
# functions that draw -> the number that stands for each one that they draw, if one can
_DRAWING: dict[Any, float | None] = {
    torch.rand: 0.5, torch.rand_like: 0.5, Tensor.uniform_: 0.5, torch.randn: 0.0, torch.randn_like: 0.0,
    torch.normal: 0.0, Tensor.normal_: 0.0, Tensor.cauchy_: 0.0, Tensor.exponential_: 1.0, Tensor.log_normal_: 1.0,
    torch.randint: 0, torch.randint_like: 0, Tensor.random_: 0, torch.multinomial: 0, Tensor.multinomial: 0,
    torch.bernoulli: 1, Tensor.bernoulli: 1, Tensor.bernoulli_: 1, torch.binomial: 1, torch.poisson: 1,
    Tensor.geometric_: 1, torch.randperm: None, F.gumbel_softmax: None, F.fractional_max_pool2d_with_indices: None,
    F.fractional_max_pool3d_with_indices: None,
}  # fmt: skip


_MAY_DRAW = _DROPPING | _ALSO_DROPPING | _OF_TORCH | _DRAWING.keys()
_signature = lru_cache(inspect.signature)


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call of torch draws random numbers."""
    if func not in _MAY_DRAW:
        return False
    if func in _OF_TORCH:
        p, train = (kwargs.get(name, args[n] if len(args) > n else 0) for n, name in ((1, "p"), (2, "train")))
        return bool(p and train)
    if func is F.scaled_dot_product_attention:  # it has no signature
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    if func in _DROPPING or func in _ALSO_DROPPING:
        bound = _signature(func).bind(*args, **kwargs)
        bound.apply_defaults()
        named = bound.arguments
        return bool(named["training"] and named.get("p", named.get("dropout_p", 1.0)))
    return func in _DRAWING


def undrawn(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of a call of torch with equal numbers for random ones; dropout drops nothing, orders are backward."""
    if func in _DROPPING or func in _OF_TORCH:
        return kwargs["input"] if "input" in kwargs else args[0]
    if func is F.rrelu:
        return func(*args, **kwargs | {"training": False})
    if func is F.gumbel_softmax:
        return torch.softmax(args[0] / kwargs["tau"], kwargs["dim"])
    out = func(*args, **kwargs)
    if func is torch.randperm:  # an order in which rows meet others
        return out.copy_(torch.arange(len(out), device=out.device).flip(0))
    return out if _DRAWING.get(func) is None or not isinstance(out, Tensor) else out.fill_(_DRAWING[func])


class Deterministic(TorchFunctionMode):
    """A mode without random numbers, for this thread: dropout drops nothing, and draws return equal numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return undrawn(func, args, kwargs or {})


def active_dropout(named: Iterable[tuple[str, nn.Module]]) -> str:
    """The name and probability of the first of these modules that is an active dropout, "" if there is none."""
    for name, module in named:
        if isinstance(module, torch_private.DropoutNd) and module.training and module.p > 0:
            return f"{name or 'the model'} is dropout with p={module.p} in training"
    return ""
