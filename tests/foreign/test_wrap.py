"""Forwards in place of modules' own: what is put back, what copies have, and which are inactive when."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from seqpar import LocalComm
from seqpar.foreign.wrap import ParallelModel, is_surrounded, refuse_unready, replaced


class Doubling(nn.Module):
    """x * 2, by a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1, bias=False)
        nn.init.constant_(self.inner.weight, 2.0)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.inner(x) * scale


def plus_one(module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Tensor:
    return forward(*args, **kwargs) + 1


def parallel() -> tuple[Doubling, ParallelModel]:
    model = Doubling()
    handle = ParallelModel(model, LocalComm())
    handle.put_around(model, plus_one)
    handle.put_around(model.inner, plus_one)
    return model, handle


X = torch.ones(1, 1)


def test_attributes_of_an_instance_and_of_its_class_are_put_back() -> None:
    module = nn.Linear(1, 1)
    module.kind = "own"
    with replaced(module, {"kind": "other", "forward": abs, "training": False, "new": 1}):
        assert (module.kind, module.forward, module.training, module.new) == ("other", abs, False, 1)
    assert module.kind == "own" and module.training
    assert not {"forward", "new"} & module.__dict__.keys()


def test_what_others_put_there_meanwhile_stays() -> None:
    module = nn.Linear(1, 1)
    with pytest.raises(KeyError), replaced(module, {"forward": abs, "extra_repr": str}):
        module.forward = len  # type: ignore[method-assign, assignment]
        raise KeyError
    assert module.forward is len and "extra_repr" not in module.__dict__


def test_a_forward_has_something_around_it_until_undo_and_not_inside_local() -> None:
    model, handle = parallel()
    assert model(X, scale=3.0).item() == 10
    with pytest.raises(KeyError), handle.local():
        with handle.local():
            assert model(X).item() == 2
        assert model(X).item() == 2
        raise KeyError
    assert model(X).item() == 4
    with handle:
        pass
    assert model(X).item() == 2
    assert "forward" not in model.__dict__ | model.inner.__dict__


def test_a_forward_in_place_takes_what_the_own_one_takes() -> None:
    model, _ = parallel()
    assert str(inspect.signature(model.forward)) == str(inspect.signature(Doubling().forward))


def test_a_copy_has_the_same_around_its_own_forward_whatever_the_first_does() -> None:
    model, handle = parallel()
    twin = copy.deepcopy(model)
    nn.init.constant_(twin.inner.weight, 5.0)
    handle.undo()
    assert (model(X).item(), twin(X).item()) == (2, 7)


def test_a_copy_is_alone_inside_local_as_the_first_is() -> None:
    model, handle = parallel()
    twins = copy.deepcopy(model), copy.deepcopy(copy.deepcopy(model))
    for twin in twins:
        with handle.local():
            assert (twin(X).item(), is_surrounded(twin)) == (2, False)
        assert (twin(X).item(), is_surrounded(twin)) == (4, True)
        with pytest.raises(ValueError, match="Doubling is a copy of a parallel model"):
            refuse_unready(twin)
    with handle.local():
        handle.undo()
        assert [twin(X).item() for twin in twins] == [2, 2]
    assert [twin(X).item() for twin in twins] == [4, 4], "undo does not reach copies"
    with handle.local():
        assert [twin(X).item() for twin in twins] == [2, 2]
    first = weakref.ref(model)
    del model, handle
    gc.collect()
    assert first() is None and [twin(X).item() for twin in twins] == [4, 4]


def test_an_exporter_is_told_to_undo() -> None:
    model, handle = parallel()
    for exported in (lambda: torch.jit.script(model), lambda: torch.export.export(model, (X,))):
        with pytest.raises(Exception, match=r"a parallel Doubling: __\w+__: .*; undo\(\) first"):
            exported()
    assert not hasattr(model.forward, "__code__") and list(inspect.signature(model.forward).parameters) == [
        "x",
        "scale",
    ]
    handle.undo()
    assert torch.export.export(model, (X,)).module()(X).item() == model(X).item()


def test_a_lazy_module_is_run_before_it_is_made_parallel() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    with pytest.raises(ValueError, match="LazyLinear, 1, has no weights before its first forward; run the model once"):
        refuse_unready(model)
    model(torch.ones(1, 2))
    refuse_unready(model)


def test_a_wrapper_of_others_calls_the_own_forward_after_undo() -> None:
    model, handle = parallel()
    ours = model.forward
    model.forward = lambda x: ours(x) * 10  # type: ignore[method-assign]
    handle.undo()
    assert model(X).item() == 20


class Hooks(NamedTuple):
    """Hooks of a library that surround a forward, and times ten what it returns."""

    put: Callable[[nn.Module], object]
    take: Callable[[nn.Module], object]


def hooks_of(library: str) -> Hooks:
    ten = {"post_forward": lambda self, module, out: out * 10}
    if library == "accelerate":
        hooks = pytest.importorskip("accelerate.hooks")
        kind = type("Ten", (hooks.ModelHook,), ten)
        return Hooks(lambda module: hooks.add_hook_to_module(module, kind()), hooks.remove_hook_from_module)
    hooks = pytest.importorskip("diffusers.hooks")
    if library == "diffusers, in its place":
        ten = {"new_forward": lambda self, module, x: self.fn_ref.original_forward(x) * 10}
    kind = type("Ten", (hooks.ModelHook,), ten)
    registry = hooks.HookRegistry.check_if_exists_or_initialize
    return Hooks(
        lambda module: registry(module).register_hook(kind(), "ten"), lambda module: registry(module).remove_hook("ten")
    )


LIBRARIES = ["accelerate", "diffusers", "diffusers, in its place"]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("before", [True, False])
def test_hooks_of_others_may_come_before_and_be_taken_off_and_put_on_again(library: str, before: bool) -> None:
    model, hooks = nn.Identity(), hooks_of(library)
    if before:
        hooks.put(model)
    handle = ParallelModel(model, LocalComm())
    handle.put_around(model, plus_one)
    if not before:
        hooks.put(model)
    for _ in range(2):
        with pytest.raises(ValueError, match="parallel already"):
            refuse_unready(model)
        assert model(X).item() == 20 and is_surrounded(model)
        hooks.take(model)
        assert model(X).item() == 2 and is_surrounded(model)
        hooks.put(model)
    handle.undo()
    refuse_unready(model)
    assert model(X).item() == 10 and not is_surrounded(model)
    hooks.take(model)
    assert model(X).item() == 1


@pytest.mark.parametrize("library", LIBRARIES)
def test_undo_is_exact_below_the_hooks_of_others(library: str) -> None:
    model, hooks = nn.Identity(), hooks_of(library)
    hooks.put(model)
    before = vars(model).copy()
    with ParallelModel(model, LocalComm()) as handle:
        handle.put_around(model, plus_one)
    assert vars(model) == before and model(X).item() == 10


def test_hooks_of_two_libraries_go_in_any_order() -> None:
    model, several = nn.Identity(), [hooks_of(library) for library in LIBRARIES[:2]]
    for hooks in several:
        hooks.put(model)
    handle = ParallelModel(model, LocalComm())
    handle.put_around(model, plus_one)
    assert model(X).item() == 200
    for hooks in several[::-1]:
        hooks.take(model)
    assert model(X).item() == 2


def test_a_wrapper_of_others_that_drops_what_is_around_a_forward_is_seen() -> None:
    model, handle = parallel()
    ours = model.forward
    for wrapper in (lambda x: ours(x), partial(ours), Calling(ours), partial(Calling, ours), MethodType(ours, model)):
        model.forward = wrapper  # type: ignore[method-assign]
        assert is_surrounded(model)
    for other in (partial(Doubling.forward, model), abs, ours.forward):
        model.forward = other  # type: ignore[method-assign]
        assert not is_surrounded(model)
    model.forward = ours  # type: ignore[method-assign]
    with handle.local():
        assert not is_surrounded(model)


class Calling:
    """An object that calls a function."""

    def __init__(self, function: Any) -> None:
        self.function = function


def test_a_forward_that_was_bound_to_its_module_takes_it_no_second_time() -> None:
    model, handle = parallel()
    model.forward = MethodType(model.forward, model)  # type: ignore[method-assign]
    assert model(X).item() == 4
    with handle.local():
        assert model(X).item() == 2


def test_a_model_is_parallel_once_and_has_no_pickle() -> None:
    model, handle = parallel()
    with pytest.raises(ValueError, match=r"Linear in Sequential is parallel already; call undo\(\)"):
        refuse_unready(nn.Sequential(model.inner))
    with pytest.raises(NotImplementedError, match="a parallel Doubling"):
        pickle.dumps(model)
    handle.undo()
    refuse_unready(model)
    assert pickle.loads(pickle.dumps(model))(X).item() == 2
