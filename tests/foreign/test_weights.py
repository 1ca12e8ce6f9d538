"""When ranks compare the weights of a model again."""

import gc
from weakref import ref

import torch
from torch import nn

from seqpar.foreign.weights import WeightChecks


def compares(checks: WeightChecks, model: nn.Module) -> bool:
    """Whether weights are compared before a forward, which all ranks begin."""
    with torch.no_grad():
        found = checks.weights(model, list(model.modules()))
        checks.passed()
    return found is not None


def test_weights_are_compared_again_when_modules_are_others() -> None:
    checks, model = WeightChecks(), nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert [compares(checks, model) for _ in range(3)] == [True, False, False]
    model.append(nn.Linear(2, 2))
    assert [compares(checks, model) for _ in range(2)] == [True, False]
    model[0] = nn.Linear(2, 2)
    assert [compares(checks, model) for _ in range(2)] == [True, False]


def test_checks_do_not_keep_a_model() -> None:
    checks, model = WeightChecks(), nn.Linear(2, 2)
    assert compares(checks, model)
    gone = ref(model)
    del model
    gc.collect()
    assert gone() is None
