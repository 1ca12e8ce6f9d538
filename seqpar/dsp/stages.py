"""Blocks of a model as stages for the planner: their bytes, operations, heads, and what they mix."""

from __future__ import annotations

from math import prod

from torch import nn

from seqpar.dsp.costs import Stage
from seqpar.dsp.form import form_of
from seqpar.dsp.space import Space
from seqpar.dsp.spec import Block


def stage_of(
    model: nn.Module, name: str, block: Block, space: Space, width: int, element: int, cached: bool
) -> Stage:  # fmt: skip
    """A block as the planner sees it. width, element: elements of a row, and bytes of one. cached: by a hook."""
    if missing := [dim for dim in block.whole if dim not in space.dims]:
        raise ValueError(f"block {block.modules} mixes {missing}, expected some of the dimensions {[*space.dims]}")
    module, tokens = model.get_submodule(name), tokens_of(block, space)
    size = tokens * width * element * len(block.stream)
    matrices = sum(p.numel() for p in module.parameters() if p.dim() > 1)
    mixed = prod(space.dims[dim] for dim in block.whole)
    heads, kv_heads = (block.core.count(module),) * 2 if block.core else (block.heads, block.kv_heads)
    # a cache keeps the output of one call, which leaves no call of attention whose heads could be shared
    if cached:
        heads = kv_heads = 0
    return Stage(
        name, frozenset(block.whole), bytes=size, flops=2.0 * matrices * tokens,
        attention=4.0 * tokens * mixed * width if block.whole else 0.0, heads=heads, kv_heads=kv_heads,
        qkv=(size, 2 * size * kv_heads / heads) if heads else (0.0, 0.0), ring=block.attention and not cached,
        filled=bool(block.core and block.core.sdpa),
        # foreign code may not work on zero rows
        rest=None if block.rest is None else frozenset(block.rest), rest_filled=True,
    )  # fmt: skip


def tokens_of(block: Block, space: Space) -> int:
    """How many rows a block's input has."""
    form = form_of(next(iter(block.stream.values())))
    return prod(space.dims[name] for name in form.names if name in space.dims)
