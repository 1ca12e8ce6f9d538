"""Forwards in place of modules' own: what is put back, what copies have, and who is asleep when."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seqpar import LocalComm
from seqpar.nn.wrap import ParallelModel, refuse_unready, replaced


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


def test_a_model_is_parallel_once_and_has_no_pickle() -> None:
    model, handle = parallel()
    with pytest.raises(ValueError, match=r"Linear in Sequential is parallel already; call undo\(\)"):
        refuse_unready(nn.Sequential(model.inner))
    with pytest.raises(NotImplementedError, match="a parallel Doubling"):
        pickle.dumps(model)
    handle.undo()
    refuse_unready(model)
    assert pickle.loads(pickle.dumps(model))(X).item() == 2
