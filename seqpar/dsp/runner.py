"""One forward of a parallelized model: where it is, and how one stage of it is run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from seqpar.comm import LocalComm
from seqpar.dsp.form import form_of
from seqpar.dsp.grid import Grid, GridPosition, attention_plan
from seqpar.dsp.moves import switch, switch_all
from seqpar.dsp.overlap import in_parts
from seqpar.dsp.plan import StagePlan
from seqpar.dsp.space import Sharding, Space
from seqpar.dsp.spec import Block, Core, Exit
from seqpar.ops.attention.recompute import run_again_inside, under_way
from seqpar.ops.core.handles import in_graph
from seqpar.parallel import parallel

SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


class StageRun(NamedTuple):
    """How one stage is run in one forward: where its input lies, the layout inside, and where its output goes."""

    grid: Grid
    name: str
    before: GridPosition
    inside: Sharding
    after: GridPosition
    mode: str
    last: bool  # what goes out is whole and the end
    first: bool  # no forward of this shape was run before
    seed: int  # of the forward, for layers that derive theirs
    parts: int  # that are computed one after another


class ForwardState:
    """The runner of one forward. Stages come in the order of the plan, and any other order raises."""

    def __init__(self, space: Space, names: Sequence[str], training: bool, seed: int) -> None:
        self.space, self.names, self.training, self.seed = space, names, training, seed
        self.plan: StagePlan | None = None
        self.grid = Grid(space)
        self.count = 0
        self.key: object = None
        self.left = self.first = False
        self.changed: dict[str, Tensor] = {}  # buffers of stages that were written to, if this is the first forward
        self.uneven: list[str] = []  # those that ranks wrote to more than once, or not at all

    def follow(self, key: object, plan: StagePlan) -> None:
        """Take a plan for this forward; key: what the plan is for."""
        self.key, self.plan, self.grid = key, plan, Grid(self.space, plan.costs.core, plan.costs.held)

    def end(self, exit: Exit) -> GridPosition:
        """Where the input of the module that ends the model lies: groups gather what it does not allow."""
        assert self.plan is not None
        return self.plan.end, self.grid.held if self.grid.held in exit.rest else None

    def next(self, name: str, exit: Exit | None) -> StageRun:
        """The step of the stage that is called now. exit: the module that ends the model, if one does."""
        expected = self.names[self.count] if self.count < len(self.names) else "the end"
        if name != expected:
            raise NotImplementedError(
                f"stage {name} is called where {expected} should be: the stages of a forward run once each, in the "
                f"order of the spec: {list(self.names)[:8]}"
            )
        assert self.plan is not None
        n, choices = self.count, self.plan.choices
        self.count += 1
        last = self.count == len(self.names)
        self.left = last and exit is None
        held = self.grid.held
        before = (None, None) if n == 0 else (choices[n].before, held)
        after = (None, None)
        if not last:
            after = choices[n + 1].before, held
        elif exit is not None:
            after = self.end(exit)
        return StageRun(
            self.grid, name, before, choices[n].layout, after, choices[n].mode, self.left, self.first, self.seed,
            choices[n].parts,
        )  # fmt: skip


def run_stage(module: nn.Module, block: Block, inner: Any, step: StageRun, given: dict[str, Any], grad: str) -> Any:
    """What a stage returns, in the layout in which the model goes on.

    inner: the module's own forward. given: its arguments by name. grad: how the end's gradient counts.

    Raises: ValueError for an argument that is not in the spec, or not of its form under what is sharded.
    """
    names, forms = list(block.stream), list(block.stream.values())
    _check_arguments(step.name, block, given)
    grid, xs = step.grid, [given[name] for name in names]
    here = step.inside, grid.held

    def compute(part: Grid, streams: list[Tensor]) -> list[Tensor]:
        return _computed(module, block, inner, step._replace(grid=part), given | dict(zip(names, streams, strict=True)))

    # recomputed selectively, calls go through their ops, which are not under way when they return
    if step.parts > 1 and not in_graph(*xs):
        assert step.inside is not None
        found = in_parts(step.name, xs, forms, grid, step.before, step.inside, step.after, step.parts, compute)
    else:
        outs = compute(grid, grid.move(xs, forms, step.before, here))
        found = grid.end(outs, forms, here, grad) if step.last else grid.move(outs, forms, here, step.after)
    return found[0] if len(found) == 1 else tuple(found)


def _computed(module: nn.Module, block: Block, inner: Any, step: StageRun, given: dict[str, Any]) -> list[Tensor]:
    """What a stage computes of its rows, which are this rank's share; other arguments are whole."""
    grid, inside = step.grid, step.inside
    for name, form in block.rows.items():
        if given.get(name) is not None:
            given[name] = grid.share_of(given[name], form, inside, f"{name} of {step.name}")
    if skipping(block, step) and (within := gathered_within(module)):
        raise NotImplementedError(
            f"{within} of {step.name} is under fully_shard, and would wait for ranks that have no rows along {inside} "
            "and skip the stage; use fully_shard on stages as a whole, or give a planner that shards another dimension"
        )
    if skipping(block, step) and grid.absent(inside):
        outs = skipped(module, [given[name] for name in block.stream], given)
    else:
        with _shared_attention(block, step), _prepared(module, block, step):
            out = inner(**given)
        outs = list(out) if isinstance(out, (tuple, list)) else [out]
    if len(outs) != len(block.stream):
        raise ValueError(f"{step.name} returned {len(outs)} tensors, its spec has {len(block.stream)} streams")
    for (name, form), out in zip(block.stream.items(), outs, strict=True):
        grid.check(out, form, (inside, grid.held), f"{name} out of {step.name}")
    return outs


def _exchanging(block: Block, step: StageRun) -> set[Sharding]:
    """The dimensions among whose ranks a block exchanges inside, so that none of them stays away."""
    found: set[Sharding] = {dim for _, dims in block.gathers.values() for dim in dims}
    if block.attention or step.mode == "ulysses":
        found.add(step.grid.held if step.grid.held in block.whole else step.inside)
    return found


def skipping(block: Block, step: StageRun) -> bool:
    """Whether any rank skips a stage, as it has no rows."""
    return step.inside not in _exchanging(block, step) and step.grid.sparse(step.inside)


def gathered_within(module: nn.Module) -> list[str]:
    """Modules inside whose forward is a collective, as that makes their weights whole."""
    return [
        name
        for name, part in module.named_modules()
        if name and {kind.__name__ for kind in type(part).__mro__} & {"FSDPModule", "FullyShardedDataParallel"}
    ]


def skipped(module: nn.Module, streams: Sequence[Tensor], given: Mapping[str, Any]) -> list[Tensor]:
    """Empty streams, as if the module had computed them: every parameter and argument is in the graph."""
    inputs = [x for x in given.values() if isinstance(x, Tensor) and not any(x is y for y in streams)]
    return list(_Skipped.apply(len(streams), *streams, *inputs, *module.parameters()))


class _Skipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*inputs)
        return tuple(torch.empty_like(x) for x in inputs[:count])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        return None, *(torch.zeros_like(x) if n else None for x, n in zip(ctx.saved_tensors, needed, strict=True))


def _check_arguments(name: str, block: Block, given: Mapping[str, Any]) -> None:
    known = {*block.stream, *block.rows, *block.shared}
    for argument, value in given.items():
        if argument not in known and value is not None:
            raise ValueError(
                f"{name} got {argument}={value!r:.100}, of which its spec says nothing: list it under rows with its "
                "form, or under shared if all rows use it alike"
            )
    if missing := [argument for argument in block.stream if argument not in given]:
        raise ValueError(f"{name} got no {missing}, which its spec says hold the rows")


def _shared_attention(block: Block, step: StageRun) -> Any:
    """What surrounds a block whose attention asks for a plan."""
    if not block.attention:
        return nullcontext()
    form = next(iter(block.stream.values()))
    space, sharded = step.grid.sharing(block.whole, step.inside)
    plan = attention_plan(space, form, block.whole, sharded, ulysses=step.mode == "ulysses")
    return parallel(plan, LocalComm() if sharded is None else space.comm, seed=step.seed)


@contextmanager
def _sliced(module: nn.Module, block: Block, step: StageRun) -> Iterator[None]:
    """The module with its tables of rows cut to this rank's share."""
    kept: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for path, form in block.buffers.items():
            owner, _, name = path.rpartition(".")
            held = module.get_submodule(owner)
            table = held._parameters if name in held._parameters else held._buffers
            whole = table[name]
            kept.append((table, name, whole))
            table[name] = step.grid.share_of(whole, form, step.inside, f"{path} of {step.name}")
        yield
    finally:
        for table, name, whole in kept:
            table[name] = whole


@contextmanager
def _shared(module: nn.Module, block: Block, step: StageRun) -> Iterator[None]:
    """The module with parts that see all rows, also in what a checkpoint inside the module runs again."""
    parts = _parts(module, block, step)
    outside, again = under_way() if parts else [], partial(_prepared, module, block, step)

    def noted(call: Callable[..., Any], inner: Callable[..., Any], given: dict[str, Any]) -> Any:
        run_again_inside(again, step, outside)
        return call(inner, given)

    with ExitStack() as stack:
        for path, call in parts.items():
            stack.enter_context(_around(module.get_submodule(path), partial(noted, call)))
        yield


@contextmanager
def _prepared(module: nn.Module, block: Block, step: StageRun) -> Iterator[None]:
    with _sliced(module, block, step), _shared(module, block, step):
        yield


def _parts(module: nn.Module, block: Block, step: StageRun) -> dict[str, Callable[..., Any]]:
    """Modules inside that run otherwise in this step: outputs that are gathered, and a core that is shared by heads."""
    grid, found = step.grid, dict[str, Callable[..., Any]]()
    for path, (form, dims) in block.gathers.items():
        if {step.inside, grid.held} & set(dims):
            found[path] = partial(_gathered, step, form, dims)
    if block.core is not None and step.mode == "ulysses":
        space, sharded = grid.sharing(block.whole, step.inside)
        over = Space(space.dims | {block.core.over: block.core.count(module)}, space.comm)
        how = _sharing_sdpa if block.core.sdpa else _over_heads
        found[block.core.module] = partial(how, step.name, block.core, over, sharded)
    return found


@contextmanager
def _around(module: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """The module with `call(its own forward, arguments by name)` for a forward."""
    own, inner = module.__dict__.get("forward"), module.forward
    order = list(inspect.signature(inner).parameters)
    module.forward = lambda *args, **kwargs: call(inner, dict(zip(order, args)) | kwargs)
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def _gathered(
    step: StageRun, form: str, dims: Sequence[str], inner: Callable[..., Tensor], given: dict[str, Any]
) -> Tensor:
    return step.grid.gather(inner(**given), form, step.inside, dims)


def _over_heads(
    name: str, core: Core, space: Space, sharded: str, inner: Callable[..., Tensor], given: dict[str, Any]
) -> Tensor:
    """What a core returns, computed for this rank's heads of all rows, of which ranks have shares along `sharded`."""
    if extra := [name for name, value in given.items() if name not in core.stream and value is not None]:
        raise ValueError(f"{core.module} of {name} got {extra}, of which its spec says nothing")
    forms = list(core.stream.values())
    xs = switch_all([given[name] for name in core.stream], space, forms, sharded, core.over)
    if space.local(core.over)[core.over]:
        out = inner(**dict(zip(core.stream, xs, strict=True)))
    else:
        sizes = {"1": 1}
        for x, form in zip(xs, forms, strict=True):
            sizes |= zip(form_of(form).apart.split(), space.unfold(x, form, core.over).shape)
        form = form_of(core.out)
        empty = form.fold(xs[0].new_zeros([sizes[name] for name in form.apart.split()]))
        out = empty + sum(x.sum() for x in xs)  # nothing, with all that came in the graph
    return switch(out, space, core.out, core.over, sharded)


def _sharing_sdpa(
    name: str, core: Core, space: Space, sharded: str, inner: Callable[..., Any], given: dict[str, Any]
) -> Any:
    """What a module returns whose one call of PyTorch's attention is shared by heads."""
    with _Sdpa(partial(_over_heads, name, core, space, sharded)) as mode:
        out = inner(**given)
    if mode.calls != 1:
        raise NotImplementedError(
            f"{core.module} of {name} called F.scaled_dot_product_attention {mode.calls} times, its spec shares "
            "one call by heads; give it a processor that makes one"
        )
    return out


class _Sdpa(TorchFunctionMode):
    """Hands calls of PyTorch's attention, with their arguments by name, to `share`."""

    def __init__(self, share: Callable[..., Tensor]) -> None:
        super().__init__()
        self.share, self.calls = share, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        given = dict(zip(SDPA, args)) | (kwargs or {})
        scale = given.pop("scale", None)
        given = {name: value for name, value in given.items() if isinstance(value, Tensor) or value}
        return self.share(partial(func, scale=scale), given)
