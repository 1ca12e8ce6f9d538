"""A transformer in numbers for the planner: operations, bytes and parameters per token, label and attended pair.

    h hidden    H, G query and key heads    d, e dims of a query and of a value    f ffn    V vocabulary

Matrices of a layer: ``Q [h, H d]``, ``K [h, G d]``, ``V [h, G e]``, ``O [H e, h]`` and the gate, up and down matrices
of an ffn, or of each expert. A multiplication and an addition are two operations. Biases and the norms of heads are
left out: they are less than a thousandth of any count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from seqpar.facts.value import integer
from seqpar.plan.recurrence import MOST, RecurrentLayer
from seqpar.plan.traffic import DTYPE_BYTES
from seqpar.planner import config
from seqpar.planner.blocks import BlockBytes
from seqpar.planner.presets import PRESETS

RECOMPUTE = ("none", "attention", "full")  # what a model given by name tries, in this order
POLICIES = ("none", "attention", "keep-attention", "full", "tiled", "offload")
TILE = 2048  # rows of a tile
OPTIONAL = ("v_dim", "q_rank", "kv_rank", "attention_layers", "ffn_layers")  # sizes that may be None


@dataclass(frozen=True)
class ModelShape:
    """One decoder. Everything that is not a field follows from the fields.

    windows: keys to the left of its own that a query sees, for layer after layer, cyclically; None means all. A config
        that counts the query's own key has one more.
    experts: routed experts of a layer; `active_experts` of them compute a token, in addition to `shared_experts`, which
        compute every token; 0 is a dense model. The first `dense_layers` of a model with experts have an ffn of `ffn`.
    q_rank, kv_rank, rope_dim: ranks of the low-rank projections of queries and keys, and how much of `dim` is rotated
        and shared by the heads (DeepSeek-AI 2024, DeepSeek-V2, section 2.1).
    latents: whether ranks exchange latents of `kv_rank + rope_dim` numbers, which each expands as often as it needs
        them (`seqpar.latent_attention`), instead of keys and values. Needs kv_rank.
    recompute: what backward recomputes: "none"; the "attention" (or recurrent) block from norm to output;
        "keep-attention", all of a layer but attention itself (`seqpar.train.recompute(save_attention=True)`); "full"
        layers; "tiled", full layers with ffn and norms in tiles of `TILE` rows (`seqpar.train.tile`); "offload", the
        same with the layers' inputs in the host's memory.
    recurrent: the layer that `recurrent_layers` of the layers have. The others have attention unless `attention_layers`
        says how many have: all layers if both are in one layer, fewer if some layers have only an ffn. `windows` are of
        the layers with attention. ffn_layers: layers with an ffn or experts, by default all.
    output_gate: whether attention's output is multiplied by a gate of its size, projected from the layer's input.
    qk_norm: whether each head's queries and keys are normalised.
    blocks: what `seqpar.train.trace` measured of each layer. With a `Training`, memory is counted by these.

    Raises ValueError for sizes that contradict each other.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    dim: int
    ffn: int
    vocab: int
    v_dim: int | None = None
    windows: tuple[int | None, ...] = (None,)
    experts: int = 0
    active_experts: int = 0
    shared_experts: int = 0
    expert_ffn: int = 0
    dense_layers: int = 0
    gated: bool = True
    tied: bool = False
    dtype: str = "bfloat16"
    recompute: str = "none"
    q_rank: int | None = None
    kv_rank: int | None = None
    rope_dim: int = 0
    latents: bool = False
    recurrent: RecurrentLayer | None = None
    recurrent_layers: int = 0
    attention_layers: int | None = None
    ffn_layers: int | None = None
    output_gate: bool = False
    qk_norm: bool = False
    blocks: tuple[BlockBytes, ...] = ()

    def __post_init__(self) -> None:
        """Check the sizes."""
        object.__setattr__(self, "windows", tuple(self.windows))
        least = dict.fromkeys(
            ("hidden", "layers", "heads", "kv_heads", "dim", "vocab", "v_dim", "q_rank", "kv_rank"), 1
        )
        least |= dict.fromkeys(("ffn", "experts", "active_experts", "shared_experts", "expert_ffn", "dense_layers"), 0)
        least |= dict.fromkeys(("rope_dim", "recurrent_layers", "attention_layers", "ffn_layers"), 0)
        for field, low in least.items():
            if (value := getattr(self, field)) is not None or field not in OPTIONAL:
                checked = integer(f"ModelShape {self.name!r}: {field}", value, low, MOST)
                object.__setattr__(self, field, checked)
        wrong = [
            (self.heads % self.kv_heads != 0, f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}"),
            (self.dtype not in DTYPE_BYTES, f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}"),
            (self.recompute not in POLICIES, f"recompute must be one of {POLICIES}, got {self.recompute!r}"),
            (len(self.blocks) not in (0, self.layers), f"{len(self.blocks)} traced blocks of {self.layers} layers"),
            (not self.windows, "windows must name at least one layer's window, (None,) for full causal attention"),
            (
                any(w is not None and (type(w) is not int or not 0 <= w <= MOST) for w in self.windows),
                f"windows are integers of at least 0, or None, at most {MOST}, got {self.windows!r:.200}",
            ),
            (self.active_experts > self.experts, f"{self.active_experts} active of {self.experts} experts"),
            (
                self.experts > 0 and (self.active_experts < 1 or self.expert_ffn < 1),
                "a model with experts needs active_experts and expert_ffn of at least 1",
            ),
            (
                self.experts == 0 and (self.shared_experts or self.expert_ffn or self.dense_layers) > 0,
                "shared_experts, expert_ffn and dense_layers need experts, but experts is 0",
            ),
            (self.dense_layers > self.ffn_count, f"{self.dense_layers} dense layers of {self.ffn_count}"),
            (self.dense_count > 0 and self.ffn < 1, f"{self.dense_count} layers are dense, so ffn must be at least 1"),
            (self.rope_dim > self.dim, f"rope_dim {self.rope_dim} exceeds dim {self.dim}"),
            (self.kv_rank is None and self.rope_dim > 0, "rope_dim needs kv_rank, which is None"),
            (self.kv_rank is None and self.latents, "latents need kv_rank, which is None"),
            (
                (self.recurrent is None) != (self.recurrent_layers == 0),
                f"recurrent_layers {self.recurrent_layers} with recurrent {self.recurrent!r}: give both or none",
            ),
            *(
                (not 0 <= count <= self.layers, f"{count} layers of {self.layers} with {what}")
                for what, count in (
                    ("attention", self.attention_count),
                    ("recurrences", self.recurrent_layers),
                    ("an ffn", self.ffn_count),
                )
            ),
            (self.attention_count + self.recurrent_layers == 0, "no layer has attention or a recurrence"),
        ]
        for failed, why in wrong:
            if failed:
                raise ValueError(f"ModelShape {self.name!r}: {why}")

    @classmethod
    def preset(cls, name: str) -> ModelShape:
        """The shape of a published model. Raises ValueError, with the known names, for any other."""
        if not isinstance(name, str) or name not in PRESETS:
            raise ValueError(f"no model is called {name!r}; known: {', '.join(PRESETS)}; or build a ModelShape")
        return cls(name, **PRESETS[name])

    @classmethod
    def from_config(cls, config_or_dict: object, *, name: str | None = None, recompute: str = "none") -> ModelShape:
        """The shape of a Hugging Face config, or of its dict. Raises ValueError naming missing entries."""
        fields: Mapping[str, Any] = config.fields(config_or_dict)
        shape = cls(**(fields if name is None else {**fields, "name": name}))
        return shape if recompute == "none" else replace(shape, recompute=recompute)

    @property
    def values(self) -> int:
        """Elements of a value."""
        return self.dim if self.v_dim is None else self.v_dim

    @property
    def attention_count(self) -> int:
        """Number of layers with attention."""
        return self.layers - self.recurrent_layers if self.attention_layers is None else self.attention_layers

    @property
    def ffn_count(self) -> int:
        """Number of layers with an ffn or experts."""
        return self.layers if self.ffn_layers is None else self.ffn_layers

    @property
    def dense_count(self) -> int:
        """Number of layers with an ffn instead of experts."""
        return self.dense_layers if self.experts else self.ffn_count

    @property
    def sparse_count(self) -> int:
        """Number of layers with experts."""
        return self.ffn_count - self.dense_count

    @property
    def embeddings(self) -> int:
        """Parameters of embedding and head."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """Parameters with embedding, head, norms and routers."""
        norms = (self.attention_count + self.recurrent_layers + self.ffn_count + 1) * self.hidden
        return self.embeddings + norms + self._matrices(self.experts)

    @property
    def linear_flops(self) -> int:
        """Forward operations per token of the matrices of all layers, without the head."""
        return 2 * self._matrices(self.active_experts)

    @property
    def trained_flops(self) -> int:
        """Operations per token of the matrices of all layers in forward and backward, with what is recomputed."""
        expanding = self.attention_count * self.expand_flops  # once more in backward
        if self.recompute in ("none", "attention"):
            return 3 * self.linear_flops + expanding
        # a tile is computed once more, but for its last product
        again = 2 * self._ffn_matrices(self.active_experts) * self.tiles_ffn
        return 4 * self.linear_flops + expanding + again * (4 if self.gated else 3) // 6

    @property
    def tiles_ffn(self) -> bool:
        """Whether the ffn runs in tiles; experts cannot."""
        return self.recompute in ("tiled", "offload") and not self.sparse_count

    @property
    def head_flops(self) -> int:
        """Forward operations per label of the matrix to the logits."""
        return 2 * self.hidden * self.vocab

    @property
    def pair_flops(self) -> int:
        """Forward operations per attended pair and layer. A backward counts 2.5 times as many."""
        return 2 * self.heads * (self.dim + self.values)

    @property
    def expand_flops(self) -> int:
        """Operations per row and layer that make keys and values of a latent; 0 if keys and values are exchanged."""
        expanded = self.kv_heads * (self.dim - self.rope_dim + self.values)
        return 2 * self.kv_rank * expanded if self.latents and self.kv_rank is not None else 0

    @property
    def key_heads(self) -> int:
        """Key heads that are exchanged: of latents one."""
        return 1 if self.latents else self.kv_heads

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer, or of its latent, as they are exchanged."""
        row = (self.kv_rank or 0) + self.rope_dim if self.latents else self.kv_heads * (self.dim + self.values)
        return row * DTYPE_BYTES[self.dtype]

    def window_groups(self) -> list[tuple[int | None, int]]:
        """(window, layers with attention that have it), in the order of first use; one of none without attention."""
        turns, more = divmod(self.attention_count, len(self.windows))
        groups: dict[int | None, int] = {}
        for nth, window in enumerate(self.windows):
            groups[window] = groups.get(window, 0) + turns + (nth < more)
        return [(window, layers) for window, layers in groups.items() if layers] or [(self.windows[0], 0)]

    @property
    def activation_bytes(self) -> int:
        """Bytes of activations kept per token for backward, of all layers, under the `recompute` policy.

        Counted tensor by tensor as in Korthikanti et al. (2022, "Reducing Activation Recomputation in Large Transformer
        Models", section 4.1): for their model this gives their 34 bytes times hidden per layer, less 2 for dropout. As
        in FlashAttention, scores are not kept, but one float32 logarithm per head is. Recomputation keeps a block's
        input, and during a layer's backward that layer's other activations too. Logits are not counted.
        """
        return sum(self.kept_bytes(fused_norms=True))

    def kept_bytes(self, *, fused_norms: bool) -> tuple[int, int]:
        """Bytes per token that all layers keep until backward, and those that one layer recomputes in its backward.

        fused_norms: whether norms keep their input; otherwise they keep a float32 copy and a normalised one.
        """
        size = DTYPE_BYTES[self.dtype]
        norm = 0 if fused_norms else 4 * self.hidden  # what a norm keeps more
        attention = size * self._attention_elements() + 4 * self.heads + norm
        if self.qk_norm and not fused_norms:
            attention += (4 + size) * (self.heads + self.kv_heads) * self.dim
        recurrent = 0
        if self.recurrent is not None:
            recurrent = size * self.recurrent.kept(self.hidden) + 4 * self.recurrent.decays + norm
        mixers = self.attention_count * attention + self.recurrent_layers * recurrent
        dense, sparse = (size * self._ffn_elements(sparse=s) + norm for s in (False, True))
        block = size * self.hidden
        ffns = self.dense_count * dense + self.sparse_count * sparse
        widest = max(dense if self.dense_count else 0, sparse if self.sparse_count else 0)
        both = self.attention_count + self.recurrent_layers
        kinds = attention * (self.attention_count > 0), recurrent
        mixer = max(kinds) if both <= self.layers else sum(kinds)
        if self.recompute == "none":
            return mixers + ffns, 0
        if self.recompute == "attention":
            return min(self.layers, both) * block + ffns, mixer - block
        if self.recompute == "keep-attention":
            saved = (size * self.heads * self.values + 4 * self.heads) * (self.attention_count > 0)
            return self.layers * block + self.attention_count * saved, mixer + widest - block - saved
        if self.recompute == "full":
            return self.layers * block, mixer + widest - block
        tiled = mixer - norm  # norms keep their input alone; the ffn's tiles are gone when the mixer's backward begins
        if self.qk_norm and not fused_norms:
            tiled += 8 * self.heads * self.dim  # two float32 copies in the backward of the queries' norm
        if not self.tiles_ffn:
            tiled = mixer + widest - 2 * norm
        return (0, tiled + block) if self.recompute == "offload" else (self.layers * block, tiled - block)

    @property
    def tile_bytes(self) -> int:
        """Bytes that the backward of a tile works with."""
        size = DTYPE_BYTES[self.dtype]
        return TILE * max(6 * size * self._widest, (4 * size + 12) * self.hidden)

    @property
    def gradient_bytes(self) -> int:
        """Bytes per token of the gradients that are alive at once in a layer's backward.

        They are those of its ffn and its output; with a tiled ffn those of its output and of attention's tensors.
        """
        size = DTYPE_BYTES[self.dtype]
        if not self.tiles_ffn:
            return size * 2 * (self._widest + self.hidden)
        attention = self.heads * (self.dim + self.values) * size + self.row_bytes
        return size * self.hidden + attention * (self.attention_count > 0)

    @property
    def _widest(self) -> int:
        """Width of the widest ffn, of all experts that compute a token."""
        widths = [self.ffn] if self.dense_count else []
        if self.sparse_count:
            widths.append((self.active_experts + self.shared_experts) * self.expert_ffn)
        return max(widths, default=0)

    def _attention_elements(self) -> int:
        """Elements per token that an attention block keeps."""
        q, out = self.heads * self.dim, self.heads * self.values
        kv = 0 if self.latents else self.kv_heads * (self.dim + self.values)
        # Inputs of the low-rank projections' second matrices, before and after their norms; the latter is the latent.
        ranks = 2 * ((self.q_rank or 0) + (self.kv_rank or 0)) + self.rope_dim
        gate = 2 * out * self.output_gate  # the gate, and its product with the output
        # Inputs of the norm and of the projections; the block's output is also the input of the output projection.
        return 2 * self.hidden + q + kv + out + ranks + gate

    def _ffn_elements(self, *, sparse: bool) -> int:
        """Elements per token that an ffn block keeps: the inputs of its norm, its matrices and its nonlinearity."""
        # Gated: gate, up, the gate's activation and the product. Otherwise: the activation's input and output.
        per_unit = 4 if self.gated else 2
        if not sparse:
            return 2 * self.hidden + per_unit * self.ffn
        # A token's copy for each routed expert, and each expert's output until the router's weights have summed them.
        routed = self.active_experts * (2 * self.hidden + per_unit * self.expert_ffn)
        return 2 * self.hidden + self.experts + routed + self.shared_experts * per_unit * self.expert_ffn

    def _matrices(self, experts: int) -> int:
        """Elements of the matrices of all layers, with this many routed experts."""
        h = self.hidden
        if self.q_rank is None:
            q = h * self.heads * self.dim
        else:
            q = self.q_rank * (h + self.heads * self.dim)
        if self.kv_rank is None:
            kv = h * self.kv_heads * (self.dim + self.values)
        else:
            expanded = self.kv_heads * (self.dim - self.rope_dim + self.values)
            kv = h * (self.kv_rank + self.rope_dim) + self.kv_rank * expanded
        attention = q + kv + self.heads * self.values * h * (2 if self.output_gate else 1)
        recurrent = 0 if self.recurrent is None else self.recurrent_layers * self.recurrent.projections
        return self.attention_count * attention + recurrent + self._ffn_matrices(experts)

    def _ffn_matrices(self, experts: int) -> int:
        """Elements of the matrices of all ffns and experts, with this many routed experts."""
        per_ffn = (3 if self.gated else 2) * self.hidden
        sparse = (experts + self.shared_experts) * per_ffn * self.expert_ffn + self.experts * self.hidden
        return self.dense_count * per_ffn * self.ffn + self.sparse_count * sparse
