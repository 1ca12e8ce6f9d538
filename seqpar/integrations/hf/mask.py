"""A layer's mask as a rule per document: from transformers' mask functions to bounds.

transformers composes masks of index functions, by factories in its `masking_utils`. Evaluating them would take a value
per pair, and row indices mean nothing once rows are spread over ranks. So the composition is read instead: which
factories, with which numbers. A function of any other origin is refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from seqpar.facts.mask import Mask
from seqpar.facts.value import Ints

MODULE = "transformers.masking_utils"


class Rule(NamedTuple):
    """The keys of its own document that a token sees.

    causal: only those up to itself. left, right: at most so many before and after it. chunk: only those in its own
    stretch of so many tokens. None: no limit.
    """

    causal: bool = False
    left: int | None = None
    right: int | None = None
    chunk: int | None = None

    @property
    def local(self) -> bool:
        """Whether the rule depends on distances."""
        return not (self.left is self.right is self.chunk is None)

    def __and__(self, other: Rule) -> Rule:
        """Both rules at once. Raises: NotImplementedError for chunks of two lengths."""
        if None not in (self.chunk, other.chunk) and self.chunk != other.chunk:
            raise NotImplementedError(f"a mask combines chunks of {self.chunk} and of {other.chunk} tokens")
        return Rule(
            self.causal or other.causal, _least(self.left, other.left), _least(self.right, other.right),
            other.chunk if self.chunk is None else self.chunk,
        )  # fmt: skip

    def under(self, mask: Mask) -> Mask:
        """The rule applied to the documents of a mask, which may be trees.

        Raises: NotImplementedError for rules that no tree has, and for other masks of several bands or early ends.
        """
        if (mask.plain and mask.paths is None) or (self.left or 0) < 0:
            return self.mask(mask.lengths)
        if mask.paths is None or not self.causal or self.chunk is not None:
            raise NotImplementedError(
                f"a layer sees keys by {self}, and the plan has {mask!r}: a tree takes causal layers, with a window or "
                "without, and other masks of several bands or whose keys end early take none"
            )
        return mask.windowed((self.left, None))

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


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def rule_of(function: Callable[..., Any]) -> Rule:
    """The rule that a mask function of transformers describes.

    Raises: NotImplementedError naming a function that is not transformers' own or cannot be expressed as bounds.
    """
    name = function.__qualname__.split(".<locals>")[0]
    closure = {} if "<locals>" not in function.__qualname__ else inspect.getclosurevars(function).nonlocals
    if function.__module__ == MODULE and name in _READERS:
        return _READERS[name](closure)
    raise NotImplementedError(
        f"the mask function {function.__module__}.{function.__qualname__}: seqpar reads those that transformers "
        f"composes of {', '.join(sorted(_READERS))}, as other pairs may have no interval of keys per query"
    )


def _all(closure: dict[str, Any]) -> Rule:
    rule = Rule()
    for part in closure["mask_functions"]:
        rule = rule & rule_of(part)
    return rule


_READERS: dict[str, Callable[[dict[str, Any]], Rule]] = {
    "and_masks": _all,
    "causal_mask_function": lambda closure: Rule(causal=True),
    "bidirectional_mask_function": lambda closure: Rule(),
    "sliding_window_overlay": lambda closure: Rule(left=closure["sliding_window"] - 1),
    "sliding_window_bidirectional_overlay": lambda closure: Rule(False, *[closure["sliding_window"]] * 2),
    "chunked_overlay": lambda closure: Rule(chunk=closure["chunk_size"]),
    # the plan separates documents; on one device these two do, by row numbers that mean nothing on ranks
    "packed_sequence_mask_function": lambda closure: Rule(),
    "remap_positions_for_packed_sequence": lambda closure: rule_of(closure["mask_function"]),
}
