"""`parallelize`: an unchanged model whose stages shard the dimensions that they do not mix."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from seqpar.comm import Comm
from seqpar.dsp.costs import Stage
from seqpar.dsp.form import form_of
from seqpar.dsp.moves import GRADS
from seqpar.dsp.plan import StagePlan, plan_stages
from seqpar.dsp.runner import (
    Arguments,
    ForwardState,
    StageRun,
    by_name,
    collective_modules,
    run_stage,
    some_rank_skips,
)
from seqpar.dsp.space import Sharding, Space
from seqpar.dsp.spec import Block, Spec
from seqpar.dsp.specs import SPECS
from seqpar.nn.fingerprint import hashed, leaves, ordered, weights_of
from seqpar.nn.wrap import ParallelModel, check_makes_plans, refuse_twice, replaced
from seqpar.ops.core.agreement import agreement, errors_on_all_ranks
from seqpar.ops.core.handles import uncompiled

MakeStagePlan = Callable[..., StagePlan]
SEEN = "_seqpar_dsp"  # the attribute with this file's notes, on a model and on the memory of stages' inputs
MIXING = (nn.modules.batchnorm._NormBase,)  # statistics over rows


def parallelize(
    model: nn.Module,
    comm: Comm,
    spec: Spec | None = None,
    *,
    grad: str = "replicated",
    plan: MakeStagePlan = plan_stages,
    check_inputs: bool = True,
) -> Parallelized:
    """Make a model's blocks compute their share of the rows; its inputs and outputs stay whole on every rank.

    spec: the `Spec` of the model's class, by default the one shipped for it. plan: plans each batch shape,
    ``plan(stages, dims, ranks, end=..., training=...)``; ``partial(plan_stages, hardware=...)`` for a machine other
    than an H100 node. Tensors are moved before a block's own forward and after it, so hooks, wrappers and recomputation
    see the block as before. A rank with an empty share skips the block, with its parameters still in the graph.

    Gradients of parameters are shares: sum them over the ranks. grad: how the loss counts. "replicated": every rank
    computes the same loss from the whole output. "sum": the loss is the sum of all ranks' losses.

    check_inputs: in every forward ranks compare the inputs, including their values (on a GPU this waits for one
    number), and in the first one the weights, except DTensors; without it only shapes are compared. Otherwise different
    noise or seeds, or frames sharded before, would silently compute something meaningless.

    Raises: ValueError for a model that its spec does not describe, or that is parallelized already; NotImplementedError
    for a model without a spec, modules that mix rows unnoticed, and in a forward for active dropout.
    """
    # fully_shard changes the class of a model to a new subclass
    kinds = [kind.__name__ for kind in type(model).__bases__]
    name = kinds[1] if kinds[0] == "FSDPModule" else type(model).__name__
    if spec is None:
        spec = SPECS.get(name)
        if spec is None:
            raise NotImplementedError(f"no spec is known for {name}, only for {sorted(SPECS)}; give one")
    if name != spec.model:
        raise ValueError(f"the spec is for {spec.model}, the model is a {name}")
    if grad not in GRADS:
        raise ValueError(f"grad must be one of {GRADS}, got {grad!r}")
    return Parallelized(model, comm, spec, grad, plan, check_inputs)


class Parallelized(ParallelModel):
    """A parallelized model; `undo`, or the end of a ``with`` block, restores it.

    plans: of the batch shapes so far. A copy of the model is parallelized too, with the same plans.
    """

    def __init__(
        self, model: nn.Module, comm: Comm, spec: Spec, grad: str, make_plan: MakeStagePlan, check_inputs: bool
    ) -> None:
        refuse_twice(model)
        check_makes_plans(model, make_plan, "(stages, dims, ranks, end=, training=)")
        super().__init__(model, comm)
        self.spec, self.grad, self.make_plan, self.check_inputs = spec, grad, make_plan, check_inputs
        self.stages = spec.stages(model)
        self.names = [name for name, _ in self.stages]
        self.plans: dict[tuple[object, ...], StagePlan] = {}
        self._running, self._forwards = threading.local(), 0
        _check_modules(model, spec, self.names)
        for name, block in self.stages:
            _check_block(model.get_submodule(name), name, block)
        self._undone.enter_context(replaced(model, {SEEN: _Seen()}))
        self._put("", self._forward)
        for name, block in self.stages:
            self._put(name, partial(self._stage, name=name, block=block))
        if spec.exit is not None:
            self._put(spec.exit.module, self._exit)
        for name, module in model.named_modules():
            if _matches(name, spec.outside) and any(True for _ in module.parameters(recurse=False)):
                self._put(name, partial(self._outside, name=name))

    def _put(self, name: str, around: Callable[[nn.Module, Callable[..., Any], Arguments], Any]) -> None:
        """Put a function around a forward; it gets the arguments by name, uncompiled."""
        module = self.model.get_submodule(name)
        named = by_name(module.forward, name or type(module).__name__)

        @uncompiled
        def call(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Arguments) -> Any:
            return around(module, forward, named(args, kwargs))

        self.put_around(module, lambda module, forward, *args, **kwargs: call(module, forward, args, kwargs))

    def describe(self) -> str:
        """The plans of all batch shapes so far."""
        return "\n".join(plan.describe() for plan in self.plans.values())

    # --- forwards ----------------------------------------------------------------------------------------------------

    def _forward(self, model: nn.Module, forward: Callable[..., Any], arguments: Arguments) -> Any:
        seen: _Seen = getattr(model, SEEN)
        self._agree(model, seen, arguments)
        space = Space(self.spec.dims(model, arguments), self.comm)
        state = ForwardState(model, space, self.names, torch.is_grad_enabled(), self._forwards)
        self._forwards += 1
        stack = self._stack()
        stack.append(state)
        try:
            out = forward(**arguments)
        finally:
            stack.pop()
        if state.first:
            self._check_buffers(state)
        seen.shapes.add((state.shape, model.training))
        if not state.ended:
            missing = [*self.names, self.spec.exit and self.spec.exit.module][state.count]
            raise NotImplementedError(f"a forward of {type(model).__name__} ended without {missing}; its spec has it")
        return out

    def _stage(
        self, module: nn.Module, forward: Callable[..., Any], arguments: Arguments, *, name: str, block: Block
    ) -> Any:
        run = self._run_of(module, name, arguments.get(next(iter(block.stream))))
        if not run.first:
            return run_stage(module, block, forward, run, arguments, self.grad)
        changed: dict[str, Tensor] = {}
        with NoDraws(name, self.comm), _noting_changes(module, name, changed):
            out = run_stage(module, block, forward, run, arguments, self.grad)
        if not _in_backward():
            state = self._current(name)
            state.changed |= changed
            state.uneven += changed if run.parts > 1 or some_rank_skips(block, run) else []
        return out

    def _exit(self, module: nn.Module, forward: Callable[..., Any], arguments: Arguments) -> Any:
        exit = self.spec.exit
        assert exit is not None
        state = self._current(exit.module)
        if state.count < len(self.names) or state.ended or state.plan is None:
            raise NotImplementedError(
                f"{exit.module} is called after {state.count} of {len(self.names)} stages, or twice"
            )
        state.ended = True
        (x,) = arguments.values()
        end = state.end(exit)
        state.grid.check(x, exit.form, end, f"the input of {exit.module}")
        return state.grid.end([forward(**arguments)], [exit.form], end, self.grad)[0]

    def _outside(self, module: nn.Module, forward: Callable[..., Any], arguments: Arguments, *, name: str) -> Any:
        stack = self._stack()
        counted = stack and stack[-1].count and not (stack[-1].ended and self.grad == "sum")
        if counted and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{name} is called after the first stage, where its parameters' gradients would count once for each "
                'rank; list it under between if it works row by row, or use grad="sum" if it comes after the exit'
            )
        return forward(**arguments)

    # --- the forward in progress
    # ------------------------------------------------------------------------------------------

    def _stack(self) -> list[ForwardState]:
        """This thread's forwards in progress, innermost last."""
        if not hasattr(self._running, "stack"):
            self._running.stack = []
        return self._running.stack  # type: ignore[no-any-return]

    def _current(self, name: str) -> ForwardState:
        stack = self._stack()
        if not stack or _in_backward():
            raise RuntimeError(f"{name} is called outside a forward of its {self.spec.model}")
        return stack[-1]

    def _run_of(self, module: nn.Module, name: str, x: object) -> StageRun:
        """The run of a stage: the current one, or the earlier one if backward recomputes it."""
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} got {x!r:.100} where its spec says the rows are")
        storage = x.untyped_storage()
        if _in_backward():
            run = getattr(storage, SEEN, {}).get((id(self), id(module)))
            if run is None:
                raise RuntimeError(
                    f"{name} is recomputed from an input that is not the memory of the first time; checkpoint each "
                    "stage by itself, and without moving its input elsewhere"
                )
            return run  # type: ignore[no-any-return]
        state = self._current(name)
        if state.plan is None:
            shape, plan = self._plan(state, x)
            seen: _Seen = getattr(state.model, SEEN)
            state.follow(shape, plan, first=(shape, state.model.training) not in seen.shapes)
        run = state.next(name, self.spec.exit)
        if not hasattr(storage, SEEN):
            setattr(storage, SEEN, {})
        getattr(storage, SEEN)[id(self), id(module)] = run
        return run

    # --- plans -------------------------------------------------------------------------------------------------------

    def _plan(self, state: ForwardState, x: Tensor) -> tuple[tuple[object, ...], StagePlan]:
        """The key of a batch shape, and its plan. x: the first stage's input, whole."""
        space = state.space
        shape = (tuple(space.dims.items()), x.numel(), x.dtype, state.training)
        if shape not in self.plans:
            width = x.numel() // _tokens(self.stages[0][1], space)
            stages = [
                self._stage_of(state.model, name, block, space, width, x.element_size()) for name, block in self.stages
            ]
            stages[0] = replace(stages[0], rest=None)  # the first input is whole
            end: Sequence[Sharding] = (None,) if self.spec.exit is None else self.spec.exit.rest
            plan = self.make_plan(stages, space.dims, space.comm.size, end=end, training=state.training)
            afters = plan.afters if self.spec.exit else [*plan.afters[:-1], None]  # the last output is the end
            with agreement("planning of stages", self.comm) as call:
                for stage, choice, after in zip(stages, plan.choices, afters, strict=True):
                    if choice.parts != 1:  # also raises for a stage that cannot run in parts
                        plan.costs.through(stage, 0.0, choice.before, choice.sharding, after, choice.parts)
                choices = [tuple(choice) for choice in plan.choices]
                call.facts = {"grid": (plan.costs.core, plan.costs.held), "choices": choices, "end": plan.end}
            self.plans[shape] = plan
        return shape, self.plans[shape]

    def _stage_of(self, model: nn.Module, name: str, block: Block, space: Space, width: int, element: int) -> Stage:
        """A stage for the planner."""
        module, tokens = model.get_submodule(name), _tokens(block, space)
        size = tokens * width * element * len(block.stream)
        matrices = sum(p.numel() for p in module.parameters() if p.dim() > 1)
        mixed = prod(space.dims[dim] for dim in block.whole)
        heads, kv_heads = (block.core.count(module),) * 2 if block.core else (block.heads, block.kv_heads)
        return Stage(
            name, frozenset(block.whole), bytes=size, flops=2.0 * matrices * tokens,
            attention=4.0 * tokens * mixed * width if block.whole else 0.0, heads=heads, kv_heads=kv_heads,
            qkv=(size, 2 * size * kv_heads / heads) if heads else (0.0, 0.0), ring=block.attention,
            filled=bool(block.core and block.core.sdpa),
            # an inner module that gathers its weights would do so for each part, and some ranks skip parts
            apart=frozenset() if collective_modules(module) else _apart(block) & space.dims.keys(),
            # foreign code may not work on zero rows
            rest=None if block.rest is None else frozenset(block.rest), rest_filled=True,
        )  # fmt: skip

    # --- comparing ranks
    # --------------------------------------------------------------------------------------------------

    def _agree(self, model: nn.Module, seen: _Seen, arguments: Mapping[str, Any]) -> None:
        """Check that ranks make the same call, with nothing active that must not be."""
        with agreement(f"a forward of {type(model).__name__}", self.comm, every=True) as call:
            self._check_changes(model, seen)
            facts = {
                name: self._fact(value) if isinstance(value, Tensor) else value for name, value in leaves(arguments)
            }
            if self.check_inputs and not seen.weights:
                facts["weights"] = weights_of(model)
            facts |= {"grad enabled": torch.is_grad_enabled(), "training": model.training, "grad": self.grad}
            call.facts = facts
        seen.weights = True

    def _fact(self, x: Tensor) -> tuple[object, ...]:
        return tuple(x.shape), x.dtype, x.requires_grad, ordered(x) if self.check_inputs else None

    def _check_changes(self, model: nn.Module, seen: _Seen) -> None:
        """Raise for modules changed since, and for active dropout."""
        modules = list(model.modules())
        if len(modules) != len(seen.modules) or any(a is not b for a, b in zip(modules, seen.modules)):
            _check_modules(model, self.spec, self.names)
            seen.modules = modules
        for module in modules:
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
                name = next(name for name, other in model.named_modules() if other is module)
                raise NotImplementedError(
                    f"{name or 'the model'} is dropout with p={module.p} in training, which would draw other "
                    "numbers for a shard than for the whole; set its p to 0"
                )

    def _check_buffers(self, state: ForwardState) -> None:
        """Raise for buffers that a forward changed differently from one process."""
        with agreement(f"a forward of {type(state.model).__name__}", self.comm, every=True) as call:
            if state.uneven:
                raise NotImplementedError(
                    f"{state.uneven[:4]} change in a forward, which each rank must make once: plan these stages in one "
                    "part (parts=(1,)) and with rows for all ranks, or change them outside of stages"
                )
            values = {name: hashed(x) for name, x in state.changed.items() if self.check_inputs}
            call.facts = {"buffers that stages changed": values}


class _Seen:
    """What was checked of a model: its modules, its weights, and the batch shapes with a forward.

    A copy of the model starts empty.
    """

    def __init__(self) -> None:
        self.weights = False
        self.modules: list[nn.Module] = []
        self.shapes: set[object] = set()  # each with training or not

    def __deepcopy__(self, memo: dict[int, Any]) -> _Seen:
        return _Seen()


def _in_backward() -> bool:
    """Whether autograd runs here, as when a forward inside a checkpoint is recomputed."""
    return torch._C._current_graph_task_id() != -1


def _apart(block: Block) -> frozenset[str]:
    """Dimensions along which a block can run in parts, since none of its rows looks at others along them.

    Attention under a plan draws dropout by a row's place in all dimensions, so it needs them whole.
    """
    forms = [set(form_of(form).names) for form in block.stream.values()]
    gathered = {dim for _, dims in block.gathers.values() for dim in dims}
    return frozenset() if block.attention else frozenset(set.intersection(*forms) - set(block.whole) - gathered)


def _tokens(block: Block, space: Space) -> int:
    form = form_of(next(iter(block.stream.values())))
    return prod(space.dims[name] for name in form.names if name in space.dims)


# --- requirements on a model ----------------------------------------------------------------------------------------


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) or name.startswith(pattern + ".") for pattern in patterns)


def _check_block(module: nn.Module, name: str, block: Block) -> None:
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


def _check_modules(model: nn.Module, spec: Spec, stages: Sequence[str]) -> None:
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
        elif own and not _matches(name, known):
            raise ValueError(
                f"{name} of {what} is a {type(module).__name__}, in no stage, not between stages and not outside: its "
                "spec does not list it"
            )
        if isinstance(module, MIXING) and not _matches(name, spec.outside):
            raise NotImplementedError(f"{name} of {what} is a {type(module).__name__}, whose statistics mix rows")


# --- checks inside a stage ------------------------------------------------------------------------------------------


@contextmanager
def _noting_changes(module: nn.Module, name: str, changed: dict[str, Tensor]) -> Iterator[None]:
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
