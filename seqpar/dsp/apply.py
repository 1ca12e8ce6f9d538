"""`parallelize`: an unchanged model whose stages shard the dimensions that they do not mix."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.comm import Comm
from seqpar.comm.entry import uncompiled
from seqpar.dsp.agreed import ForwardChecks, SeenModel
from seqpar.dsp.checks import NoDraws, check_block, check_modules, kept, matches, noting_changes
from seqpar.dsp.grid import Grid
from seqpar.dsp.moves import GRADS
from seqpar.dsp.plan import StagePlan, plan_stages
from seqpar.dsp.runner import Arguments, ForwardState, StageRun, by_name, run_stage, some_rank_skips
from seqpar.dsp.space import Sharding, Space
from seqpar.dsp.spec import Block, Spec
from seqpar.dsp.specs import SPECS
from seqpar.dsp.trial import ENOUGH, TABLES, HeldTensors, Trial, to_try
from seqpar.facts.value import integer
from seqpar.foreign import name_of
from seqpar.foreign.hooks import CACHING, check_hooks, with_cache
from seqpar.foreign.wrap import ParallelModel, check_makes_plans, refuse_unready, replaced
from seqpar.ops.core.agreement import agreement, errors_on_all_ranks
from seqpar.ops.core.alike import refusing_shares, whole_output
from seqpar.ops.core.compared import hashed
from seqpar.ops.core.handles import in_graph
from seqpar.ops.core.regions import known_regions
from seqpar.private.torch import backward_pass, tree_map_only

MakeStagePlan = Callable[..., StagePlan]
SUMMED = (
    'as in a rollout; give that model grad="sum", and divide by the number of ranks what a loss takes from its output'
)
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

    Each rank has a part of every parameter's gradient: sum them over the ranks. grad: how the loss is computed.
    "replicated": every rank computes the same loss from the whole output. "sum": the loss is the sum of all ranks'
    losses. average_over: the number of ranks over which a wrapper averages gradients, which the model multiplies by it;
    only for replicated losses.

    check_inputs: in every forward ranks compare the inputs, including their values (on a GPU this waits for one
    number), in the first and after writes to them the weights, and in a backward of replicated losses the gradient of
    the output; without it only shapes are compared, and different noise or seeds, or frames that were sharded before,
    give wrong results without an error.

    Raises: ValueError for a model that its spec does not describe, or that is parallelized already; NotImplementedError
    for a model without a spec, modules that mix rows although its spec does not say so, and in a forward for active
    dropout.
    """
    name = name_of(model)
    if spec is None:
        spec = SPECS.get(name)
        if spec is None:
            raise NotImplementedError(f"no spec is known for {name}, only for {sorted(SPECS)}; give one")
    if name != spec.model:
        raise ValueError(f"the spec is for {spec.model}, the model is a {name}; give a Spec with model={name!r}")
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
        self._checks = ForwardChecks(comm, spec, self.names, grad, average_over, check_inputs)
        self._running, self._forwards = threading.local(), 0
        check_modules(model, spec, self.names)
        for name, block in self.stages:
            module = model.get_submodule(name)
            check_block(module, name, block)
            self._undone.enter_context(replaced(module, {TABLES: HeldTensors(module)}))
        self._undone.enter_context(replaced(model, {SEEN: SeenModel()}))
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
                region.run_again_inside(self.reactivated, self)
            return around(module, forward, named(args, kwargs))

        self.put_around(module, lambda module, forward, *args, **kwargs: call(module, forward, args, kwargs))

    def describe(self) -> str:
        """The plans of all batch shapes so far."""
        return "\n".join(plan.describe() for plan in self.plans.values())

    def _forward(self, model: nn.Module, forward: Callable[..., Any], arguments: Arguments) -> Any:
        if backward_pass() >= 0:
            raise RuntimeError(f"{type(model).__name__} is recomputed as a whole; checkpoint each stage separately")
        seen: SeenModel = getattr(model, SEEN)
        named = list(model.named_modules())
        caches = with_cache(named)
        cached = [name for name in self.names if any(matches(path, (name,)) for path in caches)]
        kind = self._checks.before(named, seen, arguments, cached)
        space = Space(self.spec.dims(model, arguments), self.comm)
        state = ForwardState(model, space, self.names, torch.is_grad_enabled(), self._forwards, kind, cached)
        self._forwards += 1
        stack = self._stack()
        stack.append(state)
        sizes = space.key, kind
        if sizes not in seen.sizes:
            state.draws = NoDraws(lambda: state.sharded, self.comm)
            state.kept = {x.grad_fn for _, x in kept(model)}
        arguments = refusing_shares(arguments, self.comm, "dsp", self.spec.model, SUMMED)
        try:
            with state.draws or nullcontext():
                out = forward(**arguments)
        finally:
            stack.pop()
        with errors_on_all_ranks(f"a forward of {type(model).__name__}", self.comm):
            if not state.ended:
                missing = [*self.names, self.spec.exit and self.spec.exit.module][state.count]
                raise NotImplementedError(
                    f"a forward of {type(model).__name__} ended without {missing}, which its spec has; call all stages "
                    "and the exit once in each forward"
                )
        if state.first:
            self._checks.after(state, seen, out)
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
        due, written = self._to_try(state, name, block, run.grid, run.inside), list[str]()
        run = run._replace(mixing=due, written=written, shares=state.shards)
        state.inside = name
        with noting_changes(module, name, changed):
            out = self._ended(run_stage(module, block, forward, run, arguments, self.grad), run.last)
        state.inside = ""
        state.changed |= changed
        state.uneven += changed if some_rank_skips(block, run) else []
        state.mixed += [(name, dim, how) for dim, how in due.items() if how]
        state.written += [(name, argument) for argument in written]
        if run.last or run.after != (None, None):
            state.note(out, whole=run.last)
        return out

    def _ended(self, out: Any, last: bool) -> Any:
        """The outputs of a stage or of the exit. After the last one they are whole, and gradients enter here."""
        if not last or self.grad == "sum":
            return out
        whole = partial(
            whole_output, comm=self.comm, what="dsp", model=self.spec.model, factor=self.average_over,
            compared=self.check_inputs and self.comm.size > 1,
            more=', or give grad="sum" for a loss that is the sum of what ranks compute',
        )  # fmt: skip
        return tree_map_only(Tensor, whole, out)

    def _to_try(self, state: ForwardState, name: str, block: Block, grid: Grid, inside: Sharding) -> dict[str, str]:
        """The dimensions of a stage that no forward has tried on as many rows, each with ""."""
        if in_graph():  # selective recomputation would take a second call's results for the first one's
            return {}
        tried = getattr(state.model, SEEN).tried
        keys = {(name, dim, state.kind): rows for dim, rows in to_try(block, grid, inside).items()}
        due = {key: rows for key, rows in keys.items() if tried.get(key, 0) < min(rows, ENOUGH)}
        state.tried |= due
        return {dim: "" for _, dim, _ in due}

    def _exit(self, module: nn.Module, forward: Callable[..., Any], arguments: Arguments) -> Any:
        exit = self.spec.exit
        assert exit is not None
        state = self._current(exit.module)
        with errors_on_all_ranks(exit.module, self.comm):
            if state.count < len(self.names) or state.ended or state.plan is None:
                raise NotImplementedError(
                    f"{exit.module} is called after {state.count} of {len(self.names)} stages, or twice; call it once, "
                    "after the last stage"
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
            raise RuntimeError(
                f"{name} is called outside a forward of its {self.spec.model}; call the whole model, and checkpoint "
                "each stage separately"
            )
        return stack[-1]

    def _run_of(self, module: nn.Module, name: str, x: object) -> StageRun:
        """The run of a stage: the current one, or the earlier one if backward recomputes it."""
        if not isinstance(x, Tensor):
            raise ValueError(
                f"{name} got {x!r:.100} where its spec says the rows are; pass them as a tensor, or name the argument "
                "that holds them in the stream of its Block"
            )
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
                    "stage separately, without moving its input elsewhere, and call backward before another parallelize"
                )
            noted.again = True
            return noted.run  # type: ignore[no-any-return]
        state = self._current(name)
        if state.plan is None:
            shape, plan = self._plan(state, x)
            seen: SeenModel = getattr(state.model, SEEN)
            state.follow(shape, plan, first=(shape, state.kind) not in seen.shapes)
            if state.draws is not None and state.draws.drew and self.check_inputs:
                with agreement("random numbers before the first stage", self.comm, every=True) as call:
                    call.facts = {f"the input of {name}": hashed(x)}
        with errors_on_all_ranks(name, self.comm):
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
            width = x.numel() // self.stages[0][1].tokens(space)
            stages = [
                block.stage(state.model, name, space, width, x.element_size(), name in state.cached)
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
                for stage, choice in zip(stages, plan.choices, strict=True):
                    if stage.name in state.cached and choice.mode in ("ulysses", "ring"):
                        raise NotImplementedError(
                            f"{stage.name} has a cache of diffusers, which keeps the output of one call for all rows "
                            f"of a rank, and the plan runs it by {choice.mode}; plan it without sharing attention, or "
                            "call the model's disable_cache()"
                        )
                choices = [tuple(choice) for choice in plan.choices]
                call.facts = {"grid": (plan.costs.core, plan.costs.held), "choices": choices, "end": plan.end}
            self.plans[shape] = plan
        return shape, self.plans[shape]


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
        kinds = [(each.grid.whole.key, each.before, each.inside, each.after) for each in (self.run, run)]
        return self.unclear or (kinds[0] != kinds[1] and not self.again)
