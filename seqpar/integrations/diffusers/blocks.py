"""Blocks of a model: its outermost lists of modules, whose children get this rank's rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.comm.entry import uncompiled
from seqpar.foreign import name_of
from seqpar.integrations.diffusers.forward import BlockCall, OtherValues, SharedForward, current
from seqpar.integrations.rows import RankRows, cut, local, rows_of, whole, whole_shape
from seqpar.ops.core.agreement import errors_on_all_ranks, gathering
from seqpar.ops.core.regions import known_regions
from seqpar.private.torch import tree_flatten, tree_unflatten
from seqpar.trial.blocks import Draws, find
from seqpar.trial.finding import Finding
from seqpar.trial.identity import said_of
from seqpar.trial.readings import GivenRows
from seqpar.trial.segments import held


def blocks_of(
    model: nn.Module, blocks: tuple[str, ...] | None, whole: tuple[str, ...]
) -> dict[nn.Module, tuple[str, bool]]:  # fmt: skip
    """The blocks of a model, each with its name and whether it is computed on this rank's rows, or else whole.

    Raises: ValueError for names of no list.
    """
    known = {name: each for name, each in model.named_modules() if isinstance(each, nn.ModuleList)}
    for option, names in (("blocks", blocks or ()), ("whole", whole)):
        unknown = ", ".join([name for name in names if name not in known])
        if isinstance(names, str) or unknown:
            told = "give a tuple of names" if isinstance(names, str) else f"no list is called {unknown}"
            raise ValueError(
                f"parallelize({name_of(model)}, {option}={names!r}): {told}; the lists of modules are "
                f"{', '.join(known) or 'none'}"
            )
    of_blocks = [name for name, some in known.items() if not any(isinstance(x, nn.ModuleList) for x in some)]
    outermost = [name for name in of_blocks if not any(name.startswith(f"{other}.") for other in of_blocks)]
    found = dict[nn.Module, tuple[str, bool]]()
    for path in [*whole, *(outermost if blocks is None else blocks)]:
        for name, block in known[path].named_children():
            if not isinstance(block, nn.ModuleList):
                found.setdefault(block, (f"{path}.{name}", path not in whole))
    return found


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
    given, run.given = run.given or [None] * len(flat), ()  # what were rows, and a reentrant checkpoint saved
    flat = [rows_of(x, at, run) if type(x) is Tensor and at is not None else x for x, at in zip(flat, given)]
    run.run_again(None, [x.place if isinstance(x, RankRows) else None for x in flat])
    if not shared:
        return _ran(run, name, None, forward, flat, spec)
    given = map(said_of, map(_given, flat))
    known = run.sharing.findings(run.kinds[name], str(spec), torch.is_grad_enabled(), *given)
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
        out = tree_flatten(forward(*args, **kwargs))[0]
        now, own = tree_flatten((args, kwargs))
        if own != spec or any(x is not y for x, y in zip(now, leaves)):
            raise NotImplementedError("it writes into a list or dict that it is given")
        return out  # type: ignore[no-any-return]

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
