"""Blocks of a model: its outermost lists of modules, whose children get this rank's rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.comm.entry import uncompiled
from seqpar.foreign import name_of
from seqpar.foreign.hooks import Named
from seqpar.integrations.diffusers.attend import KNOWN
from seqpar.integrations.diffusers.forward import BlockCall, OtherValues, SharedForward, current
from seqpar.integrations.rows import RankRows, cut, local, rows_of, whole, whole_shape
from seqpar.ops.core.agreement import errors_on_all_ranks, gathering
from seqpar.private.torch import tree_flatten, tree_unflatten
from seqpar.trial.blocks import Finding, find
from seqpar.trial.identity import code_of, own_forward
from seqpar.trial.readings import GivenRows
from seqpar.trial.segments import held

PLAIN = {bool, int, float, str, type(None)}
NOT_SAID = nn.Module().__dict__.keys() - {"training"} | {"forward"}
OF_MODULES = ("_parameters", "_forward_hooks", "_forward_pre_hooks")


def lists_of(model: nn.Module, prefix: str = "", *, inside: bool = False) -> Iterator[tuple[str, nn.ModuleList]]:
    """The outermost lists of modules with their names; those inside of them too if asked for."""
    for name, child in model.named_children():
        path, is_list = f"{prefix}{name}", isinstance(child, nn.ModuleList)
        if is_list:
            yield path, child
        if inside or not is_list or any(isinstance(each, nn.ModuleList) for each in child.children()):
            yield from lists_of(child, f"{path}.", inside=inside)


def blocks_of(
    model: nn.Module, blocks: tuple[str, ...] | None, whole: tuple[str, ...]
) -> Iterator[tuple[str, nn.Module, bool]]:  # fmt: skip
    """The blocks of a model, each with its name and whether it is computed on this rank's rows, or else whole.

    Raises: ValueError for names of no list.
    """
    known = dict(lists_of(model, inside=True))
    for option, names in (("blocks", blocks or ()), ("whole", whole)):
        there = f"the lists of modules are {', '.join(known) or 'none'}"
        if isinstance(names, str):
            raise ValueError(f"parallelize({name_of(model)}, {option}={names!r}): give a tuple of names; {there}")
        if unknown := [name for name in names if name not in known]:
            raise ValueError(
                f"parallelize({name_of(model)}, {option}=): no list is called {', '.join(unknown)}; {there}"
            )
    shared = [name for name, _ in lists_of(model)] if blocks is None else list(blocks)
    seen = set[int]()
    for path in dict.fromkeys([*whole, *shared]):
        for name, block in known[path].named_children():
            if id(block) not in seen and not isinstance(block, nn.ModuleList):
                seen.add(id(block))
                yield f"{path}.{name}", block, path not in whole


def kinds_of(named: Named, blocks: Collection[str]) -> dict[str, int]:
    """A number for what each block runs: classes, forwards, hooks, and attributes of its modules and processors."""
    facts: dict[str, list[Any]] = {name: [] for name in blocks}
    within, own = "", list[Any]()
    for path, module in named:
        if path in facts:
            within, own = f"{path}.", facts[path]
        elif not within or not path.startswith(within):
            continue
        attributes = module.__dict__
        own += [path[len(within) :], type(module), code_of(type(module).forward), *_attributes(module)]
        if "forward" in attributes:
            own.append(own_forward(module))
        for name in OF_MODULES:
            if some := attributes[name]:
                own += [name if x is None else code_of(x) for x in some.values() if x is None or callable(x)]
        if (processor := attributes.get("processor")) is not None:
            own += [type(processor), *_attributes(processor)]
    return {name: hash(tuple(each)) for name, each in facts.items()}


def _attributes(owner: Any) -> list[Any]:
    """What an object's attributes say, without those that every module has."""
    some = getattr(owner, "__dict__", {}).items()
    return [(k, v if type(v) in PLAIN else _said(v)) for k, v in some if k not in NOT_SAID]


def _said(x: Any, depth: int = 2) -> Any:
    """What a value says: numbers and strings, also inside of others, and the code of functions; else its type."""
    if type(x) in PLAIN or not depth:
        return x if type(x) in PLAIN else type(x)
    if isinstance(x, Mapping):
        return tuple([(k if type(k) is str else None, _said(v, depth - 1)) for k, v in x.items()])
    if isinstance(x, (tuple, list, set, frozenset)):
        return (tuple if isinstance(x, (tuple, list)) else frozenset)([_said(v, depth - 1) for v in x])
    if isinstance(x, partial):
        return _said((x.func, x.args, x.keywords), depth)
    return code_of(x) if isinstance(x, (FunctionType, MethodType)) else type(x)


@uncompiled
def run_whole(name: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A block that every rank computes whole."""
    flat, spec = tree_flatten((args, kwargs))
    args, kwargs = tree_unflatten([whole(x) for x in flat], spec)
    return forward(*args, **kwargs)


@uncompiled
def run_block(name: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A block on this rank's rows."""
    run = current()
    if run.block is not None:
        return forward(*args, **kwargs)
    flat, spec = tree_flatten((args, kwargs))
    flat = run.rows_among(flat)
    run.run_again(None, [x.place if isinstance(x, RankRows) else None for x in flat])
    findings = _findings(run, name, flat, spec)
    args = kwargs = None  # type: ignore[assignment]
    for finding in list(findings.values()):
        with suppress(OtherValues):
            return _ran(run, name, finding, forward, flat, spec)
    finding = _found(run, name, module, forward, flat, spec)
    findings[None if finding is None else finding.reads] = finding
    try:
        return _ran(run, name, finding, forward, flat, spec)
    except OtherValues:
        run.refuse(f"{name} of {name_of(run.model)} reads values of tensors that depend on its rows")


def _ran(
    run: SharedForward, name: str, finding: Finding | None, forward: Callable[..., Any], flat: list[Any], spec: Any
) -> Any:
    """The block's outputs, as rows."""
    if finding is None:
        args, kwargs = tree_unflatten([whole(x) for x in flat], spec)
        return forward(*args, **kwargs)
    run.cuts += torch.is_grad_enabled()
    args, kwargs = tree_unflatten(_own(run, finding, flat), spec)
    run.block = call = BlockCall(name, finding)
    try:
        out = forward(*args, **kwargs)
        with errors_on_all_ranks("diffusers", run.comm):
            call.check_over()
    finally:
        run.block = None
    outputs, spec = tree_flatten(out)
    places = finding.outputs
    return tree_unflatten([x if at is None else rows_of(x, at, run) for x, at in zip(outputs, places)], spec)


def _own(run: SharedForward, finding: Finding, flat: list[Any]) -> list[Any]:
    """A block's arguments on this rank."""
    own = list(flat)
    for number, place in enumerate(finding.places):
        if place is not None:
            x = flat[number]
            own[number] = local(x) if isinstance(x, RankRows) and x.place == place else cut(whole(x), place, run)
    for number, segments in finding.counts:
        own[number] = held(segments, run.comm.rank, run.comm.size)
    return own


def _findings(run: SharedForward, name: str, flat: list[Any], spec: Any) -> dict[Any, Finding | None]:
    """What trials of such a block with such arguments have found, by the values that it reads."""
    known = run.sharing.findings
    if (key := (run.kinds[name], str(spec), *map(_fact, flat))) not in known:
        if len(known) >= KNOWN * 8:
            del known[next(iter(known))]
        known[key] = {}
    return known[key]


def _found(
    run: SharedForward, name: str, module: nn.Module, forward: Callable[..., Any], flat: list[Any], spec: Any
) -> Finding | None:  # fmt: skip
    """What a trial of the block finds. A collective."""
    arguments = [_given(x) for x in flat]

    def outputs(leaves: list[Any]) -> list[Any]:
        args, kwargs = tree_unflatten(leaves, spec)
        return tree_flatten(forward(*args, **kwargs))[0]  # type: ignore[no-any-return]

    what = f"diffusers: the trial of {name} of {name_of(run.model)}"
    with gathering(what, run.comm) as found:
        run.tries = True
        try:
            found.own = find(module, outputs, arguments, run.comm.size)
        except NotImplementedError as error:
            raise NotImplementedError(
                f"diffusers: {name} ({type(module).__name__}) of {name_of(run.model)} cannot be computed on a rank's "
                f"rows: {error}; give whole=({name.rpartition('.')[0]!r},) to compute this list whole on every rank"
            ) from error
        finally:
            run.tries = False
    if any(other != found.own for other in found.every):
        raise ValueError(f"{what} found other rows on some rank; give every rank the same model")
    return found.own  # type: ignore[no-any-return]


def _fact(x: Any) -> Any:
    """What of an argument a finding depends on."""
    if isinstance(x, RankRows):
        return whole_shape(x), x.place
    if isinstance(x, Tensor):
        return x.shape, x.dtype
    return x if type(x) in PLAIN else (_said(x), *_attributes(x))


def _given(x: Any) -> Any:
    return GivenRows(whole_shape(x), x.place, x.dtype, x.device) if isinstance(x, RankRows) else x
