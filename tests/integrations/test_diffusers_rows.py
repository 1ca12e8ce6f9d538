"""A rank's rows outside of blocks, and which blocks share a trial: equal to one process, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar import Comm
from seqpar.integrations.diffusers import parallelize
from tests.integrations.diffusers_verdicts import Setting, verdict
from tests.integrations.test_diffusers_blocks import FRAMES, ROWS, Block, D, alone, made, x
from tests.ranks import errors_on_copies

TWO = Setting(2, 2, False)


def attends(self: Block, h: Tensor) -> Tensor:
    return self.to_itself(h)


def mixes(self: Block, h: Tensor) -> Tensor:
    return self.to_itself(h) + h.mean(1, keepdim=True)


usual = partial(made, attends, alone, None)


def between(change: Callable[[Tensor], Tensor]) -> str:
    """The verdict on a model that changes the rows after each block."""
    return verdict(partial(usual, between=lambda some: (change(some[0]),)), TWO, parallelize)


def through_a_view(h: Tensor) -> None:
    h.view(h.shape[0], FRAMES, -1, D)[:, 0] = 0.0


WRITES: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "+=": ("exact", lambda h: h.__iadd__(1)),
    "mul_": ("exact", lambda h: h.mul_(2.0)),
    "+= into features": ("exact", lambda h: h[:, :, :4].__iadd__(1)),
    "masked_fill_": ("refused", lambda h: h.masked_fill_(h > 0, 0.0)),
    "a row": ("refused", lambda h: h.__setitem__((slice(None), slice(3)), 0.0)),
    "through a view": ("refused", through_a_view),
    "into some rows": ("refused", lambda h: h[:, 3:5].add_(1)),
    "into their transpose": ("refused", lambda h: h.transpose(1, 2).add_(1)),
    "into their data": ("refused", lambda h: h.data.add_(1)),
    "into a copy": ("exact", lambda h: h.reshape(-1).clone().add_(1)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
def test_what_code_between_blocks_writes_is_not_lost(name: str) -> None:
    expected, write = WRITES[name]

    def change(h: Tensor) -> Tensor:
        """The rows after a write into them, beside what was another name of them."""
        h = alike = h * 1
        write(h)
        return h * alike.cos()

    assert between(change).startswith(expected)


# what follows from all rows, and then meets the rows
STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "their mean": lambda h: h * h.mean((0, 1)),
    "their norm": lambda h: h / h.norm(),
    "the mean of each sample": lambda h: h + h.mean(1, keepdim=True),
    "a layer norm of them": lambda h: F.layer_norm(h, (D,), h.mean((0, 1)), h.std((0, 1))),
    "a layer of them": lambda h: F.linear(h, (h[0].mT @ h[0] / ROWS).tanh()),
    "another shape of them": lambda h: h.view_as(torch.empty(h.shape[0], 1, *h.shape[1:]))[:, 0] * 1,
    "a call by keyword": lambda h: torch.cat(tensors=[h, h], dim=1)[:, ROWS:],
}  # fmt: skip


@pytest.mark.parametrize("name", STATISTICS)
def test_gradients_are_right_where_what_all_rows_say_meets_the_rows(name: str) -> None:
    assert between(STATISTICS[name]) == "exact"


def test_rows_that_leave_a_forward_otherwise_than_by_its_result_are_refused() -> None:
    """Such as the features that a loss takes from a block by a hook: their gradient would be several times as large."""
    model, inputs = usual(2)

    def call(own: nn.Module, comm: Comm) -> None:
        kept = list[Tensor]()
        own.layers[0].register_forward_hook(lambda layer, args, out: kept.append(out))  # type: ignore[index,union-attr]
        own(**inputs)
        assert kept[0].shape == inputs["streams"][0].shape
        kept[0].square().mean()

    for error in errors_on_copies(model, call, blocks=("layers",)):
        assert "NotImplementedError: diffusers: a tensor of which each rank holds its rows is used outside" in error


class Mixing(Block):
    """A block that mixes rows if one of its attributes, or an argument, says so."""

    def __init__(self, shift: tuple[int, ...] = (-1,), scale: nn.Parameter | None = None) -> None:
        super().__init__(attends)
        self.shift = shift
        self.register_parameter("scale", scale)

    def forward(self, h: Tensor, options: Any = None) -> Tensor:
        all_ways = self.shift != (-1,), self.scale is not None, options is not None and options.mixed
        return super().forward(h) + (h.mean(1, keepdim=True) if any(all_ways) else 0)


def with_hook(block: Any) -> Any:
    block.proj.register_forward_hook(lambda layer, args, out: out - out.mean(1, keepdim=True))
    return block


def with_forward(block: Any) -> Any:
    plain = block.proj.forward
    block.proj.forward = lambda h: plain(h) + h.mean(1, keepdim=True)
    return block


def with_rule(block: Any) -> Any:
    block.rule = mixes
    return block


OTHERWISE: dict[str, tuple[Callable[[], Block], Callable[[], Block]]] = {
    "a function": (partial(Block, attends), partial(Block, mixes)),
    "a tuple": (Mixing, lambda: Mixing(shift=(-2,))),  # whose hash is that of (-1,)
    "a parameter": (Mixing, lambda: Mixing(scale=nn.Parameter(torch.ones(D)))),
    "a hook": (partial(Block, attends), lambda: with_hook(Block(attends))),
    "a forward": (partial(Block, attends), lambda: with_forward(Block(attends))),
}  # fmt: skip


def of_blocks(blocks: Sequence[Callable[[], Block]], rounds: Sequence[tuple[Any, ...]], samples: int) -> Any:
    """A model of these blocks, and inputs."""
    model, inputs = made(attends, lambda b: ([x(b, ROWS, D)], *rounds), None, samples)
    model.layers = nn.ModuleList([block() for block in blocks])
    return model.double(), inputs


@pytest.mark.parametrize("name", OTHERWISE)
def test_a_block_that_differs_from_one_before_it_has_its_own_trial(name: str) -> None:
    plain, other = OTHERWISE[name]
    found = verdict(partial(of_blocks, [plain, plain, other], [()]), TWO, parallelize)
    assert found.startswith("refused") and "layers.2" in found, found


class Options:
    """An argument of a block that is no tensor."""

    def __init__(self, mixed: bool) -> None:
        self.mixed = mixed


def test_a_block_is_tried_again_with_an_object_of_other_values() -> None:
    rounds = [(Options(mixed),) for mixed in (False, False, True)]
    assert verdict(partial(of_blocks, [Mixing], rounds), TWO, parallelize).startswith("refused")


@pytest.mark.parametrize("change", [with_hook, with_forward, with_rule])
def test_a_block_that_does_something_else_later_is_tried_again(change: Callable[[Any], Any]) -> None:
    model, inputs = usual(2)

    def call(own: nn.Module, comm: Comm) -> None:
        own(**inputs)
        for block in own.layers:  # type: ignore[union-attr]
            change(block)
        own(**inputs)

    for error in errors_on_copies(model, call, blocks=("layers",)):
        assert "depends on other rows besides by attention" in error
