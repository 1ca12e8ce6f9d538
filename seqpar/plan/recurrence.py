"""A recurrent layer in numbers: bytes that pass from run to run, and operations and memory per token for the planner.

    H heads    G groups that share queries and keys    K, V dims of a key and of a value; a state is [K, V]

In chunks of C rows a token multiplies, for each head, with the chunk's keys and values, and with one state, as
`seqpar.kernels.recurrent.chunked` does. A multiplication and an addition are two operations; elementwise ones are left
out, as are those of decays. With a state for each channel all are elementwise: they are counted as the operations of
products that take as long.

`LayerWork` is what a layer computes while states travel, in bytes that a rank's link moves in that time. A head of a
row takes, in forward, ``6 K V + 4 C (K + V)`` operations; a training step computes it twice in forward and twice as
much in backward, so a direction takes twice that on average. What a run does to a state takes half of it, and with
matrices as maps, which are K more columns in addition to the V of the state, ``(V + K) / V`` times that half. With a
state for each channel an element of it takes a row as long as `STEP` operations, and what a run does to it is a
by-product, except for one step per chunk. A device computes some heads at once: as many as threads on the CPU, which
the fewer heads of a block leave idle otherwise, and `WIDTH` on a GPU, where all of them go from chunk to chunk
together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from seqpar.facts.value import integer
from seqpar.plan.traffic import DTYPE_BYTES

MOST = (1 << 31) - 1  # of any size
DECAYS = ("none", "scalar", "channel", "rates")
CHUNK = 64  # rows; ROWS of seqpar.kernels.recurrent.chunked, which plans may not import
# operations of a device while its link moves a byte: 100e9 / 1e9 of a core and a loopback, 100e12 / 50e9 of a GPU
RATES = {"cpu": 100, "cuda": 2000}
WIDTH = 64
STEP = 1200  # a core took 47 ns for an element of 16 states of 512 channels, forward and backward, in float32


class LayerWork(NamedTuple):
    """A layer's computation, in both directions on average. heads, groups: those of values, and of keys.

    width: heads that are computed at once. row: bytes for a row of that many heads. leave: of those, if only what the
    row does to a state is computed, and its map.
    """

    heads: int
    groups: int
    width: int
    row: int
    leave: int

    @classmethod
    def of(
        cls, heads: int, groups: int, dim: int, values: int, *, beta: bool, device: str, threads: int,
        channels: bool = False,
    ) -> LayerWork:  # fmt: skip
        """The work of a layer. threads: of a rank, on the CPU. channels: heads of one value are computed in steps."""
        kind = "cpu" if device == "cpu" else "cuda"
        width = threads if kind == "cpu" else WIDTH
        row = 2 * (STEP * dim if channels else 6 * dim * values + 4 * CHUNK * (dim + values))
        if kind == "cuda":
            row *= WIDTH  # its rate is that of all heads together
        row = -(-row // RATES[kind])
        if channels:
            return cls(heads, groups, width, row, -(-row // CHUNK))
        return cls(heads, groups, width, row, row * (values + dim) // (2 * max(values, 1)) if beta else row // 2)

    @property
    def blocks(self) -> list[int]:
        """The numbers of blocks into which heads can be cut."""
        return head_cuts(self.heads, self.groups)

    def rounds(self, blocks: int = 1) -> int:
        """How often a device goes through the rows for one block of heads."""
        return -(-self.heads // blocks // self.width)


@lru_cache
def head_cuts(heads: int, groups: int) -> list[int]:
    """The numbers of blocks into which heads can be cut, so that each has whole groups, or part of one."""
    return [n for n in range(1, heads + 1) if not heads % n and not (groups % n and n % groups)]


class LayerBytes(NamedTuple):
    """Bytes that one layer may pass: of a run's state and its map, of a row of all inputs and of the output.

    heads: between which blocks of states are cut. work: None where states are given and not computed. reach: rows
    before a run that its convolution needs. tap: bytes of such a row; tap_grad: of its gradient, which is in the dtype
    of sums.
    """

    heads: int
    state: int
    map: int
    row: int = 0
    out: int = 0
    work: LayerWork | None = None
    reach: int = 0
    tap: int = 0
    tap_grad: int = 0


@dataclass(frozen=True)
class RecurrentLayer:
    """Linear attention, a delta rule, a state space, or a short convolution alone (heads 0).

    heads, key_dim, value_dim: as of `seqpar.recurrent.linear_attention`; a state space has state dim `key_dim` and head
    dim `value_dim`. groups: heads of queries and keys, by default ``heads``. decay: "none", "scalar" for one of each
    head, "channel" for one of each dim of a key, "rates" for `seqpar.recurrent.channel_scan`, where heads are channels
    of value_dim 1 in one group, and key_dim the states of each; without keys if that is 1. delta: whether the delta
    rule updates the state, whose map is then a matrix [K, K]. taps: of the short convolution, 0 without one. channels:
    of that convolution, by default those of queries, keys and values. projections: elements of the layer's matrices,
    into the recurrence and out of it, for the planner.

    Raises ValueError for sizes that contradict each other.
    """

    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    groups: int = 0
    decay: str = "scalar"
    delta: bool = False
    taps: int = 0
    channels: int = 0
    projections: int = 0

    def __post_init__(self) -> None:
        """Check the sizes, and fill in those that follow from others."""
        for field in ("heads", "key_dim", "value_dim", "groups", "taps", "channels", "projections"):
            object.__setattr__(self, field, integer(f"RecurrentLayer: {field}", getattr(self, field), 0, MOST))
        object.__setattr__(self, "groups", self.groups or self.heads)
        if self.taps and not self.channels:
            object.__setattr__(self, "channels", 2 * self.groups * self.key_dim + self.heads * self.value_dim)
        if self.decay not in DECAYS:
            raise ValueError(f"RecurrentLayer: decay must be one of {', '.join(DECAYS)}, got {self.decay!r:.200}")
        sizes = (self.heads, self.groups, self.key_dim, self.value_dim)
        if any(sizes) and not all(sizes):
            raise ValueError(f"RecurrentLayer: heads, groups, key_dim and value_dim are all 0 or none is, got {sizes}")
        if self.heads and self.heads % self.groups:
            raise ValueError(f"RecurrentLayer: heads {self.heads} must be a multiple of groups {self.groups}")
        if self.decay == "rates" and (self.delta or self.value_dim != 1 or self.groups != 1):
            raise ValueError(
                f"RecurrentLayer: decay 'rates' is of channels, with value_dim 1, 1 group and no delta rule, got "
                f"{self.value_dim}, {self.groups} and delta={self.delta}"
            )
        if (self.taps == 0) != (self.channels == 0) or not (self.heads or self.taps):
            raise ValueError(
                f"RecurrentLayer: {self.heads} heads, {self.taps} taps, {self.channels} channels; give heads, or both "
                "taps and channels of a convolution, or all of them"
            )

    @classmethod
    def mamba2(cls, hidden: int, *, heads: int, head_dim: int, groups: int, state: int, taps: int) -> RecurrentLayer:
        """The state space layer of Dao and Gu 2024 (Transformers are SSMs, section 7), with a gate."""
        inner, both = heads * head_dim, groups * state
        projections = hidden * (2 * inner + 2 * both + heads) + inner * hidden
        return cls(heads, state, head_dim, groups, taps=taps, projections=projections)

    @classmethod
    def mamba(cls, hidden: int, *, inner: int, state: int, rank: int, taps: int) -> RecurrentLayer:
        """The selective state space layer of Gu and Dao 2023 (Mamba), with a gate. rank: of the steps' projection."""
        projections = 3 * hidden * inner + inner * (2 * rank + 2 * state) + inner * state  # with the rates
        return cls(inner, state, 1, 1, decay="rates", taps=taps, channels=inner, projections=projections)

    @classmethod
    def rg_lru(cls, hidden: int, *, width: int, heads: int, taps: int) -> RecurrentLayer:
        """The recurrent block of De et al. 2024 (Griffin), whose two gates have a matrix for each head."""
        projections = 3 * hidden * width + 2 * width * width // heads
        return cls(width, 1, 1, 1, decay="rates", taps=taps, channels=width, projections=projections)

    @classmethod
    def lightning(cls, hidden: int, *, heads: int, dim: int) -> RecurrentLayer:
        """The linear attention of MiniMax 2025 (MiniMax-01), with a decay of each head and a gate."""
        return cls(heads, dim, dim, projections=5 * hidden * heads * dim)

    @classmethod
    def gated_delta(
        cls, hidden: int, *, heads: int, groups: int, key_dim: int, value_dim: int, taps: int
    ) -> RecurrentLayer:
        """The gated delta rule of Yang et al. 2024 (Gated Delta Networks, section 3), with a gate."""
        keys, values = groups * key_dim, heads * value_dim
        projections = hidden * (2 * keys + 2 * values + 2 * heads) + values * hidden
        return cls(heads, key_dim, value_dim, groups, delta=True, taps=taps, projections=projections)

    @classmethod
    def kimi_delta(cls, hidden: int, *, heads: int, dim: int, taps: int) -> RecurrentLayer:
        """Kimi delta attention (Kimi Team 2025, section 3); the projections of decay and gate have rank dim."""
        inner = heads * dim
        projections = hidden * (3 * inner + heads) + 2 * dim * (hidden + inner) + inner * hidden
        return cls(heads, dim, dim, decay="channel", delta=True, taps=taps, projections=projections)

    @classmethod
    def short_convolution(cls, hidden: int, *, taps: int) -> RecurrentLayer:
        """The gated convolution of LFM2 (Liquid AI 2025), between two products with projections of the input."""
        return cls(taps=taps, channels=hidden, projections=4 * hidden * hidden)

    def bytes(
        self, dtype: str = "bfloat16", *, gates: str = "float32", device: str = "cuda", threads: int = 1
    ) -> LayerBytes:
        """What the layer may pass. dtype: of q, k, v and the convolution's rows. gates: of decay and beta.

        device: "cuda" or "cpu", with so many threads of a rank. States and maps travel in the dtype of sums.

        Raises: ValueError for a dtype or device that no layer has.
        """
        if device not in RATES:
            raise ValueError(f"device must be one of {', '.join(RATES)}, got {device!r:.200}")
        work = self.heads, self.groups, self.key_dim, self.value_dim
        size, gate = (_size_of(name, given) for name, given in (("dtype", dtype), ("gates", gates)))
        wide = max(size, 4)
        keys, values = 2 * self.groups * self.key_dim, self.heads * self.value_dim
        if self._steps and self.key_dim == 1:
            keys = 0
        mapped = self.key_dim**2 if self.delta else self.key_dim if self.decay in ("channel", "rates") else 1
        return LayerBytes(
            heads=self.heads,
            state=self.key_dim * values * wide,
            map=self.heads * mapped * wide,
            row=(keys + values) * size + self.decays * gate,
            out=values * size,
            work=LayerWork.of(
                *work, beta=self.delta, device=device, threads=integer("threads", threads, 1), channels=self._steps
            )
            if self.heads
            else None,
            reach=max(0, self.taps - 1),
            tap=self.channels * size,
            tap_grad=self.channels * wide,
        )

    @property
    def flops(self) -> int:
        """Forward operations per token, without the projections."""
        k, v, filters = self.key_dim, self.value_dim, 2 * self.taps * self.channels
        if self._steps:
            return self.heads * k * STEP + filters
        pairs = 2 if self.delta else 1  # products of the chunk's keys: with its queries, and with themselves
        products = self.heads if self.decay == "channel" else self.groups
        inside = 2 * CHUNK * (pairs * products * k + self.heads * v)
        solved = self.heads * CHUNK * (k + v) * self.delta
        states = self.heads * 2 * k * v * (3 if self.delta else 2)
        return inside + solved + states + filters

    @property
    def leave_flops(self) -> int:
        """Further operations per token of a run that others continue: its state, and with the delta rule its map."""
        k, v = self.key_dim, self.value_dim
        if self._steps:
            return self.heads * k * STEP // CHUNK
        return self.heads * (4 * k * (v + k) if self.delta else 2 * k * v)

    def kept(self, hidden: int) -> int:
        """Elements per token that the layer keeps for backward, in addition to float32 logarithms of decays.

        The inputs of the norm and of the projections; of the convolution, and what it gives; of the gate and of the
        norm behind the recurrence, and of the last projection. A convolution alone stands between two products.
        """
        width = self.heads * self.value_dim or self.channels
        return 2 * hidden + 2 * self.channels + 3 * width

    @property
    def decays(self) -> int:
        """Decays and betas per token."""
        return self.heads * (self._factors + self.delta)

    @property
    def _factors(self) -> int:
        """Decays of a head and token."""
        return {"none": 0, "scalar": 1, "channel": self.key_dim, "rates": 1}[self.decay]

    @property
    def _steps(self) -> bool:
        """Whether it is computed in steps, as `seqpar.kernels.recurrent.steps` does."""
        return self.decay == "rates"

    @property
    def working(self) -> int:
        """Elements per token, in the dtype of sums, that a layer takes while it is computed, with their gradients."""
        inside = 0 if self._steps else CHUNK * (2 if self.delta else 1)
        rows = 3 * self.key_dim + 2 * self.value_dim
        return 2 * self.heads * (inside + rows + self.key_dim * self.value_dim // CHUNK)


def _size_of(name: str, dtype: object) -> int:
    """Bytes of an element."""
    known = str(dtype).removeprefix("torch.")
    if known not in DTYPE_BYTES:
        raise ValueError(f"{name} must be one of {', '.join(DTYPE_BYTES)}, got {dtype!r:.200}")
    return DTYPE_BYTES[known]
