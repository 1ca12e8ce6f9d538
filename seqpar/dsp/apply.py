"""`parallelize`: an unchanged model whose stages shard the dimensions that they do not mix."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from seqpar.comm import Comm
from seqpar.comm.entry import uncompiled
from seqpar.dsp.checks import NoDraws, check_block, check_modules, check_results, kept, matches, noting_changes
from seqpar.dsp.grid import Grid
from seqpar.dsp.moves import GRADS, follows_alike
from seqpar.dsp.plan import StagePlan, plan_stages
from seqpar.dsp.runner import Arguments, ForwardState, StageRun, by_name, run_stage, some_rank_skips
from seqpar.dsp.space import Sharding, Space
from seqpar.dsp.spec import Block, Spec
from seqpar.dsp.specs import SPECS
from seqpar.dsp.stages import stage_of, tokens_of
from seqpar.dsp.trial import COUNTS, ENOUGH, TABLES, HeldTensors, Trial, to_try
from seqpar.facts.value import integer
from seqpar.foreign.code import Few, KnownCodes, autocast_dtypes, code_of
from seqpar.foreign.fingerprint import hashed, leaves
from seqpar.foreign.gradients import check_gradient
from seqpar.foreign.hooks import CACHING, Named, check_hooks, warn_of_own_hooks, with_cache
from seqpar.foreign.kinds import name_of
from seqpar.foreign.randomness import active_dropout
from seqpar.foreign.weights import WeightChecks, check_weights
from seqpar.foreign.wrap import ParallelModel, check_makes_plans, refuse_unready, replaced
from seqpar.ops.core.agreement import agreement, gathering
from seqpar.ops.core.backward import backward_pass
from seqpar.ops.core.collective_op import refuse_batches
from seqpar.ops.core.handles import in_graph
from seqpar.ops.core.regions import known_regions
from seqpar.train.dtensor import global_rank
from seqpar.train.wrappers import WrapperCheck

MakeStagePlan = Callable[..., StagePlan]
KINDS = 16  # settings of calls that are looked at one by one
SEEN = "_seqpar_dsp"  # the attribute with this file's notes, on a model and on the memory of stages' inputs


def parallelize(
    model: nn.Module,
    comm: Comm,
    spec: Spec | None = None,
    *,
    grad: str = "replicated",
    average_over: int = 1,
    plan: MakeStagePlan = plan_stages,
    check_inputs: bool = True,
) -> Parallelized:
    """Make a model's blocks compute their share of the rows; its inputs and outputs stay whole on every rank.

    spec: the `Spec` of the model's class, by default the one shipped for it. plan: plans each batch shape,
    ``plan(stages, dims, ranks, end=..., training=...)``; ``partial(plan_stages, hardware=...)`` for a machine other
    than an H100 node. Tensors are moved before a block's own forward and after it, so hooks, wrappers and recomputation
    see the block as before. A rank with an empty share skips the block, with its parameters still in the graph.

    Gradients of parameters are shares: sum them over the ranks. grad: how the loss counts. "replicated": every rank
    computes the same loss from the whole output. "sum": the loss is the sum of all ranks' losses. average_over: the
    number of ranks over which a wrapper averages gradients, which the model makes as many times as large; for
    replicated losses.

    check_inputs: in every forward ranks compare the inputs, including their values (on a GPU this waits for one
    number), in the first and some of the next 16 with gradients the weights, except DTensors, and in a backward of
    replicated losses the gradient of the output; without it only shapes are compared. Otherwise different noise or
    seeds, or frames sharded before, would silently compute something meaningless.

    Raises: ValueError for a model that its spec does not describe, or that is parallelized already; NotImplementedError
    for a model without a spec, modules that mix rows unnoticed, and in a forward for active dropout.
    """
    name = name_of(model)
    if spec is None:
        spec = SPECS.get(name)
        if spec is None:
            raise NotImplementedError(f"no spec is known for {name}, only for {sorted(SPECS)}; give one")
    if name != spec.model:
        raise ValueError(f"the spec is for {spec.model}, the model is a {name}")
    if grad not in GRADS:
        raise ValueError(f"grad must be one of {GRADS}, got {grad!r}")
    average_over = integer("average_over", average_over, 1)
    if average_over > 1 and grad == "sum":
        raise NotImplementedError(
            f'average_over={average_over} with grad="sum", where parameters after the exit have their own gradients; '
            "multiply the loss by it instead"
        )
    return Parallelized(model, comm, spec, grad, average_over, plan, check_inputs)


class Parallelized(ParallelModel):
    """A parallelized model; `undo`, or the end of a ``with`` block, restores it.

    plans: of the batch shapes so far. A copy of the model is parallelized too, with the same plans.
    """

    def __init__(
        self, model: nn.Module, comm: Comm, spec: Spec, grad: str, average_over: int, make_plan: MakeStagePlan,
        check_inputs: bool,
    ) -> None:  # fmt: skip
        refuse_unready(model)
        check_hooks(list(model.named_modules()), CACHING)
        check_makes_plans(model, make_plan, "(stages, dims, ranks, end=, training=)")
        super().__init__(model, comm)
        self.spec, self.grad, self.make_plan, self.check_inputs = spec, grad, make_plan, check_inputs
        self.stages = spec.stages(model)
        self.names = [name for name, _ in self.stages]
        self.plans: dict[tuple[object, ...], StagePlan] = {}
        self.average_over = average_over
        self._running, self._forwards = threading.local(), 0
        check_modules(model, spec, self.names)
        for name, block in self.stages:
            module = model.get_submodule(name)
            check_block(module, name, block)
            self._undone.enter_context(replaced(module, {TABLES: HeldTensors(module)}))
        self._undone.enter_context(replaced(model, {SEEN: _Seen()}))
        self._put("", self._forward)
        for name, block in self.stages:
            self._put(name, partial(self._stage, name=name, block=block))
        if spec.exit is not None:
            self._put(spec.exit.module, self._exit)
        for name, module in model.named_modules():
            if matches(name, spec.outside) and any(True for _ in module.parameters(recurse=False)):
                self._put(name, partial(self._outside, name=name))

    def _put(self, name: str, around: Callable[[nn.Module, Callable[..., Any], Arguments], Any]) -> None:
        """Put a function around a forward; it gets the arguments by name, uncompiled."""
        module = self.model.get_submodule(name)
        named = by_name(module.forward, name or type(module).__name__)

        @uncompiled
        def call(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Arguments) -> Any:
            for region in known_regions():  # its backward may come after `undo`
                region.run_again_inside(self.again, self)
            return around(module, forward, named(args, kwargs))

        self.put_around(module, lambda module, forward, *args, **kwargs: call(module, forward, args, kwargs))

    def describe(self) -> str:
        """The plans of all batch shapes so far."""
        return "\n".join(plan.describe() for plan in self.plans.values())

    def _forward(self, model: nn.Module, forward: Callable[..., Any], arguments: Arguments) -> Any:
        if backward_pass() >= 0:
            raise RuntimeError(f"{type(model).__name__} is recomputed as a whole; checkpoint each stage by itself")
        seen: _Seen = getattr(model, SEEN)
        named = list(model.named_modules())
        caches = with_cache(named)
        cached = [name for name in self.names if any(matches(path, (name,)) for path in caches)]
        kind = self._agree(named, seen, arguments, cached)
        space = Space(self.spec.dims(model, arguments), self.comm)
        state = ForwardState(model, space, self.names, torch.is_grad_enabled(), self._forwards, kind, cached)
        self._forwards += 1
        stack = self._stack()
        stack.append(state)
        sizes = space.key, kind
        if sizes not in seen.sizes:
            state.draws = NoDraws(lambda: state.sharded, self.comm)
            state.kept = {x.grad_fn for _, x in kept(model)}
        arguments = self._refusing_shares(arguments)
        try:
            with state.draws or nullcontext():
                out = forward(**arguments)
        finally:
            stack.pop()
        if not state.ended:
            missing = [*self.names, self.spec.exit and self.spec.exit.module][state.count]
            raise NotImplementedError(f"a forward of {type(model).__name__} ended without {missing}; its spec has it")
        if state.first:
            self._check_first(state, out)
        seen.shapes.add((state.shape, kind))
        seen.sizes.add(sizes)
        return out

    def _stage(
        self, module: nn.Module, forward: Callable[..., Any], arguments: Arguments, *, name: str, block: Block
    ) -> Any:
        run = self._run_of(module, name, arguments.get(next(iter(block.stream))))
        if not run.first or backward_pass() >= 0:
            return self._ended(run_stage(module, block, forward, run, arguments, self.grad), run.last)
        state, changed = self._current(name), dict[str, Tensor]()
        due, written = self._to_try(state, name, block, run.grid, run.inside, run.parts), list[str]()
        run = run._replace(mixing=due, written=written, shares=state.shards)
        state.inside = name
        with noting_changes(module, name, changed):
            out = self._ended(run_stage(module, block, forward, run, arguments, self.grad), run.last)
        state.inside = ""
        state.changed |= changed
        state.uneven += changed if run.parts > 1 or some_rank_skips(block, run) else []
        state.mixed += [(name, dim, how) for dim, how in due.items() if how]
        state.written += [(name, argument) for argument in written]
        if run.last or run.after != (None, None):
            state.note(out, whole=run.last)
        return out

    def _ended(self, out: Any, last: bool) -> Any:
        """The outputs of a stage or of the exit. After the last one they are whole, and gradients enter here."""
        if not last or self.grad == "sum":
            return out
        compared = self.comm if self.check_inputs and self.comm.size > 1 else None
        return tree_map_only(Tensor, lambda x: _Whole.apply(x, compared, self.average_over, self.spec.model), out)

    def _refusing_shares(self, arguments: Arguments) -> Arguments:
        """The arguments. Gradients are shares: one raises in backward if a model that needs the whole would get it."""

        def refusing(x: Tensor) -> Tensor:
            if not follows_alike(x):
                return x
            x = x.view_as(x)
            x.register_hook(self._refuse_share)
            return x

        alone = self.comm.size == 1 or not torch.is_grad_enabled()
        if alone or not any(isinstance(x, Tensor) and follows_alike(x) for _, x in leaves(arguments)):
            return arguments
        return tree_map_only(Tensor, refusing, arguments)  # type: ignore[no-any-return]

    def _refuse_share(self, _: Tensor) -> None:
        raise NotImplementedError(
            f"dsp: backward of {self.spec.model} has for each rank a share of the gradient of its input, which follows "
            "from the output of a model that needs the whole, as in a rollout; give that model "
            'grad="sum", and divide by the number of ranks what a loss takes from its output'
        )

    def _to_try(
        self, state: ForwardState, name: str, block: Block, grid: Grid, inside: Sharding, parts: int = 1
    ) -> dict[str, str]:  # fmt: skip
        """The dimensions of a stage that no forward has tried on as many rows, each with ""."""
        if in_graph():  # selective recomputation would take a second call's results for the first one's
            return {}
        tried = getattr(state.model, SEEN).tried
        keys = {(name, dim, state.kind): rows for dim, rows in to_try(block, grid, inside, parts).items()}
        due = {key: rows for key, rows in keys.items() if tried.get(key, 0) < min(rows, ENOUGH)}
        state.tried |= due
        return {dim: "" for _, dim, _ in due}

    def _exit(self, module: nn.Module, forward: Callable[..., Any], arguments: Arguments) -> Any:
        exit = self.spec.exit
        assert exit is not None
        state = self._current(exit.module)
        if state.count < len(self.names) or state.ended or state.plan is None:
            raise NotImplementedError(
                f"{exit.module} is called after {state.count} of {len(self.names)} stages, or twice"
            )
        state.ended = True
        ((argument, x),) = arguments.items()
        grid, end = state.grid, state.end(exit)
        grid.check(x, exit.form, end, f"the input of {exit.module}")
        block = Block(exit.module, {argument: exit.form})
        due = self._to_try(state, exit.module, block, grid, end[0]) if state.first and end[1] == grid.held else {}
        trial = Trial(module, block, grid, end[0], list(due), arguments) if due else None
        state.inside = exit.module if end[0] is not None else ""
        out = forward(**arguments)
        state.inside = ""
        if trial is not None:
            mixed = trial.judge([out], lambda given: [forward(**given)])
            state.mixed += [(exit.module, dim, how) for dim, how in mixed.items()]
        out = self._ended(grid.end([out], [exit.form], end, self.grad)[0], True)
        state.note(out, whole=True)
        return out

    def _outside(self, module: nn.Module, forward: Callable[..., Any], arguments: Arguments, *, name: str) -> Any:
        stack = self._stack()
        counted = stack and stack[-1].count and not (stack[-1].ended and self.grad == "sum")
        if counted and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{name} is called after the first stage, where its parameters' gradients would count once for each "
                "rank; list it under between if it works row by row, or, if it comes after the exit, give "
                'grad="sum" and divide the loss by the number of ranks'
            )
        return forward(**arguments)

    def _stack(self) -> list[ForwardState]:
        """This thread's forwards in progress, innermost last."""
        if not hasattr(self._running, "stack"):
            self._running.stack = []
        return self._running.stack  # type: ignore[no-any-return]

    def _current(self, name: str) -> ForwardState:
        stack = self._stack()
        if not stack or backward_pass() >= 0:
            raise RuntimeError(f"{name} is called outside a forward of its {self.spec.model}")
        return stack[-1]

    def _run_of(self, module: nn.Module, name: str, x: object) -> StageRun:
        """The run of a stage: the current one, or the earlier one if backward recomputes it."""
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} got {x!r:.100} where its spec says the rows are")
        # strides of dimensions of size 1 may be others in backward
        strides = tuple([stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1])
        # parts of one tensor are inputs of forwards of their own
        storage, key = x.untyped_storage(), (id(self), id(module), x.storage_offset(), x.shape, strides)
        if backward_pass() >= 0:
            noted = getattr(storage, SEEN, {}).get(key)
            if noted is not None and noted.unclear:
                raise RuntimeError(
                    f"{name} is recomputed, and two forwards of other sizes had the same input; give each a tensor of "
                    "its own, as x.clone() is"
                )
            if noted is None:
                raise RuntimeError(
                    f"{name} is recomputed from an input that is not the memory of the first time; checkpoint each "
                    "stage by itself, without moving its input elsewhere, and call backward before another parallelize"
                )
            noted.again = True
            return noted.run  # type: ignore[no-any-return]
        state = self._current(name)
        if state.plan is None:
            shape, plan = self._plan(state, x)
            seen: _Seen = getattr(state.model, SEEN)
            state.follow(shape, plan, first=(shape, state.kind) not in seen.shapes)
            if state.draws is not None and state.draws.drew and self.check_inputs:
                with agreement("random numbers before the first stage", self.comm, every=True) as call:
                    call.facts = {f"the input of {name}": hashed(x)}
        run = state.next(name, self.spec.exit)
        if state.training:
            if not hasattr(storage, SEEN):
                setattr(storage, SEEN, {})
            before = getattr(storage, SEEN).get(key)
            getattr(storage, SEEN)[key] = _Noted(run, unclear=before is not None and before.other_than(run))
        return run

    def _plan(self, state: ForwardState, x: Tensor) -> tuple[tuple[object, ...], StagePlan]:
        """The key of a batch shape, and its plan. x: the first stage's input, whole."""
        space = state.space
        shape = (tuple(space.dims.items()), x.numel(), x.dtype, state.training, *state.cached)
        if shape not in self.plans:
            width = x.numel() // tokens_of(self.stages[0][1], space)
            stages = [
                stage_of(state.model, name, block, space, width, x.element_size(), name in state.cached)
                for name, block in self.stages
            ]
            stages[0] = replace(stages[0], rest=None)  # the first input is whole
            end: Sequence[Sharding] = (None,) if self.spec.exit is None else self.spec.exit.rest
            # the rows that a cache keeps are those of the same plan with gradients and without
            training = state.training and not state.cached
            with agreement("planning of stages", self.comm) as call:
                plan = self.make_plan(stages, space.dims, space.comm.size, end=end, training=training)
                if not isinstance(plan, StagePlan):
                    raise TypeError(f"dsp: plan= gave {plan!r:.200}, expected a StagePlan of the stages that it got")
                afters = plan.afters if self.spec.exit else [*plan.afters[:-1], None]  # the last output is the end
                for stage, choice, after in zip(stages, plan.choices, afters, strict=True):
                    if stage.name in state.cached and (choice.parts != 1 or choice.mode in ("ulysses", "ring")):
                        raise NotImplementedError(
                            f"{stage.name} has a cache of diffusers, which keeps the output of one call for all rows "
                            f"of a rank, and the plan runs it in {choice.parts} parts by {choice.mode}; plan it in "
                            "one part without sharing attention, or call the model's disable_cache()"
                        )
                    if choice.parts != 1:  # also raises for a stage that cannot run in parts
                        plan.costs.through(stage, 0.0, choice.before, choice.sharding, after, choice.parts)
                choices = [tuple(choice) for choice in plan.choices]
                call.facts = {"grid": (plan.costs.core, plan.costs.held), "choices": choices, "end": plan.end}
            self.plans[shape] = plan
        return shape, self.plans[shape]

    def _agree(
        self, named: Named, seen: _Seen, arguments: Mapping[str, Any], cached: Sequence[str]
    ) -> object:  # fmt: skip
        """Check that ranks make the same call, with nothing active that must not be. Returns the kind of call.

        Calls of one kind run the same code on each rank, with the same arguments besides None, the same settings, and
        the same flags and modes of all modules, by which a stage may take other code.
        """
        model, what, facts = named[0][1], f"a forward of {type(named[0][1]).__name__}", dict[str, object]()
        with gathering(what, self.comm, lambda code, error: self.comm.gather(what, code, error, facts=facts)) as codes:
            self._check_changes(named, seen)
            facts |= {
                name: self._fact(value) if isinstance(value, Tensor) else value for name, value in leaves(arguments)
            }
            facts |= {"grad enabled": torch.is_grad_enabled(), "training": model.training}
            facts |= {"grad": self.grad, "average_over": self.average_over}
            facts |= {"autocast": autocast_dtypes(), "stages with a cache": cached}
            facts["modules in training"] = sum([module.training for module in seen.modules])
            weights = seen.checks.weights(model, seen.modules) if self.check_inputs else None
            codes.own = code_of(seen.modules), weights, global_rank()
        every, weighed, ranks = zip(*codes.every)
        check_weights(what, weighed)
        seen.checks.passed()
        if self.grad == "replicated":
            seen.wrapper = seen.wrapper or WrapperCheck(frozenset(ranks), self.comm.size)
            seen.wrapper.check(f"dsp: {name_of(model)}", model, self.average_over)
        settings = tuple((name, x if _is_flag(x) else type(x)) for name, x in leaves(arguments))
        # a hook on one rank concerns all, which run a stage equally often; settings may number steps
        return seen.settings.known((settings, autocast_dtypes())), seen.codes.key(every)

    def _fact(self, x: Tensor) -> tuple[object, ...]:
        return tuple(x.shape), x.dtype, x.requires_grad, hashed(x) if self.check_inputs else None

    def _check_changes(self, named: Named, seen: _Seen) -> None:
        """Raise for modules changed since, for active dropout, and for hooks that see a share."""
        modules = [module for _, module in named]
        if len(modules) != len(seen.modules) or any(a is not b for a, b in zip(modules, seen.modules)):
            check_modules(modules[0], self.spec, self.names)
            seen.forget()
            seen.modules = modules
        check_hooks(named, CACHING)
        if self.comm.size > 1:
            warn_of_own_hooks(modules[0], [*self.names, *([self.spec.exit.module] if self.spec.exit else [])])
        if drops := active_dropout(named):
            raise NotImplementedError(
                f"{drops}, which would draw other numbers for a shard than for the whole; set its p to 0"
            )

    def _check_first(self, state: ForwardState, out: Any) -> None:
        """Raise for what a first forward shows: stages that mix or write to more, shares that it returns, buffers."""
        what = type(state.model).__name__
        with agreement(f"a forward of {what}", self.comm, every=True) as call:
            if state.mixed:
                name, dim, how = state.mixed[0]
                when = "they move to other places or are more" if how == COUNTS else f"other rows of {dim} do"
                remedy = (
                    f"list {dim} in the whole of its block" if name in self.names else f"leave {dim} out of its rest"
                )
                raise NotImplementedError(
                    f"{name} {how} {dim}, along which ranks share its rows: rows change when {when}; {remedy}"
                )
            getattr(state.model, SEEN).tried.update(state.tried)
            if state.written and self.comm.size > 1:
                name, argument = state.written[0]
                raise NotImplementedError(
                    f"{name} writes to {argument}, and each rank would change its own share or copy; let it write to a "
                    f"copy, as {argument}.clone() is"
                )
            if self.comm.size > 1:
                before = state.kept
                new = [] if before is None else [each for each in kept(state.model) if each[1].grad_fn not in before]
                check_results(state.model, out, state.ends, state.shards, self.grad, new)
            if state.uneven:
                raise NotImplementedError(
                    f"{state.uneven[:4]} change in a forward, which each rank must make once: plan these stages in one "
                    "part (parts=(1,)) and with rows for all ranks, or change them outside of stages"
                )
            values = {name: hashed(x) for name, x in state.changed.items() if self.check_inputs}
            call.facts = {"buffers that stages changed": values}


class _Whole(torch.autograd.Function):
    """An output that every rank has whole. Its gradient is compared, and multiplied for the model before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm | None, times: int, model: str) -> Tensor:
        ctx.comm, ctx.times, ctx.model = comm, times, model
        return x.detach()  # no view, so that it may be changed in place and its gradients still enter here

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.comm is not None:
            refuse_batches(f"the output of a parallel {ctx.model}", [dy])
            more = ', or give grad="sum" for a loss that is the sum of what ranks compute'
            check_gradient("dsp", ctx.comm, dy, of=f" of {ctx.model}", more=more)
        return dy * ctx.times if ctx.times > 1 else dy, None, None, None


def _is_flag(x: Any) -> bool:
    """Whether a stage may take other code for another value; other numbers are those of steps."""
    return isinstance(x, (bool, str)) or (isinstance(x, int) and x in (0, 1))


class _Seen:
    """What was checked of a model: its modules, its weights, kinds of calls, batch shapes, and stages tried.

    A copy of the model starts empty.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.wrapper: WrapperCheck | None = None
        self.checks = WeightChecks()
        self.forget()

    def forget(self) -> None:
        """Forget what was checked, since modules are others now."""
        self.settings, self.codes = Few(KINDS), KnownCodes()
        self.shapes: set[object] = set()  # each with a kind
        self.sizes: set[object] = set()  # the same, known before the first stage
        self.tried: dict[object, int] = {}  # stages, each with a dimension and a kind -> rows in a trial

    def __deepcopy__(self, memo: dict[int, Any]) -> _Seen:
        return _Seen()


@dataclass
class _Noted:
    """The run of a stage that got some memory, and whether backward has computed it again.

    unclear: whether a run of other sizes or of another plan had the same memory, and may still be computed again.
    """

    run: StageRun
    unclear: bool
    again: bool = False

    def other_than(self, run: StageRun) -> bool:
        """Whether a later run makes it unclear which one backward computes again."""
        kinds = [(each.grid.whole.key, each.before, each.inside, each.after, each.parts) for each in (self.run, run)]
        return self.unclear or (kinds[0] != kinds[1] and not self.again)
