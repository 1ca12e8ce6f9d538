"""A planning problem, checked once: a batch, the model and machine that compute it, and the ranks' limits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import ArrayLike

from seqpar.facts.layout import RANKS
from seqpar.facts.mask import Mask
from seqpar.facts.value import Ints, integer, lengths_of
from seqpar.planner.cost import Layers
from seqpar.planner.hardware import Hardware
from seqpar.planner.memory import Memory
from seqpar.planner.shape import RECOMPUTE, ModelShape
from seqpar.planner.training import Training

STAGE_BYTES = (8 << 20, 32 << 20, 128 << 20)  # bytes of the keys of a stage


@dataclass(frozen=True, eq=False)
class Problem:
    """A batch to plan, from `plan_batch`'s arguments.

    lengths: int64 [documents]. masks: one for all layers, one per layer, or None for the model's own. memory: of a
    rank. node: consecutive ranks that share fast links, at most all. The limits are checked by `room` and `most`.
    """

    lengths: Ints
    ranks: int
    masks: Mask | Sequence[Mask] | None
    model: ModelShape
    hardware: Hardware
    memory: Memory
    node: int
    token_slack: float
    max_tokens_per_rank: int | None
    lockstep: bool = True
    training: Training | None = None

    @classmethod
    def of(
        cls,
        lengths: ArrayLike | Mask,
        ranks: int,
        *,
        masks: Mask | Sequence[Mask] | None = None,
        model: str | ModelShape = "llama-8b",
        hardware: str | Hardware = "h100",
        node: int | None = None,
        token_slack: float = 0.0,
        max_tokens_per_rank: int | None = None,
        lockstep: bool = True,
        training: Training | None = None,
        at_once: int | None = None,
    ) -> Problem:
        """The problem of `plan_batch`'s arguments. at_once: tokens that must fit together, by default all.

        Raises: ValueError for arguments out of range.
        """
        tokens, ranks = lengths_in(lengths), integer("ranks", ranks, 1, RANKS)
        machine = Hardware.of(hardware)
        together = int(tokens.sum()) if at_once is None else at_once
        if training is not None and not isinstance(training, Training):
            raise ValueError(f"training must be a Training or None, got {training!r:.100}")
        shape, memory = _fitting(model, machine, -(-together // ranks), training, ranks)
        if isinstance(lengths, Mask):
            masks = _masks_of_layers(lengths, masks, shape)
        fast = machine.node if node is None else integer("node", node, 1)
        node = min(ranks, fast)
        machine = machine.among(node)
        if type(lockstep) is not bool:
            raise ValueError(f"lockstep must be True or False, got {lockstep!r:.60}")
        limits = token_slack, max_tokens_per_rank, lockstep
        return cls(tokens, ranks, masks, shape, machine, memory, node, *limits, training)

    def pick(self, documents: Ints) -> Problem:
        """The problem for some of the documents."""
        masks = self.masks
        if documents.size == self.lengths.size or masks is None:
            picked = masks
        elif isinstance(masks, Mask):
            picked = masks.pick(documents)
        else:
            part_of = {mask: mask.pick(documents) for mask in dict.fromkeys(masks)}
            picked = [part_of[mask] for mask in masks]
        return replace(self, lengths=self.lengths[documents], masks=picked)

    @property
    def tokens(self) -> int:
        """Tokens of the batch."""
        return int(self.lengths.sum())

    @cached_property
    def layers(self) -> Layers:
        """The masks of the model's layers with the number of layers of each, the most frequent first.

        Raises: ValueError for masks of other documents, or of another number of layers.
        """
        return layers_of(self.lengths, self.masks, self.model)

    @property
    def most(self) -> int:
        """Rows that fit a rank."""
        if self.max_tokens_per_rank is None:
            return self.memory.rows
        return min(self.memory.rows, integer("max_tokens_per_rank", self.max_tokens_per_rank, 1))

    @property
    def room(self) -> Ints:
        """Rows that each rank may take, int64 [ranks].

        Raises: ValueError if the batch does not fit, naming the fewest ranks on which it does.
        """
        slack, tokens, ranks = self.token_slack, self.tokens, self.ranks
        if not (isinstance(slack, (int, float, np.integer, np.floating)) and 0 <= slack < math.inf):
            raise ValueError(f"token_slack must be a finite number of at least 0, got {slack!r}")
        most = self.most
        if -(-tokens // ranks) > most:
            raise ValueError(self.refusal(tokens))
        # no rank needs more room than eight times all tokens
        mean = int(tokens * (1 + float(min(slack, 8 * ranks)))) // ranks
        return np.full(ranks, min(most, mean + 1), np.int64)

    def refusal(self, tokens: int) -> str:
        """Why this many tokens do not fit, and what to change."""
        memory, ranks, most = self.memory, self.ranks, self.most
        if not most:
            state = f"{memory.state / 1e9:.1f} GB of state, " if memory.state else ""
            remedy = "more ranks, or " if memory.state else ""
            return (
                f"no row fits: a rank needs {memory.fixed / 1e9:.1f} GB for {state}buffers and gathered weights, and "
                f"has {memory.usable / 1e9:.1f} GB; give {remedy}a machine with more memory or a smaller reserve"
            )
        need = -(-tokens // ranks)
        ways = [f"at least {-(-tokens // most)} ranks", f"a batch (or one document) of at most {most * ranks:,} tokens"]
        if int(self.lengths.max()) <= most * ranks:
            ways.insert(1, "several micro-batches (plan_step)")
        return (
            f"{tokens:,} tokens on {ranks} ranks are {need:,} a rank, and a rank holds at most {most:,}; give "
            f"{self.ways_out(*ways, need=need)}"
        )

    def ways_out(self, *ways: str, need: int) -> str:
        """Ways out in words, with what lets a rank hold `need` rows, if anything does: 'at least 3 ranks, or ...'."""
        if need <= self.memory.rows:
            ways += ("a larger max_tokens_per_rank",)
        elif self.max_tokens_per_rank is None or need <= self.max_tokens_per_rank:
            full = replace(self.model, recompute=RECOMPUTE[-1])
            if need <= _memory(full, self.hardware, self.training, self.ranks).rows:
                ways += ('recompute more (ModelShape recompute="full")',)
        return f"{', '.join(ways[:-1])}, or {ways[-1]}"


def lengths_in(batch: ArrayLike | Mask) -> Ints:
    """The lengths of a batch's documents, given as lengths or as a mask."""
    return batch.lengths if isinstance(batch, Mask) else lengths_of("lengths", batch)


def _masks_of_layers(mask: Mask, masks: object, shape: ModelShape) -> Mask | list[Mask]:
    """A batch's mask with the windows of the model's layers."""
    if masks is not None:
        raise ValueError(f"the batch is given as {mask!r}, and masks as well; give one of the two")
    if not shape.attention_count:
        return mask
    return [each for window, count in shape.window_groups() for each in [mask.windowed((window, None))] * count]


def _fitting(
    model: str | ModelShape, machine: Hardware, rows: int, training: Training | None, ranks: int
) -> tuple[ModelShape, Memory]:
    """A model and its memory. A model by name recomputes as little as possible while ``rows`` rows fit, if they can."""
    if isinstance(model, ModelShape):
        return model, _memory(model, machine, training, ranks)
    for recompute in RECOMPUTE:
        shape = _preset(model, recompute) if isinstance(model, str) else ModelShape.preset(model)
        memory = _memory(shape, machine, training, ranks)
        if rows <= memory.rows:
            break
    return shape, memory


@lru_cache(maxsize=64)  # its sizes are checked once, and not for each batch
def _preset(model: str, recompute: str) -> ModelShape:
    return replace(ModelShape.preset(model), recompute=recompute)


@lru_cache(maxsize=64)
def _memory(shape: ModelShape, machine: Hardware, training: Training | None, ranks: int) -> Memory:
    return Memory.of(shape, machine, STAGE_BYTES[-1], training, ranks)


def layers_of(lengths: Ints, masks: Mask | Sequence[Mask] | None, shape: ModelShape) -> Layers:
    """The masks of a model's layers with the number of layers of each, the most frequent first."""
    if masks is None:
        groups = [(Mask(lengths, window=(window, None)), count) for window, count in shape.window_groups()]
    elif isinstance(masks, Mask):
        groups = [(masks, shape.attention_count)]
    else:
        if not isinstance(masks, Sequence) or not all(isinstance(mask, Mask) for mask in masks):
            raise ValueError(f"masks must be a Mask, or one for each layer, got {masks!r:.200}")
        if len(masks) != shape.attention_count:
            raise ValueError(
                f"masks has {len(masks)} masks for the {shape.attention_count} layers with attention of {shape.name}"
            )
        groups = list(Counter(masks).items()) or [(Mask(lengths), 0)]
    for mask, _ in groups:
        if not np.array_equal(mask.lengths, lengths) or mask.kv_lengths is not mask.lengths:
            raise ValueError(f"every mask must have the batch's documents, with as many keys as queries, got {mask!r}")
    return sorted(groups, key=lambda group: -group[1])
