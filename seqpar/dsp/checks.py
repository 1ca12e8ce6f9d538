"""What a model must be, and what its stages must not do: each is refused by name before numbers could differ."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from seqpar.comm import Comm
from seqpar.dsp.spec import Block, Spec
from seqpar.ops.core.agreement import errors_on_all_ranks
from seqpar.ops.core.alike import nodes_behind
from seqpar.ops.core.compared import leaves, version_of
from seqpar.private import torch as torch_private
from seqpar.private.diffusers import HOOKS
from seqpar.trial.protect import OF_MODULES, held
from seqpar.trial.randomness import draws

MIXING = (torch_private.NormBase,)  # statistics over rows
MIXING_BETWEEN = (  # what mixes rows unless they are samples to it; inside a stage a trial tells
    nn.GroupNorm, nn.RNNBase, nn.MultiheadAttention, torch_private.ConvNd, torch_private.AvgPoolNd,
    torch_private.MaxPoolNd, torch_private.AdaptiveAvgPoolNd, torch_private.AdaptiveMaxPoolNd,
)  # fmt: skip
SHARE = "_seqpar_share"  # an attribute of the memory of what stages and exits return: whether ranks have shares of it


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a module is one that a spec lists by pattern, or lies inside one."""
    return any(fnmatchcase(name, pattern) or name.startswith(pattern + ".") for pattern in patterns)


def check_block(module: nn.Module, name: str, block: Block) -> None:
    """Raise for arguments, tables and modules that the spec lists but the module lacks."""
    parameters = list(inspect.signature(module.forward).parameters)
    listed = (*block.stream, *block.rows, *block.shared)
    if missing := [argument for argument in listed if argument not in parameters]:
        raise ValueError(
            f"{name} takes {parameters}, and not {missing}, which its spec lists; list arguments that it takes"
        )
    tables = {path for path, _ in (*module.named_parameters(), *module.named_buffers())}
    parts = {path for path, _ in module.named_modules()}
    inside = {*block.gathers, *([block.core.module] if block.core else [])}
    if missing := sorted((set(block.buffers) - tables) | (inside - parts)):
        raise ValueError(
            f"{name} has no {missing}, which its spec lists; list modules, buffers and parameters that it has"
        )


def check_modules(model: nn.Module, spec: Spec, stages: Sequence[str]) -> None:
    """Raise for modules and tensors that the spec does not list, and for those that mix rows unnoticed."""
    what = type(model).__name__
    known = (*stages, *spec.between, *spec.outside, *([spec.exit.module] if spec.exit else []))
    names = {name for name, _ in model.named_modules()}
    if missing := [name for name in known if name not in names and not any(c in name for c in "*?[")]:
        raise ValueError(f"{what} has no {missing}, which its spec lists; list modules that it has")
    for name, module in model.named_modules():
        own = [n for n, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]
        if name == "":
            if unlisted := [n for n in own if n not in spec.own]:
                raise ValueError(
                    f"{what} has {unlisted} of its own, which its spec does not list; list them under own if the "
                    "model uses them before or after all stages, or along dimensions that are whole"
                )
        elif own and not matches(name, known):
            raise ValueError(
                f"{name} of {what} is a {type(module).__name__}, in no stage, not between stages and not outside: its "
                "spec does not list it; make it a stage with a Block, or list it under between if it works row by row, "
                "or under outside if it runs on whole tensors"
            )
        if isinstance(module, MIXING) and not matches(name, spec.outside):
            raise NotImplementedError(
                f"{name} of {what} is a {type(module).__name__}, whose statistics mix rows; use a norm of each row by "
                "itself, as LayerNorm is, or list it under outside if it runs on whole tensors"
            )
        by_itself = isinstance(module, torch_private.ConvNd) and set(module.kernel_size) == {1}
        between = matches(name, spec.between) and not matches(name, stages)
        if isinstance(module, MIXING_BETWEEN) and between and not by_itself:
            raise NotImplementedError(
                f"{name} of {what} is a {type(module).__name__}, which may mix rows, and its spec lists it under "
                "between; make it a stage with a Block, which lists the dimensions that it mixes"
            )


@contextmanager
def noting_changes(module: nn.Module, name: str, changed: dict[str, Tensor]) -> Iterator[None]:
    """A block that adds the module's buffers that were written in it to `changed`, by their names in the model.

    State that stages keep between forwards, such as running statistics, must change once on each rank, and equally.
    """
    before = {path: (x, version_of(x)) for path, x in module.named_buffers()}
    yield
    for path, x in module.named_buffers():
        old, version = before.get(path, (None, None))
        if old is None or x.shape != old.shape:  # a table for as many rows as a rank has
            continue
        if version_of(x) != version if x is old else not torch.equal(x, old):
            changed[f"{name}.{path}"] = x


def collective_modules(module: nn.Module) -> list[str]:
    """Modules whose forward is a collective, because it gathers their weights."""
    return [
        name
        for name, part in module.named_modules()
        if name and {kind.__name__ for kind in type(part).__mro__} & {"FSDPModule", "FullyShardedDataParallel"}
    ]


class NoDraws(TorchFunctionMode):
    """A block in which functions that draw random numbers are refused, on all ranks, while ranks have shards.

    sharded: returns the stage, or the code between two, that runs now, "" while every rank has the whole. drew: whether
    random numbers were drawn, anywhere.
    """

    def __init__(self, sharded: Callable[[], str], comm: Comm) -> None:
        super().__init__()
        self.sharded, self.comm, self.drew = sharded, comm, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if draws(func, args, kwargs):
            self.drew = True
            if name := self.sharded():
                what = f"{name} calls {func.__name__}, which would draw other numbers for a shard than for the whole"
                with errors_on_all_ranks(what, self.comm):
                    raise NotImplementedError(f"{what}; do without, or draw before the first stage")
        return func(*args, **kwargs)


WHOLE = {  # how to have what ranks have shares of
    "returns": "return only what follows the exit of its spec",
    "keeps": "keep it detached if no loss reads it, or else compute it from rows that are a stream of the last stage, "
    "in a spec without an exit",
}


def check_results(
    model: nn.Module, out: Any, ends: Collection[Any], shards: Collection[Any], grad: str,
    new: Collection[tuple[str, Tensor]],
) -> None:  # fmt: skip
    """Raise for a result that is a share of the rows, and for gradients that count once for each rank.

    ends, shards: autograd's nodes of what the model ends with, and of stages' inputs and outputs. new: what modules
    keep since this forward. It is a result too, as a balance loss, if nothing that is returned depends on it; where
    something does, it may be for the model alone: a warning names it.
    """
    what, returned = type(model).__name__, [(name, x) for name, x in leaves(out) if isinstance(x, Tensor)]
    new, before = (new, set(nodes_behind(ends))) if ends else ((), set())
    results = [
        *(("returns", name.lstrip(".") or "a tensor", x) for name, x in returned),
        *(("keeps", name, x) for name, x in new if x.grad_fn not in before),
    ]
    for how, name, x in results:
        behind = set(nodes_behind([x.grad_fn], ends)) if ends else set()
        past = any(hasattr(node, "variable") for node in behind) or (x.is_leaf and x.requires_grad)
        if not behind.isdisjoint(shards) or getattr(x.untyped_storage(), SHARE, False):
            raise NotImplementedError(
                f"{what} {how} {name} {list(x.shape)}, which stages computed: each rank has its share of the rows; "
                f"{WHOLE[how]}"
            )
        if past and grad == "replicated":
            raise NotImplementedError(
                f"{what} ends with tensors that do not pass its exit, whose gradients would count once for each rank: "
                f'it {how} {name}; give grad="sum" and divide the loss by the number of ranks'
            )
    seen = set(shards)
    if shares := [name for name, x in new if x.grad_fn in before and seen & {*nodes_behind([x.grad_fn], ends)}]:
        warnings.warn(
            f"{what} keeps {', '.join(shares[:4])}, which stages computed: each rank has its share of the rows, and a "
            "loss that reads them outside of the model would be wrong. Ignore this if none does",
            stacklevel=2,
        )


def kept(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Tensors with a gradient that modules keep in attributes, or inside these; not those of diffusers' hooks."""
    attributes = [
        (f"{path}.{name}".lstrip("."), x)
        for path, module in model.named_modules() for name, x in module.__dict__.items()
        if name not in OF_MODULES and name != HOOKS
    ]  # fmt: skip
    return [(name, x) for name, own in attributes for x in held([own]) if isinstance(x, Tensor) and x.grad_fn]
