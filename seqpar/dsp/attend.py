"""The attention of a stage that ranks share: the plan for rows that are sharded along a dimension that it mixes."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from math import prod

import numpy as np

from seqpar.dsp.form import form_of
from seqpar.dsp.space import Space
from seqpar.layout import Layout
from seqpar.mask import Mask
from seqpar.plan import Plan


def attention_plan(
    space: Space, form: str, whole: Collection[str], sharded: str | None, *, ulysses: bool = False
) -> Plan:
    """The plan of full attention over the dimensions in `whole`, for rows of a form, in their order.

    A document is one element of all other dimensions. sharded: the dimension of which every rank has its share; with
    None the plan is for one rank. ulysses: all ranks trade tokens for heads; otherwise keys are fetched.
    """
    names = tuple(name for name in form_of(form).names if name in space.dims)
    sizes = tuple(space.dims[name] for name in names)
    mixed = tuple(name in whole for name in names)
    at = None if sharded is None else names.index(sharded)
    return _plan(sizes, mixed, at, 1 if at is None else space.comm.size, ulysses)


@lru_cache(maxsize=256)
def _plan(sizes: tuple[int, ...], mixed: tuple[bool, ...], at: int | None, ranks: int, ulysses: bool) -> Plan:
    order = [n for n, inside in enumerate(mixed) if not inside] + [n for n, inside in enumerate(mixed) if inside]
    length = prod(size for size, inside in zip(sizes, mixed, strict=True) if inside)
    documents = prod(sizes) // length
    # positions, document by document, seen in the order of the rows
    positions = np.arange(prod(sizes)).reshape([sizes[n] for n in order]).transpose(np.argsort(order))
    held = [None] if at is None else [Layout.contiguous(sizes[at], ranks).positions(rank) for rank in range(ranks)]
    shards = [(positions if own is None else positions.take(own, axis=at)).reshape(-1) for own in held]
    width = ranks if ulysses else 1
    return Plan(Mask([length] * documents, causal=False), Layout(shards), ulysses=width)
