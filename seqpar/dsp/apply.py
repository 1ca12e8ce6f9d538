"""`parallelize`: an unchanged model whose stages shard what they do not mix."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from seqpar.comm import Comm
from seqpar.dsp.costs import Stage
from seqpar.dsp.form import form_of
from seqpar.dsp.moves import GRADS
from seqpar.dsp.plan import StagePlan, plan_stages
from seqpar.dsp.replace import Hook, Later, Replaced
from seqpar.dsp.runner import ForwardState, StageRun, gathered_within, run_stage, skipping
from seqpar.dsp.space import Sharding, Space
from seqpar.dsp.spec import Block, Spec
from seqpar.dsp.specs import SPECS
from seqpar.nn.fingerprint import hashed, leaves, ordered, weights_of
from seqpar.ops.core.agreement import agreement, raise_on_all_ranks

MakeStagePlan = Callable[..., StagePlan]
MIXING = (nn.modules.batchnorm._NormBase,)  # statistics over rows


def parallelize(
    model: nn.Module,
    comm: Comm,
    spec: Spec | None = None,
    *,
    grad: str = "replicated",
    planner: MakeStagePlan = plan_stages,
    check_inputs: bool = True,
) -> Parallelized:
    """Make a model's blocks compute their share of the rows; what it is given and returns stays whole on every rank.

    spec: what is known of the model's class, by default the one shipped for it. planner: called for each batch shape,
    ``planner(stages, dims, ranks, end=..., training=...)``; ``partial(plan_stages, hardware=...)`` for another machine
    than an H100 node. Blocks move what comes in before their own forward and what goes out
    after it, so that hooks, wrappers and recomputation see them as before. A rank whose share is empty skips the block,
    with its parameters still in the graph.

    Gradients of parameters are shares: sum them over the ranks. grad: how the loss counts. "replicated": every rank
    computes the same loss from the whole output. "sum": the loss is the sum of all ranks' losses.

    check_inputs: ranks compare what the model is given, also its values, in every forward (of a GPU's tensors this
    waits for one number), and in the first one its weights, DTensors apart; otherwise only shapes are compared.
    Different noise, seeds, or frames that were sharded before, would otherwise give an answer to no question.

    Raises: ValueError for a model that its spec does not describe, or is parallelized already. NotImplementedError for
    a model without a spec, modules that mix rows unseen, and in a forward for dropout that is active.
    """
    # fully_shard makes a model's class anew, of this one and the model's own
    kinds = [each.__name__ for each in type(model).__bases__]
    name = kinds[1] if kinds[0] == "FSDPModule" else type(model).__name__
    if spec is None:
        spec = SPECS.get(name)
        if spec is None:
            raise NotImplementedError(f"no spec is known for {name}, only for {sorted(SPECS)}; give one")
    if name != spec.model:
        raise ValueError(f"the spec is for {spec.model}, the model is a {name}")
    if grad not in GRADS:
        raise ValueError(f"grad must be one of {GRADS}, got {grad!r}")
    return Parallelized(model, comm, spec, grad, planner, check_inputs)


class Parallelized:
    """A model that was parallelized; `undo`, or the end of a ``with`` block, takes everything back.

    plans: of the batch shapes seen so far. A copy of the model is parallelized too, with plans of its own.
    """

    def __init__(
        self, model: nn.Module, comm: Comm, spec: Spec, grad: str, planner: MakeStagePlan, check_inputs: bool
    ) -> None:
        self.model, self.comm, self.spec, self.grad = model, comm, spec, grad
        self.planner, self.check_inputs = planner, check_inputs
        if any(isinstance(module.__dict__.get("forward"), (Replaced, Later)) for module in model.modules()):
            raise ValueError(f"{type(model).__name__} is parallelized already; undo that first")
        self.stages = spec.stages(model)
        self.names = [name for name, _ in self.stages]
        self.plans: dict[tuple[object, ...], StagePlan] = {}
        self._running, self._forwards = threading.local(), 0
        self._seen: set[object] = set()  # batch shapes of which a forward was run, in training and not
        _check_modules(model, spec, self.names)
        for name, block in self.stages:
            _check_block(model.get_submodule(name), name, block)
        self._modules = list(model.modules())
        self._replaced = [Replaced(model, "", self._forward, again=self._again)]
        for name, block in self.stages:
            self._replaced.append(Replaced(model.get_submodule(name), name, partial(self._stage, block=block)))
        if spec.exit is not None:
            self._replaced.append(Replaced(model.get_submodule(spec.exit.module), spec.exit.module, self._exit))
        self._hooks = [
            module.register_forward_pre_hook(Hook(partial(self._outside, name=name)))
            for name, module in model.named_modules()
            if _matches(name, spec.outside) and any(True for _ in module.parameters(recurse=False))
        ]

    def _again(self, model: nn.Module) -> Parallelized:
        """A copy of the model, parallelized alike."""
        return Parallelized(model, self.comm, self.spec, self.grad, self.planner, self.check_inputs)

    def undo(self) -> None:
        """Give the model its own forwards back."""
        while self._replaced:
            self._replaced.pop().undo()
        while self._hooks:
            self._hooks.pop().remove()

    def __enter__(self) -> Parallelized:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def describe(self) -> str:
        """The plans of all batch shapes so far."""
        return "\n".join(plan.describe() for plan in self.plans.values())

    # --- forwards -----------------------------------------------------------------------------------------------------

    def _forward(self, model: nn.Module, name: str, inner: Callable[..., Any], given: dict[str, Any]) -> Any:
        self._agree(given)
        space = Space(self.spec.dims(model, given), self.comm)
        run = ForwardState(space, self.names, torch.is_grad_enabled(), self._forwards)
        self._forwards += 1
        stack = self._stack()
        stack.append(run)
        try:
            out = inner(**given)
        finally:
            stack.pop()
        if run.first:
            self._check_changed(run)
        self._seen.add((run.key, self.model.training))
        if not run.left:
            missing = self.names[run.count] if run.count < len(self.names) else self.spec.exit and self.spec.exit.module
            raise NotImplementedError(f"a forward of {type(model).__name__} ended without {missing}; its spec has it")
        return out

    def _stage(
        self, module: nn.Module, name: str, inner: Callable[..., Any], given: dict[str, Any], *, block: Block
    ) -> Any:
        first = given.get(next(iter(block.stream)))
        step = self._step(module, name, first)
        if not step.first:
            return run_stage(module, block, inner, step, given, self.grad)
        changed: dict[str, Tensor] = {}
        with NoDraws(name, self.comm), noting_changes(module, name, changed):
            out = run_stage(module, block, inner, step, given, self.grad)
        if torch._C._current_graph_task_id() == -1:
            run = self._current(name)
            run.changed |= changed
            run.uneven += changed if step.parts > 1 or skipping(block, step) else []
        return out

    def _exit(self, module: nn.Module, name: str, inner: Callable[..., Any], given: dict[str, Any]) -> Any:
        run, exit = self._current(name), self.spec.exit
        assert exit is not None
        if run.count < len(self.names) or run.left or run.plan is None:
            raise NotImplementedError(f"{name} is called after {run.count} of {len(self.names)} stages, or twice")
        run.left = True
        (x,) = given.values()
        end = run.end(exit)
        run.grid.check(x, exit.form, end, f"the input of {name}")
        return run.grid.end([inner(**given)], [exit.form], end, self.grad)[0]

    def _outside(self, module: nn.Module, _: object, *, name: str) -> None:
        stack = self._stack()
        counted = stack and stack[-1].count and not (stack[-1].left and self.grad == "sum")
        if counted and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{name} is called after the first stage, where its parameters' gradients would count once for each "
                'rank; list it under between if it works row by row, or use grad="sum" if it comes after the exit'
            )

    # --- where a forward is -------------------------------------------------------------------------------------------

    def _stack(self) -> list[ForwardState]:
        found: list[ForwardState] | None = getattr(self._running, "stack", None)
        if found is None:
            found = self._running.stack = []
        return found

    def _current(self, name: str) -> ForwardState:
        stack = self._stack()
        if not stack or torch._C._current_graph_task_id() != -1:
            raise RuntimeError(f"{name} is called outside a forward of its {type(self.model).__name__}")
        return stack[-1]

    def _step(self, module: nn.Module, name: str, x: object) -> StageRun:
        """How a stage is run now; where it is recomputed in backward, as it was run then."""
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} got {x!r:.100} where its spec says the rows are")
        storage = x.untyped_storage()
        if torch._C._current_graph_task_id() != -1:
            step = getattr(storage, "_seqpar_dsp", {}).get((id(self), name))
            if step is None:
                raise RuntimeError(
                    f"{name} is recomputed from an input that is not the memory of the first time; checkpoint each "
                    "stage by itself, and without moving its input elsewhere"
                )
            return step  # type: ignore[no-any-return]
        run = self._current(name)
        if run.plan is None:
            run.follow(*self._plan(run.space, x, run.training))
            run.first = (run.key, self.model.training) not in self._seen
        step = run.next(name, self.spec.exit)
        if not hasattr(storage, "_seqpar_dsp"):
            storage._seqpar_dsp = {}  # type: ignore[attr-defined]
        storage._seqpar_dsp[id(self), name] = step  # type: ignore[attr-defined]
        return step

    # --- plans --------------------------------------------------------------------------------------------------------

    def _plan(self, space: Space, x: Tensor, training: bool) -> tuple[tuple[object, ...], StagePlan]:
        """What names a batch shape, and its plan. x: the first stage's input, whole."""
        key = (tuple(space.dims.items()), x.numel(), x.dtype, training)
        if key not in self.plans:
            width = x.numel() // _tokens(self.stages[0][1], space)
            stages = [self._stage_of(name, block, space, width, x.element_size()) for name, block in self.stages]
            stages[0] = replace(stages[0], rest=None)  # what comes in is whole
            end: Sequence[Sharding] = (None,) if self.spec.exit is None else self.spec.exit.rest
            plan = self.planner(stages, space.dims, space.comm.size, end=end, training=training)
            afters = plan.afters if self.spec.exit else [*plan.afters[:-1], None]  # the last one's output is the end
            with agreement("planning of stages", self.comm) as call:
                for stage, choice, after in zip(stages, plan.choices, afters, strict=True):
                    if choice.parts != 1:  # or an error that says which it cannot be run in
                        plan.costs.through(stage, 0.0, choice.before, choice.layout, after, choice.parts)
                choices = [tuple(choice) for choice in plan.choices]
                call.facts = {"grid": (plan.costs.core, plan.costs.held), "choices": choices, "end": plan.end}
            self.plans[key] = plan
        return key, self.plans[key]

    def _stage_of(self, name: str, block: Block, space: Space, width: int, element: int) -> Stage:
        tokens = _tokens(block, space)
        size = tokens * width * element * len(block.stream)
        module = self.model.get_submodule(name)
        matrices = sum(p.numel() for p in module.parameters() if p.dim() > 1)
        mixed = prod(space.dims[dim] for dim in block.whole)
        heads, kv_heads = (block.core.count(module),) * 2 if block.core else (block.heads, block.kv_heads)
        return Stage(
            name, frozenset(block.whole), bytes=size, flops=2.0 * matrices * tokens,
            attention=4.0 * tokens * mixed * width if block.whole else 0.0, heads=heads, kv_heads=kv_heads,
            qkv=(size, 2 * size * kv_heads / heads) if heads else (0.0, 0.0), ring=block.attention,
            filled=bool(block.core and block.core.sdpa),
            # a module inside that gathers its weights would do so for each part, and some ranks skip parts
            apart=frozenset() if gathered_within(module) else _apart(block) & space.dims.keys(),
            # code that is not ours cannot work on no rows
            rest=None if block.rest is None else frozenset(block.rest), rest_filled=True,
        )  # fmt: skip

    def _agree(self, given: Mapping[str, Any]) -> None:
        """Ranks make the same call, and nothing in it is active that must not be."""
        error: Exception | None = None
        facts: dict[str, object] = {}
        try:
            self._check_changes()
            for name, value in leaves(given):
                facts[name] = self._fact(value) if isinstance(value, Tensor) else value
            if self.check_inputs and not self._forwards:
                facts["weights"] = weights_of(self.model)
            facts |= {"grad enabled": torch.is_grad_enabled(), "training": self.model.training, "grad": self.grad}
        except Exception as found:
            error = found
        if self.comm.size > 1:
            self.comm.agree(f"a forward of {type(self.model).__name__}", facts, error)
        elif error is not None:
            raise error

    def _fact(self, x: Tensor) -> tuple[object, ...]:
        return tuple(x.shape), x.dtype, x.requires_grad, ordered(x) if self.check_inputs else None

    def _check_changed(self, run: ForwardState) -> None:
        """Raise for buffers that a forward changed otherwise than one process does."""
        error: Exception | None = None
        if run.uneven:
            error = NotImplementedError(
                f"{run.uneven[:4]} change in a forward, which each rank must make once: plan these stages in one part "
                "(parts=(1,)) and with rows for all ranks, or change them outside of stages"
            )
        facts = {"buffers that stages changed": {n: hashed(x) for n, x in run.changed.items() if self.check_inputs}}
        if self.comm.size > 1:
            self.comm.agree(f"a forward of {type(self.model).__name__}", facts, error)
        elif error is not None:
            raise error

    def _check_changes(self) -> None:
        """Raise for modules that were changed since, and for dropout that is active."""
        modules = list(self.model.modules())
        if len(modules) != len(self._modules) or any(a is not b for a, b in zip(modules, self._modules)):
            _check_replaced(self.model, self.spec, self._replaced, self._modules)
            self._modules = modules
        for module in modules:
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
                name = next(name for name, each in self.model.named_modules() if each is module)
                raise NotImplementedError(
                    f"{name or 'the model'} is dropout with p={module.p} in training, which would draw other "
                    "numbers for a shard than for the whole; set its p to 0"
                )


def _apart(block: Block) -> frozenset[str]:
    """Dimensions along which a block can be run in parts: none of its rows looks at others along them.

    An attention with a plan draws its dropout by the place of a row in all of them, so it sees them all.
    """
    forms = [set(form_of(form).names) for form in block.stream.values()]
    seen = {dim for _, dims in block.gathers.values() for dim in dims}
    return frozenset() if block.attention else frozenset(set.intersection(*forms) - set(block.whole) - seen)


def _tokens(block: Block, space: Space) -> int:
    form = form_of(next(iter(block.stream.values())))
    return prod(space.dims[name] for name in form.names if name in space.dims)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) or name.startswith(pattern + ".") for pattern in patterns)


def _check_block(module: nn.Module, name: str, block: Block) -> None:
    """Raise for arguments, tables and modules of a block that the module does not have."""
    has = list(inspect.signature(module.forward).parameters)
    if missing := [each for each in (*block.stream, *block.rows, *block.shared) if each not in has]:
        raise ValueError(f"{name} takes {has}, and not {missing}, which its spec lists")
    tables = {path for path, _ in (*module.named_parameters(), *module.named_buffers())}
    parts = {path for path, _ in module.named_modules()}
    inside = {*block.gathers, *([block.core.module] if block.core else [])}
    if missing := sorted((set(block.buffers) - tables) | (inside - parts)):
        raise ValueError(f"{name} has no {missing}, which its spec lists")


def _check_replaced(model: nn.Module, spec: Spec, replaced: Sequence[Replaced], before: Sequence[nn.Module]) -> None:
    """Raise for a model that lost a module that was parallelized, or got one that its spec does not account for."""
    names = {id(module): name for name, module in model.named_modules()}
    for each in replaced:
        if id(each.module) not in names:
            raise ValueError(
                f"a {type(each.module).__name__} of {type(model).__name__} was taken out after the model was "
                "parallelized; undo that first"
            )
    accounted = {id(part) for each in replaced[1:] for part in each.module.modules()}
    accounted |= {
        id(module) for name, module in model.named_modules() if _matches(name, (*spec.between, *spec.outside))
    }
    known = {id(module) for module in before} | accounted
    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)) and id(module) not in known:
            raise ValueError(
                f"{names[id(module)]} of {type(model).__name__} was put in after the model was parallelized; undo that "
                "first"
            )
        if isinstance(module, MIXING) and not _matches(names[id(module)], spec.outside):
            _refuse_mixing(names[id(module)], model, module)


def _refuse_mixing(name: str, model: nn.Module, module: nn.Module) -> NoReturn:
    raise NotImplementedError(
        f"{name} of {type(model).__name__} is a {type(module).__name__}, whose statistics mix rows"
    )


def _check_modules(model: nn.Module, spec: Spec, stages: Sequence[str]) -> None:
    """Raise for modules and tensors that the spec does not account for, and for those that mix rows unseen."""
    what = type(model).__name__
    known = (*stages, *spec.between, *spec.outside, *([spec.exit.module] if spec.exit else []))
    names = {name for name, _ in model.named_modules()}
    if missing := [name for name in known if name not in names and not any(c in name for c in "*?[")]:
        raise ValueError(f"{what} has no {missing}, which its spec lists")
    for name, module in model.named_modules():
        own = [n for n, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]
        if name == "":
            if unlisted := [n for n in own if n not in spec.own]:
                raise ValueError(f"{what} has {unlisted} of its own, of which its spec says nothing")
        elif own and not _matches(name, known):
            raise ValueError(
                f"{name} of {what} is a {type(module).__name__} in no stage, not between them and not outside: its "
                "spec says nothing of it"
            )
        if isinstance(module, MIXING) and not _matches(name, spec.outside):
            _refuse_mixing(name, model, module)


# by their arguments these may be without dropout
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
    """A block in which functions that draw random numbers are refused, on all ranks. name: of what is inside."""

    def __init__(self, name: str, comm: Comm) -> None:
        super().__init__()
        self.name, self.comm = name, comm

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWS or (func in _DROPOUT and _active(func, args, kwargs)):
            what = f"{self.name} calls {func.__name__}, which would draw other numbers for a shard than for the whole"
            raise_on_all_ranks(
                what, self.comm, NotImplementedError(f"{what}; do without, or draw outside of the stages")
            )
        return func(*args, **kwargs)


def _active(func: Any, args: Any, kwargs: Any) -> bool:
    if func is F.scaled_dot_product_attention:  # which has no signature
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    return bool(given["training"] and given.get("p", given.get("dropout_p", 1.0)))


@contextmanager
def noting_changes(module: nn.Module, name: str, found: dict[str, Tensor]) -> Iterator[None]:
    """A block after which `found` has the module's buffers that were written to in it, by their names in the model."""
    buffers = {path: x for path, x in module.named_buffers() if not x.is_inference()}  # those count no versions
    before = {path: x._version for path, x in buffers.items()}
    yield
    found |= {f"{name}.{path}": x for path, x in buffers.items() if x._version != before[path]}
