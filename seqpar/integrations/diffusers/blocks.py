"""Blocks of a model: its outermost lists of modules, whose children get this rank's rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.comm.entry import uncompiled
from seqpar.foreign import name_of
from seqpar.foreign.hooks import Named
from seqpar.integrations.diffusers.forward import BlockCall, OtherValues, SharedForward, current
from seqpar.integrations.rows import RankRows, cut, local, rows_of, whole, whole_shape
from seqpar.ops.core.agreement import errors_on_all_ranks, gathering
from seqpar.ops.core.regions import known_regions
from seqpar.private.torch import HOOKS, TENSORS, tree_flatten, tree_unflatten
from seqpar.trial.blocks import Draws, Finding, find
from seqpar.trial.identity import code_of, own_forward
from seqpar.trial.readings import GivenRows
from seqpar.trial.segments import held

PLAIN = {bool, int, float, str, type(None)}
NOT_SAID = nn.Module().__dict__.keys() - {"training"} | {"forward"}
TABLES = TENSORS[0], *HOOKS  # of a module


def blocks_of(
    model: nn.Module, blocks: tuple[str, ...] | None, whole: tuple[str, ...]
) -> Iterator[tuple[str, nn.Module, bool]]:  # fmt: skip
    """The blocks of a model, each with its name and whether it is computed on this rank's rows, or else whole.

    Raises: ValueError for names of no list.
    """
    known = {name: each for name, each in model.named_modules() if isinstance(each, nn.ModuleList)}
    for option, names in (("blocks", blocks or ()), ("whole", whole)):
        there = f"the lists of modules are {', '.join(known) or 'none'}"
        if isinstance(names, str):
            raise ValueError(f"parallelize({name_of(model)}, {option}={names!r}): give a tuple of names; {there}")
        if unknown := [name for name in names if name not in known]:
            raise ValueError(
                f"parallelize({name_of(model)}, {option}=): no list is called {', '.join(unknown)}; {there}"
            )
    of_blocks = [name for name, some in known.items() if not any(isinstance(x, nn.ModuleList) for x in some)]
    outermost = [name for name in of_blocks if not any(name.startswith(f"{other}.") for other in of_blocks)]
    seen = set[int]()
    for path in [*whole, *(outermost if blocks is None else blocks)]:
        for name, block in known[path].named_children():
            if id(block) not in seen and not isinstance(block, nn.ModuleList):
                seen.add(id(block))
                yield f"{path}.{name}", block, path not in whole


def kinds_of(named: Named, blocks: Collection[str]) -> dict[str, Hashable]:
    """What each block runs: classes, forwards, hooks, and attributes of its modules and processors.

    named: in the order of `nn.Module.named_modules`, in which a block's modules follow it.
    """
    facts, around = {name: list[Any]() for name in blocks}, list[tuple[str, list[Any]]]()
    for path, module in named:
        while around and not path.startswith(around[-1][0]):
            around.pop()
        if path in facts:
            around.append((f"{path}.", facts[path]))
        if not around:
            continue
        attributes, kind = module.__dict__, type(module)
        own = [kind, _code_of(kind.forward), *_attributes(attributes)]
        if "forward" in attributes:
            own.append(own_forward(module))
        for key in TABLES:
            if key in attributes and (some := attributes[key]):
                own += [k if x is None else code_of(x) for k, x in some.items() if x is None or callable(x)]
        if "processor" in attributes:
            processor = attributes["processor"]
            own += [type(processor), *_attributes(getattr(processor, "__dict__", {}))]
        for within, each in around:
            each += path[len(within) :], *own
    return {name: tuple(each) for name, each in facts.items()}


_code_of = lru_cache(1024)(code_of)  # of classes' forwards


def _attributes(some: Mapping[str, Any]) -> list[Any]:
    """What attributes say, without those that every module has."""
    return [(k, v if type(v) in PLAIN else _said(v)) for k, v in some.items() if k not in NOT_SAID]


def _said(x: Any, depth: int = 2) -> Any:
    """What a value says: numbers and strings, also inside of others, and the code of functions; else its type."""
    if type(x) in PLAIN or not depth:
        return x if type(x) in PLAIN else type(x)
    if isinstance(x, (tuple, list, set, frozenset)):
        return (tuple if isinstance(x, (tuple, list)) else frozenset)([_said(v, depth - 1) for v in x])
    if isinstance(x, Mapping):
        return tuple([(k if type(k) is str else None, _said(v, depth - 1)) for k, v in x.items()])
    if isinstance(x, partial):
        return _said((x.func, x.args, x.keywords), depth)
    return code_of(x) if isinstance(x, (FunctionType, MethodType)) else type(x)


@uncompiled
def run_block(
    name: str, shared: bool, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:  # fmt: skip
    """A block on this rank's rows. shared: or else whole, as on every rank."""
    run = current()
    if run.block is not None or run.tries:
        return forward(*args, **kwargs)
    flat, spec = tree_flatten((args, kwargs))
    args = kwargs = None  # type: ignore[assignment]
    flat = run.rows_among(flat)
    run.run_again(None, [x.place if isinstance(x, RankRows) else None for x in flat])
    if not shared:
        return _ran(run, name, None, forward, flat, spec)
    known = run.sharing.findings(run.kinds[name], str(spec), *map(_fact, flat))
    for tried in (False, True):
        for finding in list(known.values()):
            with suppress(OtherValues):
                return _ran(run, name, finding, forward, flat, spec)
        if not tried:
            finding = _found(run, name, module, forward, flat, spec)
            known[None if finding is None else finding.reads] = finding
    run.refuse(f"{name} of {name_of(run.model)} reads values of tensors that depend on its rows")


def _ran(
    run: SharedForward, name: str, finding: Finding | None, forward: Callable[..., Any], flat: list[Any], spec: Any
) -> Any:
    """The block's outputs, as rows."""
    if finding is None:
        args, kwargs = tree_unflatten([whole(x) for x in flat], spec)
        return forward(*args, **kwargs)
    run.cuts += torch.is_grad_enabled()
    own = list(flat)
    for n, (x, place) in enumerate(zip(flat, finding.places)):
        if place is not None:
            own[n] = local(x) if isinstance(x, RankRows) and x.place == place else cut(whole(x), place, run)
    for n, segments in finding.counts:
        own[n] = held(segments, run.comm.rank, run.comm.size)
    args, kwargs = tree_unflatten(own, spec)
    # a graph has no values that were read, and a checkpoint keeps the tensors of an uncompiled block
    like = run.compiled_calls.get(name) or run.compiled_calls.get("")
    if like is not None and not finding.reads and not known_regions():
        forward, run.compiled = run.sharing.compiled(like, forward, SharedForward)
    run.block = call = BlockCall(name, finding)
    try:
        out = forward(*args, **kwargs)
        with errors_on_all_ranks("diffusers", run.comm):
            call.attended(None, run.comm.rank, run.comm.size)
    finally:
        run.block, run.compiled = None, False
    outputs, spec = tree_flatten(out)
    rows = [x if place is None else rows_of(x, place, run) for x, place in zip(outputs, finding.outputs)]
    return tree_unflatten(rows, spec)


def _found(
    run: SharedForward, name: str, module: nn.Module, forward: Callable[..., Any], flat: list[Any], spec: Any
) -> Finding | None:  # fmt: skip
    """What a trial of the block finds. A collective."""

    def outputs(leaves: list[Any]) -> list[Any]:
        args, kwargs = tree_unflatten(leaves, spec)
        return tree_flatten(forward(*args, **kwargs))[0]  # type: ignore[no-any-return]

    block = f"{name} ({type(module).__name__}) of {name_of(run.model)}"
    with gathering(f"diffusers: the trial of {block}", run.comm) as found:
        run.tries = True
        try:
            found.own = find(module, outputs, list(map(_given, flat)), run.comm.size)
        except (NotImplementedError, Draws) as error:
            way = f"give whole=({name.rpartition('.')[0]!r},) to compute this list whole on every rank"
            if isinstance(error, Draws):
                way = "set the p of its dropout to 0, or draw its numbers before the forward"
            raise NotImplementedError(
                f"diffusers: {block} cannot be computed on a rank's rows: {error}; {way}"
            ) from error
        finally:
            run.tries = False
    if any(other != found.own for other in found.every):
        raise ValueError(f"diffusers: the trial of {block} found other rows on some rank; give all the same model")
    return found.own  # type: ignore[no-any-return]


def _given(x: Any) -> Any:
    return GivenRows(whole_shape(x), x.place, x.dtype, x.device) if isinstance(x, RankRows) else x


def _fact(x: Any) -> Any:
    """What of an argument a finding depends on."""
    if isinstance(x, Tensor):
        return _given(x) if isinstance(x, RankRows) else (x.shape, x.dtype)
    return x if type(x) in PLAIN else (_said(x), *_attributes(getattr(x, "__dict__", {})))
