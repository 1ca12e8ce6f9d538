"""A recurrent layer in numbers for the planner: operations per token, and bytes that pass from run to run.

    H heads    G groups that share queries and keys    K, V dims of a key and of a value; a state is [K, V]

In chunks of C rows a token multiplies, for each head, with the chunk's keys and values, and with one state, as
`seqpar.kernels.recurrent.chunked` does. A multiplication and an addition are two operations; elementwise ones are left
out, as are those of decays.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST = (1 << 31) - 1  # of any size
CHUNK = 64  # rows; ROWS of seqpar.kernels.recurrent.chunked, which the planner may not import


@dataclass(frozen=True)
class RecurrentLayer:
    """Linear attention, a delta rule, a state space, or a short convolution alone (heads 0).

    heads, groups, key_dim, value_dim: as of `seqpar.recurrent.linear_attention`; a state space has state dim `key_dim`
    and head dim `value_dim`. delta: whether the delta rule updates the state, whose map is then a matrix [K, K].
    by_channel: whether each channel of a key has its own decay. taps, channels: of the short convolution, 0 without
    one. projections: elements of the layer's matrices, into the recurrence and out of it.

    Raises ValueError for sizes that contradict each other.
    """

    heads: int = 0
    groups: int = 0
    key_dim: int = 0
    value_dim: int = 0
    delta: bool = False
    by_channel: bool = False
    taps: int = 0
    channels: int = 0
    projections: int = 0

    def __post_init__(self) -> None:
        """Check the sizes."""
        for field in ("heads", "groups", "key_dim", "value_dim", "taps", "channels", "projections"):
            value = getattr(self, field)
            if type(value) is not int or not 0 <= value <= MOST:
                raise ValueError(f"RecurrentLayer: {field} must be an integer from 0 to {MOST}, got {value!r:.60}")
        sizes = (self.heads, self.groups, self.key_dim, self.value_dim)
        if any(sizes) and not all(sizes):
            raise ValueError(f"RecurrentLayer: heads, groups, key_dim and value_dim are all 0 or none is, got {sizes}")
        if self.heads and self.heads % self.groups:
            raise ValueError(f"RecurrentLayer: heads {self.heads} must be a multiple of groups {self.groups}")
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
        return cls(heads, groups, state, head_dim, taps=taps, channels=inner + 2 * both, projections=projections)

    @classmethod
    def gated_delta(
        cls, hidden: int, *, heads: int, groups: int, key_dim: int, value_dim: int, taps: int
    ) -> RecurrentLayer:
        """The gated delta rule of Yang et al. 2024 (Gated Delta Networks, section 3), with a gate."""
        keys, values = groups * key_dim, heads * value_dim
        projections = hidden * (2 * keys + 2 * values + 2 * heads) + values * hidden
        channels = 2 * keys + values
        return cls(heads, groups, key_dim, value_dim, True, taps=taps, channels=channels, projections=projections)

    @classmethod
    def kimi_delta(cls, hidden: int, *, heads: int, dim: int, taps: int) -> RecurrentLayer:
        """Kimi delta attention (Kimi Team 2025, section 3); the projections of decay and gate have rank dim."""
        inner = heads * dim
        projections = hidden * (3 * inner + heads) + 2 * dim * (hidden + inner) + inner * hidden
        return cls(heads, heads, dim, dim, True, True, taps, 3 * inner, projections)

    @classmethod
    def short_convolution(cls, hidden: int, *, taps: int) -> RecurrentLayer:
        """The gated convolution of LFM2 (Liquid AI 2025), between two products with projections of the input."""
        return cls(taps=taps, channels=hidden, projections=4 * hidden * hidden)

    @property
    def flops(self) -> int:
        """Forward operations per token, without the projections."""
        k, v = self.key_dim, self.value_dim
        pairs = 2 if self.delta else 1  # products of the chunk's keys: with its queries, and with themselves
        products = self.groups if not self.by_channel else self.heads
        inside = 2 * CHUNK * (pairs * products * k + self.heads * v)
        solved = self.heads * CHUNK * (k + v) * self.delta
        states = self.heads * 2 * k * v * (3 if self.delta else 2)
        return inside + solved + states + 2 * self.taps * self.channels

    @property
    def leave_flops(self) -> int:
        """Further operations per token of a run that others continue: its state, and with the delta rule its map."""
        k, v = self.key_dim, self.value_dim
        return self.heads * (4 * k * (v + k) if self.delta else 2 * k * v)

    def state_bytes(self, size: int) -> int:
        """Bytes of a run's state, which travels in the dtype of sums. size: of an element of the layer's dtype."""
        return self.heads * self.key_dim * self.value_dim * max(4, size)

    def map_bytes(self, size: int) -> int:
        """Bytes of what a run does to the state that enters it: a matrix, or decays."""
        each = self.key_dim**2 if self.delta else self.key_dim if self.by_channel else 1
        return self.heads * each * max(4, size)

    def halo_bytes(self, size: int) -> int:
        """Bytes of the rows before a run that its convolution needs."""
        return max(0, self.taps - 1) * self.channels * size

    def kept(self, hidden: int) -> int:
        """Elements per token that the layer keeps for backward, besides float32 logarithms of decays.

        The inputs of the norm and of the projections; of the convolution, and what it gives; of the gate and of the
        norm behind the recurrence, and of the last projection. A convolution alone stands between two products.
        """
        width = self.heads * self.value_dim or self.channels
        return 2 * hidden + 2 * self.channels + 3 * width

    @property
    def decays(self) -> int:
        """Decays and betas per token."""
        return self.heads * ((self.key_dim if self.by_channel else 1) + self.delta)

    @property
    def working(self) -> int:
        """Elements per token, in the dtype of sums, that a layer takes while it is computed, with their gradients."""
        inside = CHUNK * (2 if self.delta else 1)
        rows = 3 * self.key_dim + 2 * self.value_dim
        return 2 * self.heads * (inside + rows + self.key_dim * self.value_dim // CHUNK)
