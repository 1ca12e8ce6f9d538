"""One forward of a parallelized model: its progress, and the run of one stage."""

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
from seqpar.dsp.checks import SHARE, NoDraws, collective_modules
from seqpar.dsp.form import form_of
from seqpar.dsp.grid import Grid, GridPosition, attention_plan
from seqpar.dsp.moves import switch, switch_all
from seqpar.dsp.plan import StagePlan
from seqpar.dsp.space import Sharding, Space
from seqpar.dsp.spec import Block, Core, Exit
from seqpar.dsp.trial import Trial
from seqpar.foreign.wrap import replaced
from seqpar.ops.core.agreement import errors_on_all_ranks
from seqpar.ops.core.compared import version_of
from seqpar.ops.core.regions import run_again_inside, under_way
from seqpar.parallel import surround
from seqpar.private.torch import buffers_of, parameters_of

SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
Arguments = dict[str, Any]  # arguments of a forward, by name


class StageRun(NamedTuple):
    """One stage in one forward: the sharding of its input, the sharding inside, and that of its output."""

    grid: Grid
    name: str
    before: GridPosition
    inside: Sharding
    after: GridPosition
    mode: str
    last: bool  # the output is whole and ends the forward
    first: bool  # the first forward of this shape
    seed: int  # of the forward; layers derive theirs from it
    mixing: dict[str, str] | None = None  # dimensions to try -> how rows depend on each other, contrary to the spec
    written: list[str] | None = None  # arguments besides the stream that the stage writes to, in a first forward
    shares: list[Any] | None = None  # autograd's nodes of shares of rows, in a first forward


class ForwardState:
    """The progress of one forward. Stages must come in the order of the plan.

    names: of all stages. seed, kind: of this forward. cached: stages that return earlier outputs. changed: buffers that
    stages wrote to, in the first forward of a shape; uneven: those among them that some rank did not write exactly
    once. mixed: stages, dimensions, and how rows depend on each other along these, contrary to the spec. tried: stages
    with dimensions -> rows in a trial. written: stages with arguments that they wrote to. inside: the stage that is
    being computed.
    ends, shards: autograd's nodes of the model's end, and of what each rank has a share of.
    """

    def __init__(
        self, model: nn.Module, space: Space, names: Sequence[str], training: bool, seed: int, kind: object,
        cached: Sequence[str],
    ) -> None:  # fmt: skip
        self.model, self.space, self.names, self.training = model, space, names, training
        self.seed, self.kind, self.cached = seed, kind, cached
        self.plan: StagePlan | None = None
        self.shape: object = None  # the batch shape that the plan is for
        self.grid = Grid(space)
        self.count = 0  # stages called so far
        self.ended = self.first = False
        self.changed: dict[str, Tensor] = {}
        self.uneven: list[str] = []
        self.mixed: list[tuple[str, str, str]] = []
        self.tried: dict[object, int] = {}
        self.written: list[tuple[str, str]] = []
        self.inside = ""
        self.draws: NoDraws | None = None  # in the first forward of these sizes
        self.kept: set[Any] | None = None  # in it, autograd's nodes of what modules kept before
        self.ends: list[Any] = []
        self.shards: list[Any] = []

    def follow(self, shape: object, plan: StagePlan, *, first: bool) -> None:
        """Adopt a plan for this forward."""
        self.shape, self.plan, self.first = shape, plan, first
        self.grid = Grid(self.space, plan.costs.core, plan.costs.held)

    @property
    def sharded(self) -> str:
        """The stage that runs now, or the code between two; "" before the first and after the exit."""
        between = f"the model after {self.names[self.count - 1]}" if self.count and not self.ended else ""
        return self.inside or between

    def end(self, exit: Exit) -> GridPosition:
        """The position of the input of the module that ends the model; groups gather if it allows nothing else."""
        assert self.plan is not None
        return self.plan.end, self.grid.held if self.grid.held in exit.rest else None

    def note(self, out: Tensor | tuple[Tensor, ...], *, whole: bool) -> None:
        """Note outputs of the exit or of a stage, by which what the model returns is recognised."""
        for x in (out,) if isinstance(out, Tensor) else out:
            if x.untyped_storage().nbytes() == x.nbytes:  # else a view of something whole
                setattr(x.untyped_storage(), SHARE, not whole)
            if x.grad_fn is not None:
                (self.ends if whole else self.shards).append(x.grad_fn)

    def next(self, name: str, exit: Exit | None) -> StageRun:
        """The run of the stage that is being called. exit: the module that ends the model, if there is one."""
        expected = self.names[self.count] if self.count < len(self.names) else "the end"
        if name != expected:
            raise NotImplementedError(
                f"stage {name} is called where {expected} should be: the stages of a forward run once each, in the "
                f"order of the spec: {list(self.names)[:8]}"
            )
        assert self.plan is not None
        choice, held = self.plan.choices[self.count], self.grid.held
        before: GridPosition = (choice.before, held) if self.count else (None, None)
        self.count += 1
        last = self.count == len(self.names)
        self.ended = last and exit is None
        after: GridPosition = (None, None)
        if not last:
            after = self.plan.choices[self.count].before, held
        elif exit is not None:
            after = self.end(exit)
        return StageRun(
            grid=self.grid,
            name=name,
            before=before,
            inside=choice.sharding,
            after=after,
            mode=choice.mode,
            last=self.ended,
            first=self.first,
            seed=self.seed,
        )


def by_name(forward: Callable[..., Any], what: str) -> Callable[[Sequence[Any], Arguments], Arguments]:
    """A function (positional arguments, keyword arguments) -> all arguments by name. what: the owner, for errors."""
    parameters = inspect.signature(forward).parameters.values()
    if alone := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]:
        raise NotImplementedError(f"{what} takes {alone} by position only; its forward must take them by name too")
    order = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]

    def named(args: Sequence[Any], kwargs: Arguments) -> Arguments:
        if len(args) > len(order):
            raise ValueError(
                f"{what} got {len(args)} arguments by position, its forward names {order}; pass only these by position"
            )
        if twice := [name for name in order[: len(args)] if name in kwargs]:
            raise TypeError(f"{what} got multiple values for argument {twice[0]!r}")
        return dict(zip(order, args)) | kwargs

    return named


def run_stage(module: nn.Module, block: Block, forward: Any, run: StageRun, arguments: Arguments, grad: str) -> Any:
    """A stage's outputs, in the sharding that the model's next code gets.

    forward: the module's own. grad: how the final gradient counts.

    Raises: ValueError for an argument that is not in the spec, or does not fit its form under the sharding.
    """
    names, forms = list(block.stream), list(block.stream.values())
    with errors_on_all_ranks(run.name, run.grid.whole.comm):
        _check_arguments(run.name, block, arguments)
    grid, xs = run.grid, [arguments[name] for name in names]
    inside = run.inside, grid.held
    streams = dict(zip(names, grid.move(xs, forms, run.before, inside)))
    ys = _compute(module, block, forward, run, arguments | streams)
    ys = grid.end(ys, forms, inside, grad) if run.last else grid.move(ys, forms, inside, run.after)
    return ys[0] if len(ys) == 1 else tuple(ys)


def _compute(module: nn.Module, block: Block, forward: Any, run: StageRun, arguments: Arguments) -> list[Tensor]:
    """A stage's outputs for this rank's share of the rows; arguments that the spec does not list as rows are whole."""
    grid, skips = run.grid, some_rank_skips(block, run)
    for name, form in block.rows.items():
        if arguments.get(name) is not None:
            arguments[name] = grid.share_of(arguments[name], form, run.inside, f"{name} of {run.name}")
    if skips and (collective := collective_modules(module)):
        raise NotImplementedError(
            f"{collective} of {run.name} is under fully_shard, and would wait for ranks that have no rows along "
            f"{run.inside} and skip the stage; use fully_shard on stages as a whole, or give a planner that shards "
            "another dimension"
        )
    trial: Trial | None = None
    if skips and grid.absent(run.inside):
        outs = _skip(module, [arguments[name] for name in block.stream], arguments)
    else:
        if run.mixing:
            trial = Trial(module, block, grid, run.inside, list(run.mixing), arguments)
        others = [(name, x) for name, x in arguments.items() if isinstance(x, Tensor) and name not in block.stream]
        versions = [version_of(x) for _, x in others]
        if run.shares is not None and (run.inside, grid.held) != (None, None):
            given = map(arguments.get, block.stream)
            run.shares.extend(x.grad_fn for x in given if isinstance(x, Tensor) and x.grad_fn)
        outs = _called(module, block, forward, run, arguments)
        if run.written is not None:
            run.written.extend(name for (name, x), v in zip(others, versions, strict=True) if version_of(x) != v)
    with errors_on_all_ranks(run.name, grid.whole.comm):
        if len(outs) != len(block.stream):
            raise ValueError(
                f"{run.name} returned {len(outs)} tensors, its spec has {len(block.stream)} streams; let it return a "
                "tensor for each stream, in their order"
            )
        for (name, form), out in zip(block.stream.items(), outs, strict=True):
            grid.check(out, form, (run.inside, grid.held), f"{name} out of {run.name}")
        if skips and not grid.absent(run.inside):
            _check_alike(block, run, arguments, outs)
    if trial is not None and run.mixing is not None:
        run.mixing.update(trial.judge(outs, partial(_called, module, block, forward, run)))
    return outs


def _called(module: nn.Module, block: Block, forward: Any, run: StageRun, arguments: Arguments) -> list[Tensor]:
    with _shared_attention(block, run), _adapted(module, block, run):
        out = forward(**arguments)
    return list(out) if isinstance(out, (tuple, list)) else [out]


def _check_arguments(name: str, block: Block, arguments: Mapping[str, Any]) -> None:
    known = {*block.stream, *block.rows, *block.shared}
    for argument, value in arguments.items():
        if argument not in known and value is not None:
            got = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.100}"
            raise ValueError(
                f"{name} got {argument}, {got}, which its spec does not list; list it under rows with its form, or "
                "under shared if all rows use it alike"
            )
    if missing := [argument for argument in block.stream if argument not in arguments]:
        raise ValueError(
            f"{name} got no {missing}, which hold the rows by its spec; pass them, or leave them out of the stream of "
            "its Block"
        )


def some_rank_skips(block: Block, run: StageRun) -> bool:
    """Whether some rank skips a stage: it has no rows, and no other rank waits for it inside the stage."""
    exchanging: set[Sharding] = {dim for _, dims in block.gathers.values() for dim in dims}
    if block.attention or run.mode == "ulysses":
        exchanging.add(run.grid.held if run.grid.held in block.whole else run.inside)
    return run.inside not in exchanging and run.grid.sparse(run.inside)


def _skip(module: nn.Module, streams: Sequence[Tensor], arguments: Mapping[str, Any]) -> list[Tensor]:
    """Empty outputs, as if the module had computed them: all its parameters and arguments are in the graph."""
    inputs = [x for x in arguments.values() if isinstance(x, Tensor) and not any(x is y for y in streams)]
    return list(_Skip.apply(len(streams), *streams, *inputs, *module.parameters()))


def _check_alike(block: Block, run: StageRun, arguments: Mapping[str, Any], outs: Sequence[Tensor]) -> None:
    """Raise for outputs whose shape or dtype is not the input's, which a rank without rows takes over."""
    for name, y in zip(block.stream, outs, strict=True):
        x = arguments[name]
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            raise NotImplementedError(
                f"{run.name} gives {name} as {_said(y)} where it was {_said(x)}, which a rank without rows along "
                f"{run.inside} cannot know; give a planner that shards another dimension"
            )


def _said(x: Tensor) -> str:
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}"


class _Skip(torch.autograd.Function):
    """It forgets the values of its inputs, to which the model may write before backward."""

    @staticmethod
    def forward(ctx: Any, count: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.zeros = [
            partial(torch.zeros_like, x)  # as DTensors, where it is one
            if isinstance(x, nn.Parameter)
            else partial(torch.zeros, x.shape, dtype=x.dtype, device=x.device)
            for x in inputs
        ]
        # so that a checkpoint computes again, as on ranks with rows
        ctx.save_for_backward(torch.empty(0, device=inputs[0].device))
        return tuple(torch.empty_like(x) for x in inputs[:count])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        return None, *(zeros() if n else None for zeros, n in zip(ctx.zeros, ctx.needs_input_grad[1:], strict=True))


def _shared_attention(block: Block, run: StageRun) -> Any:
    """A context in which a block's attention finds its plan."""
    if not block.attention:
        return nullcontext()
    form = next(iter(block.stream.values()))
    space, sharded = run.grid.sharing(block.whole, run.inside)
    plan = attention_plan(space, form, block.whole, sharded, ulysses=run.mode == "ulysses")
    return surround(plan, LocalComm() if sharded is None else space.comm, seed=run.seed)


@contextmanager
def _adapted(module: nn.Module, block: Block, run: StageRun) -> Iterator[None]:
    """The module with its tables cut to this rank's rows, and with adapters on inner modules that must see all rows.

    A checkpoint inside the module recomputes those under the same adapters.
    """
    adapters = _adapters(module, block, run)
    outside, again = under_way() if adapters else [], partial(_adapted, module, block, run)

    def adapted(part: nn.Module, adapter: Callable[..., Any]) -> Callable[..., Any]:
        forward = part.forward
        named = by_name(forward, f"a module of {run.name}")

        def call(*args: Any, **kwargs: Any) -> Any:
            run_again_inside(again, run, outside)
            return adapter(forward, named(args, kwargs))

        return call

    with ExitStack() as stack, _cut_tables(module, block, run):
        for path, adapter in adapters.items():
            part = module.get_submodule(path)
            stack.enter_context(replaced(part, {"forward": adapted(part, adapter)}))
        yield


@contextmanager
def _cut_tables(module: nn.Module, block: Block, run: StageRun) -> Iterator[None]:
    """The module with its row-wise buffers and parameters cut to this rank's share."""
    whole: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for path, form in block.buffers.items():
            owner, _, name = path.rpartition(".")
            part = module.get_submodule(owner)
            tables = parameters_of(part) if name in parameters_of(part) else buffers_of(part)
            whole.append((tables, name, tables[name]))
            tables[name] = run.grid.share_of(tables[name], form, run.inside, f"{path} of {run.name}")
        yield
    finally:
        for tables, name, table in whole:
            tables[name] = table


def _adapters(module: nn.Module, block: Block, run: StageRun) -> dict[str, Callable[..., Any]]:
    """Inner modules whose outputs are gathered, and the core that ranks share by heads, each with its adapter.

    An adapter is called with the module's forward and its arguments.
    """
    grid, adapters = run.grid, dict[str, Callable[..., Any]]()
    for path, (form, dims) in block.gathers.items():
        if {run.inside, grid.held} & set(dims):
            adapters[path] = partial(_gathered, run, form, dims)
    if block.core is not None and run.mode == "ulysses":
        space, sharded = grid.sharing(block.whole, run.inside)
        by_heads = Space(space.dims | {block.core.over: block.core.count(module)}, space.comm)
        share = _share_sdpa if block.core.sdpa else _share_core
        adapters[block.core.module] = partial(share, run.name, block.core, by_heads, sharded)
    return adapters


def _gathered(
    run: StageRun, form: str, dims: Sequence[str], forward: Callable[..., Tensor], arguments: Arguments
) -> Tensor:
    return run.grid.gather(forward(**arguments), form, run.inside, dims)


def _share_core(
    name: str, core: Core, space: Space, sharded: str, forward: Callable[..., Tensor], arguments: Arguments
) -> Tensor:
    """A core's output, computed for this rank's heads over all rows, which ranks hold in shares along `sharded`."""
    if extra := [argument for argument, x in arguments.items() if argument not in core.stream and x is not None]:
        raise ValueError(
            f"{core.module} of {name} got {extra}, which its spec does not list; leave them out, or list them in the "
            "stream of its Core with their forms"
        )
    forms = list(core.stream.values())
    xs = switch_all([arguments[argument] for argument in core.stream], space, forms, sharded, core.over)
    if space.local(core.over)[core.over]:
        out = forward(**dict(zip(core.stream, xs, strict=True)))
    else:
        sizes = {"1": 1}
        for x, form in zip(xs, forms, strict=True):
            sizes |= zip(form_of(form).apart.split(), space.unfold(x, form, core.over).shape)
        form = form_of(core.out)
        empty = form.fold(xs[0].new_zeros([sizes[axis] for axis in form.apart.split()]))
        out = empty + sum(x.sum() for x in xs)  # an empty result, with all inputs in the graph
    return switch(out, space, core.out, core.over, sharded)


def _share_sdpa(
    name: str, core: Core, space: Space, sharded: str, forward: Callable[..., Any], arguments: Arguments
) -> Any:
    """The output of a module whose one call of PyTorch's attention is shared by heads."""
    with _Sdpa(partial(_share_core, name, core, space, sharded)) as mode:
        out = forward(**arguments)
    if mode.calls != 1:
        raise NotImplementedError(
            f"{core.module} of {name} called F.scaled_dot_product_attention {mode.calls} times, its spec shares "
            "one call by heads; give it a processor that makes one"
        )
    return out


class _Sdpa(TorchFunctionMode):
    """Passes calls of PyTorch's attention, with their arguments by name, to `share`."""

    def __init__(self, share: Callable[..., Tensor]) -> None:
        super().__init__()
        self.share, self.calls = share, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        arguments = dict(zip(SDPA, args)) | (kwargs or {})
        scale = arguments.pop("scale", None)
        arguments = {name: value for name, value in arguments.items() if isinstance(value, Tensor) or value}
        return self.share(partial(func, scale=scale), arguments)
