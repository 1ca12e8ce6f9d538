"""A linear head over a rank's rows, whose logits exist for a chunk of rows at a time, and its gradients.

    T rows of this rank   V vocabulary   E model dim

    hidden [T, E] ─┬─ chunk 0 ──► logits [chunk, V] ──► results of its rows, and dz [chunk, V] in the same memory
                   ├─ chunk 1 ──► ...                      d_hidden[chunk] = dz W       d_weight += dz^T h[chunk]

On the CPU, blocks of a chunk's rows go through all steps together, small enough for a core's cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.comm.entry import refuse_transforms
from seqpar.kernels import acc_dtype
from seqpar.ops.core.collective_op import is_dtensor
from seqpar.ops.core.device import autocast

CACHED = 1 << 16  # logits of the rows that a core computes at a time


class Gradients(NamedTuple):
    """Gradients of a head's arguments, or None where none is needed."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class Head(NamedTuple):
    """A head's arguments in the dtype of its products: as autocast casts the hidden states, which leaves fp64 as it is.

    softcap: logits become ``softcap * tanh(logits / softcap)``. chunk: the number of rows in a chunk.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    softcap: float
    chunk: int

    @classmethod
    def of(
        cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float, chunk: int,
        dtype: torch.dtype | None = None,
    ) -> Head:  # fmt: skip
        """The head; dtype: of its products, by default that of this moment."""
        dtype = dtype or autocast(hidden.new_empty(0)).dtype
        wide = acc_dtype(dtype)
        return cls(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(wide), softcap, chunk)

    @property
    def wide(self) -> torch.dtype:
        """The dtype of logits and of sums."""
        return acc_dtype(self.hidden.dtype)

    def alone(self) -> AbstractContextManager[None]:
        """The context of the products, which are of the head's dtype whatever autocast says."""
        return torch.autocast(self.hidden.device.type, enabled=False)

    def chunks(self) -> Iterator[slice]:
        """The rows of every chunk."""
        return (slice(first, first + self.chunk) for first in range(0, len(self.hidden), self.chunk))

    def logits(self, rows: slice) -> Tensor:
        """The logits of a chunk, before the softcap; in memory of their own."""
        z = F.linear(self.hidden[rows], self.weight).to(self.wide)
        return z if self.bias is None else z.add_(self.bias)

    def gradients(self, needs: tuple[bool, bool, bool]) -> Gradients:
        """Memory for the gradients of hidden states, weight and bias that are needed."""
        return Gradients(
            torch.empty_like(self.hidden) if needs[0] else None,
            torch.zeros_like(self.weight, dtype=self.wide) if needs[1] else None,
            self.weight.new_zeros(len(self.weight), dtype=self.wide) if needs[2] else None,
        )

    def add(self, grads: Gradients, rows: slice, dz: Tensor, scale: Tensor | None = None) -> None:
        """Add the gradients of a chunk whose logits have the gradient dz.

        scale [chunk]: a factor for each row of dz, in the sums over rows; d_hidden is without it.
        """
        if grads.bias is not None:
            grads.bias.add_(dz.sum(0) if scale is None else scale @ dz)
        h, wide, dz = self.hidden[rows], dz, dz.to(self.weight.dtype)
        if grads.hidden is not None:
            torch.mm(dz, self.weight, out=grads.hidden[rows])
        if grads.weight is not None:
            h = h if scale is None else (h * scale[:, None]).to(h.dtype)
            if h.dtype == torch.float16:  # whose largest number a sum over a chunk may exceed
                of_weight = torch.mm(dz.t(), h, out_dtype=self.wide) if h.is_cuda else wide.t() @ h.to(self.wide)
            else:
                of_weight = dz.t() @ h
            grads.weight.add_(of_weight)


def blocks(z: Tensor, *columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The logits and columns of a chunk in blocks of rows that a core's cache holds; all at once on other devices."""
    count = 1
    if z.is_cpu and not torch.compiler.is_compiling():
        count = max(1, min(len(z) // 2, z.numel() // (CACHED * torch.get_num_threads())))
    return zip(*(x.tensor_split(count) for x in (z, *columns)))


def capped(z: Tensor, softcap: float, grad: bool) -> Tensor | None:
    """Cap logits in place; the slope of the cap at each, if it is needed and there is a cap."""
    if not softcap:
        return None
    z.div_(softcap).tanh_().mul_(softcap)
    return 1 - (z / softcap).square() if grad else None


def finish(dz: Tensor, keep: Tensor, slope: Tensor | None) -> None:
    """Make gradients those of logits before the cap, and 0 in rows that do not count, in place."""
    # A device would be waited for, and a tensor without memory has no values.
    if torch.compiler.is_compiling() or not dz.is_cpu or type(dz) is not Tensor or not keep.all():
        dz.masked_fill_(~keep[:, None], 0.0)
    if slope is not None:
        dz *= slope


def check_rows(rows: Tensor, labels: Tensor, name: str) -> None:
    """Raise TypeError unless both are tensors, and ValueError unless they are rows and their labels."""
    for kind, x in ((name, rows), ("labels", labels)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{kind} must be a tensor, got {x!r:.200}")
        if is_dtensor(x):
            raise NotImplementedError(f"{kind} {list(x.shape)} is a DTensor; give this rank's rows, x.to_local()")
    if labels.device != rows.device:
        raise ValueError(f"labels on {labels.device}, {name} on {rows.device}; give both on one device")
    if rows.dim() != 2 or labels.shape != rows.shape[:1] or labels.dtype != torch.int64:
        raise ValueError(
            f"{name} {list(rows.shape)}, labels {list(labels.shape)} of {labels.dtype}, expected [T, n] and [T] int64"
            f"{_likely_cure(rows, labels)}"
        )


def _likely_cure(rows: Tensor, labels: Tensor) -> str:
    """What to do about rows and labels that do not fit each other, where that is clear."""
    if rows.dim() > 2:
        return "; drop the batch dimension of both, as by x[0]"
    if labels.shape == rows.shape[:1]:
        return "; give labels.long()"
    if rows.dim() == 2 and labels.dim() == 1 and len(labels) > len(rows):
        return "; shard the labels too, seqpar.shard(labels, plan, rank)"
    return ""


def check_count(who: str, labels: Tensor, valid: int | Tensor, ignore_index: int) -> None:
    """Raise ValueError if this rank alone has more labels than `valid`; on the CPU, as a device would be waited for.

    A tensor of fractions does not count labels, and divides the loss as it is.
    """
    if torch.compiler.is_compiling():
        return
    for x in (labels, valid):
        if isinstance(x, Tensor) and (type(x) is not Tensor or not x.is_cpu or x.is_floating_point()):
            return
    own = int((labels != ignore_index).sum())
    if own > int(valid):
        raise ValueError(
            f"{who}: valid is {int(valid)}, but this rank alone has {own} labels that count; count those of all ranks, "
            "before they are sharded"
        )


def check_labels(who: str, labels: Tensor, vocabulary: int, ignore_index: int) -> None:
    """Raise ValueError for a label on the CPU that is neither a token nor ignored; a device would be waited for."""
    if type(labels) is not Tensor or not labels.is_cpu or torch.compiler.is_compiling():
        return
    wrong = ((labels < 0) | (labels >= vocabulary)) & (labels != ignore_index)
    if wrong.any():
        row = int(wrong.int().argmax())
        raise ValueError(
            f"{who}: the label of row {row} is {int(labels[row])}, expected 0 to {vocabulary - 1}, or "
            f"ignore_index={ignore_index} for a row that does not count"
        )


def refuse_learned(who: str, **numbers: object) -> None:
    """Raise NotImplementedError for numbers that are learned, and would get no gradient."""
    for name, x in numbers.items():
        if isinstance(x, Tensor) and x.requires_grad:
            raise NotImplementedError(f"{who}: {name} has no gradient; detach it")


def is_number(x: object) -> bool:
    """Whether x is a number of Python, of numpy, or of a compiler, which cannot ask its own for attributes."""
    return isinstance(x, (int, float)) or hasattr(x, "__float__")


def check_head(who: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float, chunk: int) -> None:
    """Raise TypeError, ValueError or NotImplementedError for arguments that are not a head over these rows."""
    refuse_transforms(who)
    for kind, x in (("weight", weight), ("bias", bias)):
        if not isinstance(x, Tensor) and not (kind == "bias" and x is None):
            raise TypeError(f"{who}: the {kind} must be a tensor, got {x!r:.200}")
        if x is not None and is_dtensor(x):
            raise NotImplementedError(
                f"{who}: the {kind} is a DTensor {list(x.shape)} with placements {x.placements}; "
                f"call it inside the forward of the module that fully_shard wraps, where the {kind} is whole"
            )
        if x is not None and x.device != hidden.device:
            raise ValueError(f"{who}: the {kind} is on {x.device}, hidden on {hidden.device}; give both on one device")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[1]:
        raise ValueError(f"{who}: hidden {list(hidden.shape)}, weight {list(weight.shape)}, expected [T, E], [V, E]")
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.dtype.is_floating_point):
        raise ValueError(
            f"{who}: bias {list(bias.shape)} of {bias.dtype}, expected floating point "
            f"[{weight.shape[0]}], one for each row of the weight {list(weight.shape)}"
        )
    whole = isinstance(chunk, int) or hasattr(chunk, "__index__")
    if not (is_number(softcap) and whole) or not 0.0 <= softcap < math.inf or chunk < 1:
        raise ValueError(
            f"{who}: softcap={softcap}, chunk={chunk}, expected a finite cap, 0 for none, and at least one row in a "
            "chunk"
        )
