"""Replacements in trial runs: for attention, for weights that hide an effect, for random numbers.

    attention        a function of each row, (sum(q) + sum(k)) / sqrt(D) + v: not q . k, where equal rotations cancel
    weights near 0   random weights: gates, adapters and tables of positions hide effects until a first training step
    random numbers   all equal; dropout drops nothing

A mode replaces them for this thread's calls only: the model is not touched. Where parameters go into functions that no
mode sees, as those of seqpar's mixers, `seqpar.trial.near_zero.without_zeros` lends them other values instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from seqpar.plan import Plan
from seqpar.private.torch import tree_map
from seqpar.trial.randomness import undrawn
from seqpar.trial.record import under_trial


def stand_in(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
    """A replacement for attention, [T, H, D_v]: a function of each row of q, k and v alone; records q, k and v."""
    k, v = (x.repeat_interleave(q.shape[1] // max(1, x.shape[1]), 1) for x in (k, v))
    if plan.mask.tokens == plan.mask.kv_tokens and plan.kv_layout is plan.layout:
        out = (q.sum(-1, keepdim=True) + k.sum(-1, keepdim=True)) * q.shape[-1] ** -0.5 + v
    else:  # keys of other rows
        out, k, v = q.sum(-1, keepdim=True).expand(-1, -1, v.shape[-1]), k[:0], v[:0]
    if (record := under_trial()) is not None:
        record.note_attention(q, k, v)
    return out


class Deterministic(TorchFunctionMode):
    """A mode without random numbers: dropout drops nothing, and draws return equal numbers.

    weights: replacements of parameters, by the parameters' ids.
    """

    def __init__(self, weights: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.weights = weights

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.weights:
            args, kwargs = (tree_map(self._substitute, value) for value in (args, kwargs))
        return undrawn(func, args, kwargs)

    def _substitute(self, x: Any) -> Any:
        return self.weights.get(id(x), x) if isinstance(x, nn.Parameter) else x
