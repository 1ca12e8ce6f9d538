"""Functions of torch that draw random numbers are known, and what stands for them in trials draws none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from seqpar.trial.randomness import active_dropout, draws, undrawn

X, HALF = torch.linspace(-1, 1, 24).view(2, 3, 4), torch.full((2, 3, 4), 0.5)
NAMES = "uniform_ normal_ random_ exponential_ geometric_ log_normal_ cauchy_ bernoulli_"
METHODS = {name: lambda name=name: getattr(X.clone(), name)(*[0.5][: name == "geometric_"]) for name in NAMES.split()}
DROPOUTS = ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
DRAWS: dict[str, Callable[[], Any]] = {
    **METHODS,
    **{name: lambda name=name: getattr(torch, name)(X.clone(), 0.5, True) for name in DROPOUTS},
    **{f"{name}_": lambda name=name: getattr(torch, f"{name}_")(X.clone(), 0.5, True) for name in DROPOUTS},
    **{f"F.dropout{n}d": lambda n=n: getattr(F, f"dropout{n}d")(X[(None,) * (n - 1)], 0.5) for n in (1, 2, 3)},
    **{f"F.{name}": lambda name=name: getattr(F, name)(X, 0.5, training=True) for name in DROPOUTS if hasattr(F, name)},
    "rand": lambda: torch.rand(3), "rand_like": lambda: torch.rand_like(X), "randn": lambda: torch.randn(3),
    "randn_like": lambda: torch.randn_like(X), "randint": lambda: torch.randint(9, (8,)),
    "randint_like": lambda: torch.randint_like(X, 99), "randperm": lambda: torch.randperm(20),
    "normal": lambda: torch.normal(X, HALF), "bernoulli": lambda: torch.bernoulli(HALF),
    "Tensor.bernoulli": lambda: HALF.bernoulli(), "multinomial": lambda: torch.multinomial(HALF[0], 2),
    "Tensor.multinomial": lambda: HALF[0].multinomial(2), "poisson": lambda: torch.poisson(9 * HALF),
    "binomial": lambda: torch.binomial(9 * HALF, HALF), "rrelu": lambda: F.rrelu(X, training=True),
    "gumbel_softmax": lambda: F.gumbel_softmax(X), "gumbel_softmax by place": lambda: F.gumbel_softmax(X, 2.0, True),
}  # fmt: skip


class Mode(TorchFunctionMode):
    def __init__(self, take: bool) -> None:
        super().__init__()
        self.take, self.drew = take, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.drew |= draws(func, args, kwargs or {})
        return undrawn(func, args, kwargs or {}) if self.take else func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_known_and_something_equal_stands_for_it(name: str) -> None:
    with torch.random.fork_rng(), Mode(False) as mode:
        DRAWS[name]()
    assert mode.drew
    with torch.random.fork_rng(), Mode(True):
        assert torch.equal(DRAWS[name](), DRAWS[name]())


def test_what_is_off_draws_nothing() -> None:
    calls: list[Callable[[], Tensor]] = [
        lambda: F.dropout(X, 0.5, training=False), lambda: F.dropout(X, 0.0), lambda: torch.dropout(X, 0.5, False),
        lambda: F.rrelu(X), lambda: F.scaled_dot_product_attention(X, X, X), lambda: X.softmax(-1),
    ]  # fmt: skip
    for call in calls:
        with Mode(False) as mode:
            call()
        assert not mode.drew
    with Mode(False) as mode:
        F.scaled_dot_product_attention(X, X, X, dropout_p=0.5)
    assert mode.drew


def test_an_active_dropout_is_named() -> None:
    model = nn.Sequential(nn.Dropout(0.0), nn.Sequential(nn.Dropout1d(0.25)))
    assert active_dropout(model.named_modules()) == "1.0 is dropout with p=0.25 in training"
    assert active_dropout(model.eval().named_modules()) == ""
