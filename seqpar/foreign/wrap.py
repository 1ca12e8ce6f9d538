"""Replace a module's forward and undo it; and the base class of handles on parallel models.

    model(x)   as it was       forward(x)
               parallel        ForwardWrapper -> around(module, forward, x)
               inside local()  ForwardWrapper -> forward(x)
               undone          forward(x); an unknown wrapper put on meanwhile keeps ours, which calls forward(x)

Parameters, buffers, hooks and the state dict stay as they are, so optimizers and wrappers keep the same model. Hooks of
accelerate and diffusers stay outside of the wrapper, whether they came before it or after, and may be taken off.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial, update_wrapper
from types import MethodType
from typing import Any, TypeVar
from weakref import ref

from torch import nn
from torch.nn.parameter import UninitializedTensorMixin

from seqpar.comm import Comm
from seqpar.comm.entry import on_one_rank
from seqpar.private.accelerate import below_hook as below_accelerate
from seqpar.private.diffusers import below_hook as below_diffusers

PARALLEL = "_seqpar"  # an attribute that marks other modules with a parallel forward
INSIDE = 64  # objects in the wrappers of a module that are looked into
_ABSENT = object()
Model = TypeVar("Model", bound="ParallelModel")


@contextmanager
def replaced(module: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Give a module other instance attributes until the block ends; attributes that others replaced since stay."""
    own = {name: module.__dict__.get(name, _ABSENT) for name in attributes}
    module.__dict__.update(attributes)
    try:
        yield
    finally:
        for name, value in attributes.items():
            if module.__dict__.get(name, _ABSENT) is not value:
                continue
            if own[name] is _ABSENT:
                del module.__dict__[name]
            else:
                module.__dict__[name] = own[name]


class ForwardWrapper:
    """A module's forward, replaced by ``around(module, forward, *args, **kwargs)``.

    handle: while it is inactive, calls go to the forward alone. A copy of the module has the same around its own
    forward. A part of a copy of the whole model has no handle: `undo` does not reach it, and `local` of the handle that
    it was copied under does.
    """

    copied_under: ref[ParallelModel] | None = None

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], around: Callable[..., Any],
        handle: ParallelModel | None = None, method: str = "forward",
    ) -> None:  # fmt: skip
        self.module, self.forward, self.around, self.handle = module, forward, around, handle
        self.method, self.written = method, getattr(type(module), method, None)
        update_wrapper(self, forward, updated=())  # for code that inspects the signature

    @property
    def inactive(self) -> bool:
        """Whether calls go to the forward alone."""
        if self.handle is not None:
            return self.handle.inactive
        first = None if self.copied_under is None else self.copied_under()
        return first is not None and first.alone

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        if args and isinstance(args[0], type(self.module)):  # bound to it once more, as by accelerate's unwrap_model
            if args[0] is not self.module:
                raise NotImplementedError(
                    f"a copy of a parallel {type(self.module).__name__} calls the forward of the original, which "
                    "accelerate has bound to it under mixed precision, and would compute with other weights"
                )
            args = args[1:]
        if self.inactive:
            return self.forward(*args, **kwargs)
        if getattr(type(self.module), self.method, None) is not self.written:
            raise NotImplementedError(
                f"{type(self.module).__name__}, whose class has another {self.method} than when it was made parallel: "
                "it would not run; call undo() of the handle and make the model parallel again"
            )
        return self.around(self.module, self.forward, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Raise, with a word for what asks for the code of a forward: `torch.export` and `torch.jit.script`."""
        why = "no such attribute"
        if name in ("__code__", "__globals__"):
            why = "its forward sends messages, which no exporter of graphs takes; undo() first"
        raise AttributeError(f"a parallel {type(self.__dict__.get('module')).__name__}: {name}: {why}")

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardWrapper:
        module, forward = copy.deepcopy(self.module, memo), copy.deepcopy(self.forward, memo)
        twin = ForwardWrapper(module, forward, self.around, self.handle, self.method)
        twin.copied_under = self.copied_under
        if self.handle is not None and id(self.handle.model) in memo:
            twin.handle, twin.copied_under = None, ref(self.handle)
        return twin

    def __reduce__(self) -> Any:
        """Raise: a pickled `ForwardWrapper` would be useless."""
        whole = self.module if self.handle is None else self.handle.model
        raise unpicklable(type(whole).__name__)


class ParallelModel:
    """A model whose forwards run on all ranks of a comm, until `undo` or the end of a ``with`` block.

    model, comm: as given to `seqpar.parallelize`. inactive: whether forwards are currently the model's own. alone:
    whether they are in a block of `local`, also those of copies.
    """

    def __init__(self, model: nn.Module, comm: Comm) -> None:
        self.model, self.comm, self.inactive, self.alone, self._over = model, comm, False, False, False
        self._undone, self._arounds = ExitStack(), list[ForwardWrapper]()

    def put_around(self, module: nn.Module, around: Callable[..., Any], method: str = "forward") -> None:
        """Replace the forward of a module of the model, or another method: see `ForwardWrapper`."""
        *_, (owner, name) = places_of(module, method)
        own, around = vars(owner).get(name, _ABSENT), ForwardWrapper(module, getattr(owner, name), around, self, method)
        vars(owner)[name] = around
        self._arounds.append(around)
        self._undone.callback(_take_off, around, owner, own)

    def on_undo(self, do: Callable[[], object]) -> None:
        """Have something done when the model is restored."""
        self._undone.callback(do)

    def undo(self) -> None:
        """Restore the model. A second call does nothing.

        Wrappers that were put around a forward meanwhile stay, and call the original forward.
        """
        self.inactive = self._over = True
        self._undone.close()

    @contextmanager
    def local(self) -> Iterator[None]:
        """Inside, the model and its copies are as before, on this rank alone."""
        before = self.inactive, self.alone
        self.inactive = self.alone = True
        on_one_rank.open, on_one_rank.begun = on_one_rank.open + 1, on_one_rank.begun + 1
        try:
            yield
        finally:
            on_one_rank.open -= 1
            self.inactive, self.alone = before[0] or self._over, before[1]

    @contextmanager
    def reactivated(self) -> Iterator[None]:
        """Inside, the model is parallel even if it was restored: for checkpoints of a forward before that."""
        if not self.inactive:
            yield
            return
        with ExitStack() as stack:
            stack.callback(setattr, self, "inactive", self.inactive)
            self.inactive = False
            for around in self._arounds:
                if not is_surrounded(around.module):
                    *_, (owner, name) = places_of(around.module, around.method)
                    stack.enter_context(replaced(owner, {name: around}))
            yield

    def __enter__(self: Model) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def places_of(module: nn.Module, method: str = "forward") -> Iterator[tuple[Any, str]]:
    """The objects that keep a module's method, each with the attribute's name: the module, then hooks, outermost first.

    Hooks of accelerate and diffusers keep the method that they surround, and put it back when they are taken off.
    """
    owner, name = module, method
    yield owner, name
    while (function := getattr(vars(owner).get(name), "func", None)) is not None:
        below = below_accelerate(function, module, name) or below_diffusers(function)
        if below is None:
            return
        owner, name = below
        yield below


def _take_off(around: ForwardWrapper, owner: object, own: object) -> None:
    """Put back a module's own method, wherever hooks keep the wrapper by now. owner, own: where it was, and before."""
    for place, name in places_of(around.module, around.method):
        if vars(place).get(name) is around:
            if place is owner and own is _ABSENT and name == around.method:
                del vars(place)[name]
            else:
                vars(place)[name] = around.forward


def is_surrounded(module: nn.Module) -> bool:
    """Whether calls of a module reach an `ForwardWrapper` that is awake, as far as its wrappers can be looked into."""
    forwards = [vars(owner).get(name) for owner, name in places_of(module)]
    return reaches(forwards, lambda each: isinstance(each, ForwardWrapper) and not each.inactive)


def reaches(functions: list[Any], wanted: Callable[[Any], bool]) -> bool:
    """Whether a function or what it holds is wanted: its closure, defaults, and attributes, as far as `INSIDE` go."""
    due, seen = functions, set[int]()
    while due:
        wrapper = due.pop(0)
        if wanted(wrapper):
            return True
        if id(wrapper) not in seen and len(seen) < INSIDE and not isinstance(wrapper, (nn.Module, type)):
            seen.add(id(wrapper))
            due += _inside(wrapper)
    return False


def _inside(wrapper: Any) -> list[Any]:
    """What a wrapper may call: its function, what that closes over, its defaults, and its attributes."""
    if isinstance(wrapper, ForwardWrapper):
        return [wrapper.forward]
    if isinstance(wrapper, partial):
        return [wrapper.func, *wrapper.args, *wrapper.keywords.values()]
    if isinstance(wrapper, MethodType):
        return [wrapper.__func__, wrapper.__self__]
    found: list[Any] = []
    for cell in getattr(wrapper, "__closure__", None) or ():
        with suppress(ValueError):  # of a name that has no value yet
            found.append(cell.cell_contents)
    found += getattr(wrapper, "__defaults__", None) or ()
    found += (getattr(wrapper, "__kwdefaults__", None) or {}).values()
    return [*found, *getattr(wrapper, "__dict__", {}).values()]


def refuse_unready(model: nn.Module) -> None:
    """Raise ValueError if the model or a module in it is parallel already, or has parameters that have no shape yet."""
    for name, module in model.named_modules():
        if any(isinstance(p, UninitializedTensorMixin) for p in module.parameters(recurse=False)):
            raise ValueError(
                f"{type(module).__name__}, {name or 'the model'}, has no weights before its first forward; "
                "run the model once, then make it parallel"
            )
    for module in model.modules():
        forwards = [vars(owner).get(name) for owner, name in places_of(module)]
        arounds = [each for each in forwards if isinstance(each, ForwardWrapper)]
        if not arounds and PARALLEL not in vars(module):
            continue
        kind, whole = type(module).__name__, type(model).__name__
        within = "" if kind == whole else f" in {whole}"
        if any(each.copied_under is not None for each in arounds):
            raise ValueError(
                f"{kind}{within} is a copy of a parallel model, and its forward stays parallel; copy a model "
                "before it is parallel or after undo(), or load the copy's state_dict() into a new one"
            )
        raise ValueError(f"{kind}{within} is parallel already; call undo() of that handle first")


def check_makes_plans(model: nn.Module, plan: object, takes: str) -> None:
    """Raise TypeError for a ``plan=`` that is not a function."""
    if not callable(plan):
        raise TypeError(
            f"parallelize({type(model).__name__}, plan={plan!r:.200}): batches differ, so each is planned when "
            f"it comes; give a function of {takes}"
        )


def unpicklable(name: str) -> NotImplementedError:
    """The error for pickling a parallel model, whose forward holds a comm of this process."""
    return NotImplementedError(
        f"a parallel {name} cannot be pickled, as by torch.save(model): its forward belongs to this process; save "
        "model.state_dict() or call save_pretrained(), or undo() first"
    )
