"""Bytes of a block by running it on tensors without memory: how `seqpar fit --trace` knows models of any kind.

A dispatch mode sees every operation's results, counts each storage once, and is told when the storage ends. So the sum
at any moment is what an allocator would have given out, for sizes that no machine here holds. What an operation needs
inside, such as a workspace, is not seen.
"""

from __future__ import annotations

import copy
import math
import re
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from seqpar.private import torch as torch_private
from seqpar.train.activations import recompute, tile

if TYPE_CHECKING:
    from seqpar.planner.blocks import BlockBytes

POLICIES = "none", "keep-attention", "full", "tiled"
TILED = re.compile(r"norm|^(mlp|ffn|ff|feed_forward)$")
ROWS = 61 << 6  # and twice as many: no weight has a dimension like theirs
NARROW, WIDE = ROWS // 16, ROWS // 4  # rows of a tile


class _Live(torch_private.TorchDispatchMode):  # type: ignore[misc]
    """Counts bytes of the storages that exist, those of weights and their gradients apart.

    weights: of these shapes, in any order of dimensions. early, late: the most bytes while less than half of the
    gradients existed, and afterwards. scores: whether a tensor had so many rows twice.
    """

    def __init__(self, weights: list[torch.Size], rows: int) -> None:
        super().__init__()
        self.rows, self.scores = rows, False
        self.now = self.early = self.late = 0
        self._shapes, self._sizes = {tuple(sorted(shape)) for shape in weights}, dict[int, int]()
        whole = sum(shape.numel() for shape in weights)
        self._gradients, self._half = -whole, whole // 2  # weights come first

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count what it returns."""
        results = op(*args, **(kwargs or {}))
        for x in torch_private.tree_leaves(results):
            if isinstance(x, Tensor) and torch_private.cdata(storage := x.untyped_storage()) not in self._sizes:
                self._begin(x, storage)
        if self._gradients > self._half:
            self.late = max(self.late, self.now)
        else:
            self.early = max(self.early, self.now)
        return results

    def _begin(self, x: Tensor, storage: Any) -> None:
        key, elements, size = torch_private.cdata(storage), 0, storage.nbytes()
        self.scores |= list(x.shape).count(self.rows) > 1
        if tuple(sorted(x.shape)) in self._shapes:
            elements, size = x.numel(), 0
        self._sizes[key] = size
        self._gradients += elements
        self.now += size
        weakref.finalize(storage, self._end, key, elements).atexit = False

    def _end(self, key: int, elements: int) -> None:
        self.now -= self._sizes.pop(key)
        self._gradients -= elements


class _Backward(torch.autograd.Function):
    """A loss of a block's output. The gradient exists as soon as backward begins, and no longer than it is needed."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = output.shape, output.dtype
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.new_empty(ctx.shape, dtype=ctx.dtype)


def trace(block: nn.Module, *args: Any, **named: Any) -> BlockBytes:
    """The bytes a row that a block of a model holds and works with, by running it on tensors without memory.

    block: computes rows from rows, as a decoder layer does; on any device, "meta" too. A copy without memory runs, and
    the block is not changed. args, named: of one call, with a number of rows that no other dimension has. The first
    tensor of floating point is the block's input [..., rows, features], whose dtype its weights get, as `fully_shard`
    gathers them. The trace runs with other numbers of rows, which replace that dimension in all tensors. Give no mask.

    Policies: "none"; "keep-attention" and "full", by `recompute`; "tiled", which is "full" with the block's own norms
    and its MLP in tiles (`tile`), those that are called ``*norm*``, ``mlp``, ``ffn``, ``ff`` or ``feed_forward``.

    It is assumed that attention is `F.scaled_dot_product_attention`, of which queries, keys, values, output and a
    number for each row and head are kept, as by seqpar's; what its exchanges need is not a block's. Recurrences and
    experts are measured as the block computes them on a CPU. Trace a block before `parallelize` and `fully_shard`.

    Raises: TypeError unless block is a module; ValueError without an input, if the number of rows is ambiguous, or if
    bytes grow faster than rows; NotImplementedError for a block that reads values of its tensors.
    """
    from seqpar.planner.blocks import BlockBytes, PolicyBytes
    from seqpar.planner.shape import TILE

    if not isinstance(block, nn.Module):
        raise TypeError(f"trace: expected a module, an nn.Module, got {type(block).__name__}")
    _check_rows(x := _input(args, named), args, named)
    measured = partial(_measured, block, args, named, x)
    found = []
    for policy in POLICIES:
        small, large = measured(policy, ROWS), measured(policy, 2 * ROWS)
        lines = [(round((b - a) / (large.rows - small.rows)), 2 * a - b) for a, b in zip(small[1:4], large[1:4])]
        if min(fixed for _, fixed in lines) < -large.rows:  # a straight line begins with something
            why = "a part that is not attention, as a recurrence, takes the more for a row the more rows there are"
            if large.scores:
                why = (
                    "attention must keep no scores: call F.scaled_dot_product_attention without a mask or dropout, as "
                    "attn_implementation='sdpa' does"
                )
            raise ValueError(
                f"trace: bytes of {type(block).__name__} grow faster than its rows, {small} and {large}; {why}"
            )
        held, early, late = (row for row, _ in lines)
        fixed = max(0, *(fixed for _, fixed in lines[1:]))
        if policy == "tiled":
            wide = measured(policy, ROWS, WIDE)
            more = max(b - row * small.rows for b, row in ((wide.early, early), (wide.late, late)))
            fixed = max(fixed, more * TILE // WIDE)
        found.append(PolicyBytes(policy, held, early - held, late, fixed))
    return BlockBytes(sum(p.numel() for p in block.parameters()), tuple(found))


def trace_layers(layers: Iterable[nn.Module], run: Callable[[], object]) -> list[BlockBytes]:
    """`trace` of each layer of a model, once for all layers of a class with equal weights.

    run: calls the model with any number of rows, from which layers get their arguments; on fake tensors, for one.
    Masks [..., rows, rows] are left out.
    """
    calls: dict[nn.Module, tuple[Any, Any]] = {}

    def unmasked(x: Tensor) -> Tensor | None:
        return None if x.dim() == 4 and x.shape[-2] == x.shape[-1] else x

    def note(layer: nn.Module, args: Any, named: Any) -> None:
        calls[layer] = torch_private.tree_map_only(Tensor, unmasked, (args, named))

    handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    kinds = {layer: (type(layer), *((name, p.shape) for name, p in layer.named_parameters())) for layer in calls}
    first = {kind: layer for layer, kind in reversed(kinds.items())}
    traced = {kind: trace(layer, *calls[layer][0], **calls[layer][1]) for kind, layer in first.items()}
    return [traced[kind] for kind in kinds.values()]


class _Bytes(NamedTuple):
    """What a block holds, and the most in its backward, early and late, in bytes for a number of rows.

    scores: whether a tensor had a number for each pair of rows.
    """

    rows: int
    held: int
    early: int
    late: int
    scores: bool


def _input(args: Any, named: Any) -> Tensor:
    """A block's input. Raises ValueError if there is none."""
    for x in torch_private.tree_leaves((args, named)):
        if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1:
            return x
    raise ValueError("trace: give the arguments of a call of the block, of which the first is its input [..., rows, n]")


def _check_rows(x: Tensor, args: Any, named: Any) -> None:
    """Raise ValueError if the number of rows of the input is another dimension too."""
    for other in torch_private.tree_leaves((args, named)):
        if isinstance(other, Tensor) and list(other.shape).count(x.shape[-2]) > 1:
            raise ValueError(
                f"trace: {x.shape[-2]} rows are two dimensions of an argument {list(other.shape)}; give a number of "
                "rows that no other dimension has, and no mask"
            )


def _measured(
    block: nn.Module, args: Any, named: Any, given: Tensor, policy: str, length: int, tile_rows: int = NARROW
) -> _Bytes:
    """The bytes of a block under a policy, with arguments of another number of rows."""
    rows, dtype = given.shape[-2], given.dtype

    def unmade(x: Tensor) -> Tensor:
        made = torch.empty(x.shape, dtype=dtype if x.is_floating_point() else x.dtype, device="cpu")
        return nn.Parameter(made, x.requires_grad) if isinstance(x, nn.Parameter) else made

    def lengthened(x: Tensor) -> Tensor:
        made = torch.empty([length if n == rows else n for n in x.shape], dtype=x.dtype, device="cpu")
        return made.requires_grad_() if x is given else made

    weights = [p.shape for p in block.parameters()]
    try:
        with torch_private.FakeTensorMode(), _Live(weights, length) as live:
            twin = copy.deepcopy(block, {id(x): unmade(x) for x in (*block.parameters(), *block.buffers())})
            set_policy(twin, policy, tile_rows)
            shared = torch_private.tree_map_only(Tensor, lengthened, (args, named))
            before = live.now
            loss = _loss(twin, *shared)
            held = live.early = live.now
            live.late = 0
            loss.backward()
    except (torch_private.DataDependentOutputException, torch_private.DynamicOutputShapeException) as error:
        raise NotImplementedError(
            f"trace: {type(block).__name__} reads values of its tensors ({error}), and here they have none; choose an "
            "implementation that needs shapes alone, as experts_implementation='grouped_mm'"
        ) from error
    sizes = (x - before for x in (held, live.early, live.late))
    return _Bytes(length * math.prod(given.shape[:-2]), *sizes, live.scores)


def set_policy(block: nn.Module, policy: str, tile_rows: int) -> None:
    """Make a block recompute by a policy."""
    if policy == "tiled":
        for name, part in block.named_children():
            if TILED.search(name):
                with suppress(NotImplementedError):  # experts with a router whose logits are recorded
                    tile(part, tile_rows)
    if policy != "none":
        recompute(block, save_attention=policy == "keep-attention")


def _loss(block: nn.Module, args: Any, named: Any) -> Tensor:
    """A loss of the first tensor that a block returns. Afterwards nothing but autograd holds other tensors."""
    # The input is a result of the block before, which ends where nothing needs it any more.
    args, named = torch_private.tree_map_only(Tensor, lambda x: x.clone() if x.requires_grad else x, (args, named))
    output = torch_private.tree_leaves(block(*args, **named))
    return _Backward.apply(next(x for x in output if isinstance(x, Tensor)))  # type: ignore[no-untyped-call]
