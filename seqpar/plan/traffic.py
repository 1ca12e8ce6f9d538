"""The bytes that a rank sends in one attention call, predicted from its steps: what `Comm.stats` counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from seqpar.facts.value import integer
from seqpar.plan.parts import head_share, replicated
from seqpar.plan.steps import Part, Step, count

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class HeadShape:
    """The heads, dims and dtype of one attention call, as in `Plan.bytes`."""

    heads: int
    kv_heads: int
    dim: int
    v_dim: int | None = None  # by default dim
    dtype: str = "bfloat16"
    backward: bool = False
    return_lse: bool = False
    kv_grads: bool = True
    latent: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a dtype, heads or dims that attention does not support."""
        for name in ("heads", "kv_heads", "dim") + ("v_dim",) * (self.v_dim is not None):
            object.__setattr__(self, name, integer(name, getattr(self, name), 1))
        object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}")
        if self.heads % self.kv_heads:
            raise ValueError(f"query heads must be a multiple of key heads, got {self.heads} and {self.kv_heads}")
        if self.latent is not None:
            rank, rotated = self.latent
            object.__setattr__(self, "latent", (integer("R of latent", rank, 1), integer("E of latent", rotated, 0)))
            if self.kv_heads != 1:
                raise ValueError(f"latents travel as one key head, got kv_heads={self.kv_heads}; give kv_heads=1")

    @property
    def values(self) -> int:
        """Elements of a value."""
        return self.dim if self.v_dim is None else self.v_dim

    @property
    def wire(self) -> tuple[int, int]:
        """Elements of a key and of a value of one key head as they travel."""
        return (self.dim, self.values) if self.latent is None else self.latent

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def acc(self) -> int:
        """Bytes of an element in the accumulation dtype."""
        return max(self.size, 4)

    def share(self, part: Part, member: int) -> tuple[int, int]:
        """Query heads and key heads of one member of a part."""
        q, kv = head_share(self.heads, self.kv_heads, part.width, member)
        return q.stop - q.start, kv.stop - kv.start


def traffic(steps: Sequence[Step], rank: int, shape: HeadShape) -> dict[int, int]:
    """Bytes that a rank sends to each peer in the steps of one call, in forward or in backward."""
    sent: dict[int, int] = {}
    for step in steps:
        if step.first:
            for peer, size in _trade(step.part, rank, shape).items():
                sent[peer] = sent.get(peer, 0) + size
        row = shape.share(step.part, step.part.share)[1] * sum(shape.wire)
        entering = step.entry.sends if step.entry else {}
        for peer, rows in chain(step.sends.items(), entering.items()):
            sent[peer] = sent.get(peer, 0) + count(rows) * row * shape.size
        entered = step.entry.recvs if step.entry else {}
        for peer, rows in chain(step.grad_sends.items(), entered.items()) if shape.backward and shape.kv_grads else ():
            sent[peer] = sent.get(peer, 0) + count(rows) * row * shape.acc
    return {peer: size for peer, size in sorted(sent.items()) if size}


def _trade(part: Part, rank: int, shape: HeadShape) -> dict[int, int]:
    """Bytes that a rank sends to the other members of a part in the head trade, both ways."""
    rows, kv_rows = count(part.q.local), count(part.kv.local)
    heads_here, kv_here = shape.share(part, part.share)
    width = sum(shape.wire)
    lse = shape.acc if shape.return_lse else 0
    kv_size = shape.acc if replicated(shape.heads, shape.kv_heads, part.width) else shape.size
    sent = {}
    for share, peer in enumerate(part.members):
        if peer == rank:
            continue
        heads, kv = shape.share(part, share)
        back, kv_back = count(part.q.dest[peer]), count(part.kv.dest[peer])
        if shape.backward:
            size = rows * heads * (shape.values * shape.size + lse) + back * heads_here * shape.dim * shape.size
            size += kv_back * kv_here * width * kv_size if shape.kv_grads else 0
        else:
            size = rows * heads * shape.dim * shape.size + kv_rows * kv * width * shape.size
            size += back * heads_here * (shape.values * shape.size + lse)
        sent[peer] = size
    return sent
