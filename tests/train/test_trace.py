"""Bytes of blocks on tensors without memory: counted by hand, and what cannot be counted."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from seqpar.planner import Hardware, ModelShape, Training
from seqpar.planner.blocks import BlockBytes
from seqpar.planner.memory import Memory
from seqpar.planner.shape import TILE
from seqpar.train import linear_cross_entropy, trace
from seqpar.train.trace import trace_layers

H, FFN = 8, 24


class Mlp(nn.Module):
    """Two products with a ReLU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, FFN, bias=False), nn.Linear(FFN, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Block(nn.Module):
    """An MLP around which rows are added, after attention of one head or none."""

    def __init__(self, attention: str = "") -> None:
        super().__init__()
        self.mlp, self.attention = Mlp(), attention
        self.qkv = nn.Linear(H, 3 * H, bias=False) if attention else None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # of which a trace takes none
        if self.qkv is not None:
            q, k, v = self.qkv(x)[:, None].chunk(3, -1)
            if self.attention == "eager":
                x = x + ((q @ k.transpose(-1, -2)).softmax(-1) @ v)[:, 0]
            else:
                x = x + F.scaled_dot_product_attention(q, k, v, mask)[:, 0]
        return x + self.mlp(x)


@cache
def bytes_of(attention: str = "", dtype: torch.dtype = torch.float32) -> BlockBytes:
    with torch.device("meta"):
        return trace(Block(attention), torch.empty(1, 7, H, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_mlp_holds_and_works_with_what_its_formulas_say(dtype: torch.dtype) -> None:
    traced, size = bytes_of("", dtype), dtype.itemsize
    assert traced.parameters == 2 * H * FFN
    none, full = traced.under("none"), traced.under("full")
    assert none.held == size * (H + FFN)  # inputs of both products; the ReLU keeps its result, which is one of them
    # The gradient of the output is also that of the sum's other term; those of the ReLU's result and argument.
    assert none.working == size * (H + 2 * FFN)
    assert full.held == size * H and full.held + full.working == none.held + none.working
    # With a gradient of weights, only the input is held, and there are the output's gradient and the argument's.
    assert none.late == size * (H + H + FFN + H)
    assert max(none.fixed, full.fixed) < 64  # the loss
    tiled = traced.under("tiled")
    assert tiled.held == full.held and tiled.working < full.working
    assert size * TILE * FFN < tiled.fixed < 4 * size * TILE * (H + FFN)
    offload = traced.under("offload")
    assert (offload.held, offload.held + offload.working) == (0, tiled.held + tiled.working)
    with pytest.raises(ValueError, match="'attention' was not traced; traced: none, keep-attention, full, tiled"):
        traced.under("attention")


def test_attention_keeps_no_scores() -> None:
    plain, fused = bytes_of().under("none"), bytes_of("fused")
    # its input, in place of the sum with it; queries, keys and values, the output, a number a row and head, the sum
    assert fused.under("none").held == plain.held + 4 * (H + 3 * H + H + 1)
    assert fused.under("keep-attention").held == 4 * (H + H + 1)


def test_the_block_stays_as_it_was() -> None:
    block = Block("fused").train()
    before = {name: (x, x.clone()) for name, x in block.state_dict(keep_vars=True).items()}
    x = torch.randn(1, 7, H)
    expected = block(x)
    trace(block, x)
    assert "forward" not in vars(block) and all(p.grad is None for p in block.parameters())
    for name, p in block.state_dict(keep_vars=True).items():
        assert p is before[name][0] and torch.equal(p, before[name][1])
    assert torch.equal(block(x), expected) and not x.requires_grad


class Sums(nn.Module):
    """A module that reads a value."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class Chunks(nn.Module):
    """A module that keeps a number for each pair of chunks."""

    def forward(self, x: Tensor) -> Tensor:
        chunks = x[:, ::61].sum(-1)
        return x * torch.exp(chunks[:, None] - chunks[..., None]).sum()


@pytest.mark.parametrize(
    ("block", "args", "error", "match"),
    [
        (Block("eager"), (torch.empty(1, 7, H),), ValueError, "Block grow faster than its rows, .*keep no scores"),
        (Chunks(), (torch.empty(1, 7, H),), ValueError, "a part that is not attention, as a recurrence"),
        (Block(), (torch.empty(1, H, H),), ValueError, "8 rows are two dimensions"),
        (Block("fused"), (torch.empty(1, 7, H), torch.empty(1, 1, 7, 7)), ValueError, "and no mask"),
        (Block(), (), ValueError, "of which the first is its input"),
        (Block(), (torch.zeros(1, 7, dtype=torch.int64),), ValueError, "of which the first is its input"),
        (Sums(), (torch.empty(1, 7, H),), NotImplementedError, "Sums reads values of its tensors"),
        ("block", (torch.empty(1, 7, H),), TypeError, "expected a module, an nn.Module, got str"),
    ],
)
def test_what_cannot_be_traced_is_refused(
    block: nn.Module, args: tuple[Any, ...], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        trace(block, *args)


def test_layers_of_a_kind_are_traced_once() -> None:
    layers = [Block("fused"), Block(), Block(), Block("fused")]
    traced = trace_layers(layers, lambda: nn.Sequential(*layers)(torch.randn(1, 7, H)))
    assert traced[0] is traced[3] and traced[1] is traced[2] and traced[0] == bytes_of("fused")
    assert traced[1] == bytes_of() != traced[0]


def test_memory_takes_traced_layers() -> None:
    shape = ModelShape("tiny", H, 3, 1, 1, H, FFN, 64, dtype="float32", recompute="full")
    traced, other = bytes_of("fused"), bytes_of()
    training = Training(weights="float32")

    def memory(blocks: list[BlockBytes], first: tuple[int, str] = (0, "none")) -> Memory:
        return Memory.of(replace(shape, blocks=tuple(blocks)), Hardware.preset("cpu"), 0, training, 2, first=first)

    full, working = memory([traced] * 3), 4 * 2 * H  # of attention's accumulators
    assert full.state == 16 * (2 * 64 * H + H + 3 * traced.parameters) // 2
    last = next(m for m in full.moments if m.name == "last")
    assert last.row == sum(traced.under("full")[1:3]) + 2 * traced.under("full").held + working
    kept = memory([traced] * 3, (2, "none"))
    assert max(m.row for m in kept.moments) > max(m.row for m in full.moments)
    assert memory([other, other, traced]).bytes(1000) < full.bytes(1000)
    with pytest.raises(ValueError, match="2 traced blocks of 3 layers"):
        memory([traced] * 2)


def test_the_head_runs_on_tensors_without_memory() -> None:
    with FakeTensorMode():
        hidden, weight = torch.empty(40, H, requires_grad=True), torch.empty(99, H, requires_grad=True)
        labels = torch.zeros(40, dtype=torch.int64)
        linear_cross_entropy(hidden, weight, labels, valid=40, chunk=16).backward()
        assert hidden.grad is not None and hidden.grad.shape == (40, H)
        assert weight.grad is not None and weight.grad.shape == (99, H)
