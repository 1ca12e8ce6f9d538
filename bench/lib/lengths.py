"""Lengths of documents packed to a number of tokens, drawn from the distributions that the field's planners publish.

A histogram counts documents in bins ``(edge, next edge]``; inside a bin lengths are log-uniform. Sources:

- magi: 13.46 million documents of SandAI's training set, ``doc_length_distribution.csv`` of MagiAttention (Apache-2.0).
- wikipedia: 1,000,000 documents in GPT-2 tokens, FlexSP (Wang et al., ASPLOS 2025).
- wlb: 99,519 documents, at most 128K, after WLB-LLM (Wang et al., OSDI 2025), ``dist_wlbllm.json`` of DistCA.
- prolong: 77,932 documents of the ProLong-64K mix (Gao et al. 2024), ``dist_prolong.json`` of DistCA.
- megatron: log-normal, mean 1,024 and sigma 1.5, clipped to [128, 8192], of Megatron-LM's example of dynamic context
  parallelism.
"""

from __future__ import annotations

import numpy as np

OCTAVES = [0, *(16 << i for i in range(16)), 2 << 20]
HISTOGRAMS = {  # edges, documents
    "magi": (
        [0, 10, 50, 100, 200, 500, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 196608],
        [30254, 391188, 699596, 1377757, 3794735, 3316785, 2106566, 988525, 410002, 173574, 115007, 18428, 22513,
         18284],
    ),
    "wikipedia": (
        OCTAVES,
        [912, 4830, 38451, 170261, 202045, 210355, 161233, 108382, 59582, 27959, 11221, 3465, 1027, 228, 42, 6, 1],
    ),
    "wlb": (OCTAVES, [236, 269, 513, 966, 2008, 3900, 7993, 15712, 31793, 33768, 1031, 449, 353, 528, 0, 0, 0]),
    "prolong": (OCTAVES, [0, 0, 0, 0, 0, 0, 11669, 29937, 21002, 11227, 3329, 607, 114, 30, 13, 4, 0]),
}  # fmt: skip
NAMES = (*HISTOGRAMS, "megatron")


def packed(name: str, tokens: int, seed: int = 0, *, most: int | None = None) -> np.ndarray:
    """Lengths of documents of a distribution, in the order drawn; the last is cut so that they sum to ``tokens``.

    most: longer documents are cut into pieces of this length and a rest.
    """
    rng = np.random.default_rng(seed)
    draw = from_megatron(tokens, rng) if name == "megatron" else from_histogram(*HISTOGRAMS[name], tokens, rng)
    if most is not None:
        pieces = [[most] * (n // most) + [n % most] for n in draw.tolist()]
        draw = np.array([n for document in pieces for n in document if n], dtype=np.int64)
    ends = np.minimum(np.cumsum(draw), tokens)
    lengths = np.diff(ends, prepend=0)
    return lengths[lengths > 0]


def from_histogram(edges: list[int], counts: list[int], documents: int, rng: np.random.Generator) -> np.ndarray:
    """A number of lengths drawn from a histogram."""
    share = np.cumsum(counts) / np.sum(counts)
    bins = np.searchsorted(share, rng.random(documents), side="right")
    first, stop = np.array(edges)[bins] + 1, np.array(edges)[bins + 1] + 1
    return np.floor(first * (stop / first) ** rng.random(documents)).astype(np.int64)


def from_megatron(documents: int, rng: np.random.Generator) -> np.ndarray:
    """A number of lengths drawn as in Megatron-LM's example."""
    mean, sigma = 1024, 1.5
    return np.clip(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, documents), 128, 8192).astype(np.int64)
