"""What a model must be, and what its stages must not do: each is refused by name before numbers could differ."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from seqpar.comm import Comm
from seqpar.dsp.spec import Block, Spec
from seqpar.ops.core.agreement import errors_on_all_ranks

MIXING = (nn.modules.batchnorm._NormBase,)  # statistics over rows


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a module is one that a spec lists by pattern, or lies inside one."""
    return any(fnmatchcase(name, pattern) or name.startswith(pattern + ".") for pattern in patterns)


def check_block(module: nn.Module, name: str, block: Block) -> None:
    """Raise for arguments, tables and modules that the spec lists but the module lacks."""
    parameters = list(inspect.signature(module.forward).parameters)
    listed = (*block.stream, *block.rows, *block.shared)
    if missing := [argument for argument in listed if argument not in parameters]:
        raise ValueError(f"{name} takes {parameters}, and not {missing}, which its spec lists")
    tables = {path for path, _ in (*module.named_parameters(), *module.named_buffers())}
    parts = {path for path, _ in module.named_modules()}
    inside = {*block.gathers, *([block.core.module] if block.core else [])}
    if missing := sorted((set(block.buffers) - tables) | (inside - parts)):
        raise ValueError(f"{name} has no {missing}, which its spec lists")


def check_modules(model: nn.Module, spec: Spec, stages: Sequence[str]) -> None:
    """Raise for modules and tensors that the spec does not list, and for those that mix rows unnoticed."""
    what = type(model).__name__
    known = (*stages, *spec.between, *spec.outside, *([spec.exit.module] if spec.exit else []))
    names = {name for name, _ in model.named_modules()}
    if missing := [name for name in known if name not in names and not any(c in name for c in "*?[")]:
        raise ValueError(f"{what} has no {missing}, which its spec lists")
    for name, module in model.named_modules():
        own = [n for n, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]
        if name == "":
            if unlisted := [n for n in own if n not in spec.own]:
                raise ValueError(f"{what} has {unlisted} of its own, which its spec does not list")
        elif own and not matches(name, known):
            raise ValueError(
                f"{name} of {what} is a {type(module).__name__}, in no stage, not between stages and not outside: its "
                "spec does not list it"
            )
        if isinstance(module, MIXING) and not matches(name, spec.outside):
            raise NotImplementedError(f"{name} of {what} is a {type(module).__name__}, whose statistics mix rows")


# --- inside a stage -------------------------------------------------------------------------------------------------


@contextmanager
def noting_changes(module: nn.Module, name: str, changed: dict[str, Tensor]) -> Iterator[None]:
    """A block that adds the module's buffers that were written in it to `changed`, by their names in the model.

    State that stages keep between forwards, such as running statistics, must change once on each rank, and equally.
    """
    buffers = {path: x for path, x in module.named_buffers() if not x.is_inference()}  # these have no version counter
    before = {path: x._version for path, x in buffers.items()}
    yield
    changed |= {f"{name}.{path}": x for path, x in buffers.items() if x._version != before[path]}


# without dropout, depending on their arguments
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
    """A block in which functions that draw random numbers are refused, on all ranks. name: of the stage."""

    def __init__(self, name: str, comm: Comm) -> None:
        super().__init__()
        self.name, self.comm = name, comm

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWS or (func in _DROPOUT and _active(func, args, kwargs)):
            what = f"{self.name} calls {func.__name__}, which would draw other numbers for a shard than for the whole"
            with errors_on_all_ranks(what, self.comm):
                raise NotImplementedError(f"{what}; do without, or draw outside of the stages")
        return func(*args, **kwargs)


def _active(func: Any, args: Any, kwargs: Any) -> bool:
    if func is F.scaled_dot_product_attention:  # it has no signature
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    named = bound.arguments
    return bool(named["training"] and named.get("p", named.get("dropout_p", 1.0)))
