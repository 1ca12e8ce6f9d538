"""A layer's mask as a rule per document: from transformers' mask functions to bounds.

transformers composes masks of index functions, by factories in its `masking_utils`. Evaluating them would take a value
per pair, and row indices mean nothing once rows are spread over ranks. So the composition is read instead: which
factories, with which numbers. A function of any other origin is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from operator import and_, or_
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from seqpar.facts.mask import Mask
from seqpar.facts.value import Ints
from seqpar.private.transformers import factory_of


class UnsupportedMask(NotImplementedError):
    """Why a mask cannot be made. It stands in the place of the mask: a layer that uses it raises it, if any does."""

    @property
    def ndim(self) -> int:
        """Raise it: code that reads this makes another mask of it."""
        raise self


class Rule(NamedTuple):
    """The keys of its own document that a token sees.

    causal: only those up to itself. left, right: at most so many before and after it. chunk: only those in its own
    stretch of so many tokens. None: no limit. block: which keys a token of a block, such as an image, sees: ""
    the same as other tokens, "ahead" these up to the end of its block, "whole" these and all of its block, "alone" only
    its block.
    """

    causal: bool = False
    left: int | None = None
    right: int | None = None
    chunk: int | None = None
    block: str = ""

    @property
    def local(self) -> bool:
        """Whether the rule depends on distances."""
        return not (self.left is self.right is self.chunk is None)

    def __and__(self, other: Rule) -> Rule:
        """Both rules at once. Raises: NotImplementedError for chunks of two lengths, and for limits inside blocks."""
        if None not in (self.chunk, other.chunk) and self.chunk != other.chunk:
            raise NotImplementedError(f"a mask combines chunks of {self.chunk} and of {other.chunk} tokens")
        for one, limit in ((self, other), (other, self)):
            if one.block and (limit.causal or limit.block or (limit.local and one.block != "ahead")):
                raise NotImplementedError(f"a mask limits blocks of tokens: {one} and {limit}")
        return Rule(
            self.causal or other.causal, _least(self.left, other.left), _least(self.right, other.right),
            other.chunk if self.chunk is None else self.chunk, self.block or other.block,
        )  # fmt: skip

    def __or__(self, other: Rule) -> Rule:
        """A causal rule or a block's. Raises: NotImplementedError for others."""
        rule = other if self == BLOCK else self
        if BLOCK not in (self, other) or rule.block or not rule.causal:
            raise NotImplementedError(f"a mask is the union of {self} and {other}, not of a causal rule and blocks")
        return rule._replace(block="whole" if rule.local else "ahead")

    def under(self, mask: Mask, *, stated: bool = False) -> Mask:
        """The mask of a layer with this rule, under a plan with that mask.

        Plain causal documents state documents alone, to which the rule applies; full ones do so for layers that are not
        causal. Any other mask is that of causal layers without limits. In a tree a window counts along the path.
        stated: whether the mask states documents alone, whichever it is.

        Raises: UnsupportedMask for other rules and masks, and for blocks, which a plan does not contain.
        """
        if self.block:
            raise UnsupportedMask(
                "a layer sees blocks of tokens, such as images, to their end; give the whole model to "
                "seqpar.parallelize(model, comm), and ordinary batches with token_type_ids"
            )
        own = self.mask(mask.lengths)
        if stated or (self.left or 0) < 0 or mask in (own, Mask(mask.lengths)):
            return own
        if not self.causal and mask == Mask(mask.lengths, causal=False):
            return own
        if mask.paths is not None and mask.paths.alone and self.causal and self.chunk is None:
            return mask.windowed((self.left, None))
        if self != Rule(causal=True):
            raise self.unlike(mask)
        return mask

    def unlike(self, mask: Mask) -> UnsupportedMask:
        """The error for a layer with this rule under a plan with that mask."""
        return UnsupportedMask(
            f"a layer sees keys by {self}, and the plan has {mask!r}: causal layers without limits compute it, and of "
            "a tree those with a window; make the plan with Mask(lengths), and each layer sees keys by its own rule"
        )

    def mask(self, lengths: Ints) -> Mask:
        """The rule applied to packed documents."""
        right = 0 if self.causal else self.right
        at = np.arange(lengths.sum())
        if self.left is not None and self.left < 0:  # a window of 0 keys, used for a window that no layer has
            return Mask.from_bounds(at, at, lengths=lengths)
        if self.chunk is None:
            return Mask(lengths, causal=self.causal, window=(self.left, None if self.causal else right))
        start = np.repeat(np.cumsum(lengths) - lengths, lengths)
        end = start + np.repeat(lengths, lengths)
        lo = start + (at - start) // self.chunk * self.chunk
        hi = np.minimum(lo + self.chunk, end)
        lo = lo if self.left is None else np.maximum(lo, at - self.left)
        hi = hi if right is None else np.minimum(hi, at + right + 1)
        return Mask.from_bounds(lo, hi, lengths=lengths)


BLOCK = Rule(block="alone")


class Blocks(NamedTuple):
    """Stretches of tokens that see each other, each inside one document: first tokens and ends, ascending."""

    starts: Ints
    ends: Ints

    def mask(self, rule: Rule, without: Mask, causal: Mask) -> Mask:
        """The mask of a causal rule with blocks. without, causal: the mask of its limits alone, and without blocks."""
        at = np.arange(causal.tokens)
        first, last = at.copy(), at + 1
        size = self.ends - self.starts
        inside = np.repeat(self.starts - np.cumsum(size) + size, size) + np.arange(size.sum())
        first[inside], last[inside] = np.repeat(self.starts, size), np.repeat(self.ends, size)
        lo, hi = causal.bounds(at)
        if rule.block == "whole":
            lo, hi = np.minimum(lo, first), np.maximum(hi, last)
        else:
            hi = np.maximum(hi, np.minimum(last, without.bounds(at)[1]))
        return Mask.from_bounds(lo, hi, lengths=causal.lengths)


class MaskSummary(NamedTuple):
    """The masks of a rank. rules: each without blocks, and how it has them. starts, lengths, numbers: of its blocks."""

    rules: dict[Rule, str]
    starts: Ints
    lengths: Ints
    numbers: Ints


def stretches(ids: Ints, document: Ints) -> tuple[Ints, Ints, Ints]:
    """First tokens, lengths and numbers of blocks, one inside one document. ids: of each token, below 0 outside."""
    begin = np.flatnonzero(np.diff(ids, prepend=-2) | np.diff(document, prepend=-1))
    size, number = np.diff(np.append(begin, ids.size)), ids[begin]
    inside = number >= 0
    return begin[inside], size[inside], number[inside]


def united(every: list[MaskSummary], lengths: list[Ints]) -> tuple[dict[Rule, str], Blocks]:
    """The rules of all ranks, and the blocks of the union, cut where documents end. lengths: of each rank's documents.

    Raises: NotImplementedError for ranks whose masks have blocks in two ways, and for blocks in several stretches.
    """
    rules: dict[Rule, str] = {}
    for rule, block in (item for told in every for item in told.rules.items()):
        if block and rules.get(rule):
            if rules[rule] != block:
                raise NotImplementedError(
                    f"tokens attend in both directions by different rules on ranks: {rules[rule]} and {block}"
                )
        elif block or rule not in rules:
            rules[rule] = block
    first = np.cumsum([0, *(int(each.sum()) for each in lengths)])
    edges = np.cumsum(np.concatenate([[0], *lengths]))
    starts = np.concatenate([told.starts + begin for told, begin in zip(every, first)])
    ends = starts + np.concatenate([told.lengths for told in every])
    numbers = np.concatenate([told.numbers for told in every])
    document = np.searchsorted(edges, starts, side="right") - 1
    pieces = np.searchsorted(edges, ends - 1, side="right") - document
    which = np.repeat(np.arange(starts.size), pieces)
    document = document[which] + np.arange(which.size) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    if len({*zip(document.tolist(), numbers[which].tolist())}) < which.size:
        raise NotImplementedError("a block of tokens that see each other lies in several stretches of a document")
    return rules, Blocks(np.maximum(starts[which], edges[document]), np.minimum(ends[which], edges[document + 1]))


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def rule_of(function: Callable[..., Any]) -> Rule:
    """The rule that a mask function of transformers describes.

    Raises: NotImplementedError naming a function that is not transformers' own or cannot be expressed as bounds.
    """
    name, given = factory_of(function)
    if name in _READERS:
        return _READERS[name](given)
    raise NotImplementedError(
        f"the mask function {function.__module__}.{function.__qualname__}: seqpar reads those that transformers "
        f"composes of {', '.join(sorted(_READERS))}, as other pairs may have no interval of keys per query"
    )


def blocks_of(function: Callable[..., Any]) -> Tensor | None:
    """The number of each token's block, [B, S] and below 0 outside of blocks, of a mask that `rule_of` can read.

    Raises: NotImplementedError for masks of several kinds of blocks.
    """
    name, closure = factory_of(function)
    if name == "blockwise_overlay":
        ids: Tensor = closure["block_sequence_ids"]
        return ids
    parts = [*closure.get("mask_functions", ())]
    if closure.get("mask_function") is not None:
        parts.append(closure["mask_function"])
    found = [ids for ids in map(blocks_of, parts) if ids is not None]
    if any(not ids.equal(found[0]) for ids in found[1:]):
        raise NotImplementedError("a mask lets tokens attend in both directions by two different rules")
    return found[0] if found else None


_READERS: dict[str, Callable[[Mapping[str, Any]], Rule]] = {
    "and_masks": lambda closure: reduce(and_, map(rule_of, closure["mask_functions"]), Rule()),
    "or_masks": lambda closure: reduce(or_, map(rule_of, closure["mask_functions"])),
    "blockwise_overlay": lambda closure: BLOCK,
    "causal_mask_function": lambda closure: Rule(causal=True),
    "bidirectional_mask_function": lambda closure: Rule(),
    "sliding_window_overlay": lambda closure: Rule(left=closure["sliding_window"] - 1),
    "sliding_window_bidirectional_overlay": lambda closure: Rule(False, *[closure["sliding_window"]] * 2),
    "chunked_overlay": lambda closure: Rule(chunk=closure["chunk_size"]),
    # the plan separates documents; on one device these two do, by row numbers that mean nothing on ranks
    "packed_sequence_mask_function": lambda closure: Rule(),
    "remap_positions_for_packed_sequence": lambda closure: rule_of(closure["mask_function"]),
}
