"""The spec of a model class: which modules mix which dimensions, and which arguments hold rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from operator import attrgetter
from typing import Any

from torch import nn

from seqpar.dsp.costs import Stage
from seqpar.dsp.form import form_of
from seqpar.dsp.space import Sharding, Space


@dataclass(frozen=True)
class Core:
    """The part of a block that mixes dimensions, separately for each element of one more, such as a head.

    module: its name in the block. stream: its arguments with their forms. out: the form of its output, one tensor.
    over: the name, in all these forms, of the dimension that it treats separately. size: the number of its elements, or
    the path of the block's attribute that holds it. sdpa: the core is the one call of
    ``F.scaled_dot_product_attention`` inside the module, and stream has the forms of its query, key and value. Since
    the module's own code surrounds that call, the core is then shared only where every rank has rows.

    If the block's rows are sharded along a dimension that the core mixes, the core's inputs are switched to `over` in
    one exchange and its output is switched back.
    """

    module: str
    stream: Mapping[str, str]
    out: str
    over: str
    size: int | str
    sdpa: bool = False

    def count(self, block: nn.Module) -> int:
        """The number of heads, or channels, of a block. Raises: ValueError if the path leads to no number."""
        try:
            count = attrgetter(self.size)(block) if isinstance(self.size, str) else self.size
        except AttributeError:
            count = None
        if type(count) is not int or count < 1:
            raise ValueError(f"the core {self.module} has {count!r} for its size {self.size!r}, expected at least 1")
        return count


@dataclass(frozen=True)
class Block:
    """Modules that are stages.

    modules: their name in the model, with ``{i}`` for a layer's number; neighbouring blocks with ``{i}`` alternate,
    layer by layer. stream: the arguments with the rows to compute, and their forms; the module returns as many tensors,
    with the same forms and order. whole: dimensions that the module mixes. rows: other arguments with an entry per row,
    and their forms; every rank gets them whole and passes its share to the module. shared: arguments that all rows use.
    buffers: buffers and parameters inside the module with an entry for each row, such as tables of positions, and their
    forms. rest: shardings that the model's code before this module allows (None is whole), or None if there is no such
    code. gathers: inner modules whose output other rows read, such as a bias of pairs, each with its form and the
    dimensions along which rows read it; the output is gathered along these. core: where the mixing happens, if ranks
    may share it by heads or channels; without it the module mixes elsewhere. attention: the module attends over `whole`
    by ``seqpar.attention`` with the plan of ``seqpar.parallel``, which ranks may share too. heads, kv_heads: of that
    attention.

    Any other argument must be None when the module is called.
    """

    modules: str
    stream: Mapping[str, str]
    whole: tuple[str, ...] = ()
    rows: Mapping[str, str] = field(default_factory=dict)
    shared: tuple[str, ...] = ()
    buffers: Mapping[str, str] = field(default_factory=dict)
    rest: tuple[Sharding, ...] | None = None
    gathers: Mapping[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    core: Core | None = None
    attention: bool = False
    heads: int = 0
    kv_heads: int = 0

    def __post_init__(self) -> None:
        """Check the fields."""
        if isinstance(self.whole, str):
            raise ValueError(f"whole={self.whole!r} of {self.modules}, expected a tuple: ({self.whole!r},)")
        for forms in (self.stream, self.rows, self.buffers, self.core.stream if self.core else {}):
            for text in forms.values():
                form_of(text)
        for text, dims in self.gathers.values():
            if missing := set(dims) - set(form_of(text).names):
                raise ValueError(f'"{text}" lacks {sorted(missing)}, along which {self.modules} would gather it')
        if not self.stream or self.attention != bool(self.heads and self.kv_heads) or (self.attention and self.core):
            raise ValueError(
                "a block needs a stream; with attention it needs heads and kv_heads and takes no core, without it "
                f"neither heads nor kv_heads; got {self}"
            )

    def tokens(self, space: Space) -> int:
        """How many rows the input has."""
        form = form_of(next(iter(self.stream.values())))
        return prod(space.dims[name] for name in form.names if name in space.dims)

    def stage(self, model: nn.Module, name: str, space: Space, width: int, element: int, cached: bool) -> Stage:
        """What planners see. width, element: elements of a row, and bytes of one. cached: by a hook."""
        if missing := [dim for dim in self.whole if dim not in space.dims]:
            raise ValueError(f"block {self.modules} mixes {missing}, expected some of the dimensions {[*space.dims]}")
        module, tokens = model.get_submodule(name), self.tokens(space)
        size = tokens * width * element * len(self.stream)
        matrices = sum(p.numel() for p in module.parameters() if p.dim() > 1)
        mixed = prod(space.dims[dim] for dim in self.whole)
        heads, kv_heads = (self.core.count(module),) * 2 if self.core else (self.heads, self.kv_heads)
        # a cache keeps the output of one call, which leaves no call of attention whose heads could be shared
        if cached:
            heads = kv_heads = 0
        return Stage(
            name, frozenset(self.whole), bytes=size, flops=2.0 * matrices * tokens,
            attention=4.0 * tokens * mixed * width if self.whole else 0.0, heads=heads, kv_heads=kv_heads,
            qkv=(size, 2 * size * kv_heads / heads) if heads else (0.0, 0.0), ring=self.attention and not cached,
            filled=bool(self.core and self.core.sdpa),
            # foreign code may not work on zero rows
            rest=None if self.rest is None else frozenset(self.rest), rest_filled=True,
        )  # fmt: skip


@dataclass(frozen=True)
class Exit:
    """The module whose output is whole again. It works row by row; its input has one of the shardings in rest."""

    module: str
    form: str
    rest: tuple[Sharding, ...]


@dataclass(frozen=True)
class Spec:
    """A model class whose forward takes and returns whole tensors.

    model: the name of the class. dims: the global sizes, from (model, arguments of its forward by name). blocks: in the
    order in which they run. exit: None if the last block's output ends the model. between: modules that run between
    blocks, row by row. outside: modules that run on whole tensors, before the first block or after the exit. own:
    parameters and buffers of the model itself that it uses outside, or between blocks along dimensions that are whole.

    A module with parameters or buffers that is in none of these lists raises an error.
    """

    model: str
    dims: Callable[[nn.Module, Mapping[str, Any]], Mapping[str, int]]
    blocks: tuple[Block, ...]
    exit: Exit | None = None
    between: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    own: tuple[str, ...] = ()

    def stages(self, model: nn.Module) -> list[tuple[str, Block]]:
        """The names of the model's stages, in order, each with its block.

        Raises: ValueError for a block that matches no module, or layers that lack one.
        """
        names = [name for name, _ in model.named_modules()]
        groups: list[list[Block]] = []
        for layered, neighbours in groupby(self.blocks, lambda block: "{i}" in block.modules):
            blocks = list(neighbours)
            groups += [blocks] if layered else [[block] for block in blocks]
        stages: list[tuple[str, Block]] = []
        for group in groups:
            numbers = [_numbers(block.modules, names) for block in group]
            if not numbers[0] or any(own != numbers[0] for own in numbers):
                counts = {block.modules: len(own) for block, own in zip(group, numbers, strict=True)}
                raise ValueError(f"{type(model).__name__} does not match its spec: modules by pattern {counts}")
            stages += [(block.modules.replace("{i}", number), block) for number in numbers[0] for block in group]
        return stages


def _numbers(pattern: str, names: list[str]) -> list[str]:
    """The layer numbers of a pattern's modules; for a name without one, a single empty number."""
    if "{i}" not in pattern:
        return [""] if pattern in names else []
    matcher = re.compile(re.escape(pattern).replace(r"\{i\}", r"(\d+)"))
    return sorted([match[1] for name in names if (match := matcher.fullmatch(name))], key=int)
