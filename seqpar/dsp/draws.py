"""Random numbers inside stages, which would be other ones for a shard than for the whole."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from seqpar.comm import Comm
from seqpar.ops.handles import refuse

# by their arguments these may be without dropout
_DROPOUT = {
    F.dropout, F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d,
    F.multi_head_attention_forward, F.scaled_dot_product_attention, F.rrelu,
}  # fmt: skip
_DRAWS = {
    torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal, torch.bernoulli, torch.multinomial,
    torch.poisson, torch.rand_like, torch.randn_like, torch.randint_like, Tensor.bernoulli, Tensor.bernoulli_,
    Tensor.multinomial, Tensor.uniform_, Tensor.normal_, Tensor.random_, Tensor.exponential_, Tensor.geometric_,
    Tensor.log_normal_, Tensor.cauchy_,
}  # fmt: skip


class NoDraws(TorchFunctionMode):
    """A block in which functions that draw random numbers are refused, on all ranks. name: of what is inside."""

    def __init__(self, name: str, comm: Comm) -> None:
        super().__init__()
        self.name, self.comm = name, comm

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWS or (func in _DROPOUT and _active(func, args, kwargs)):
            what = f"{self.name} calls {func.__name__}, which would draw other numbers for a shard than for the whole"
            refuse(what, self.comm, NotImplementedError(f"{what}; do without, or draw outside of the stages"))
        return func(*args, **kwargs)


def _active(func: Any, args: Any, kwargs: Any) -> bool:
    if func is F.scaled_dot_product_attention:  # which has no signature
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    return bool(given["training"] and given.get("p", given.get("dropout_p", 1.0)))
