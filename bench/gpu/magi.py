"""The workload that MagiAttention's authors publish, and their figures for it.

Self-attention, batch 1, 64 query and 8 key heads of 128, bf16, full or causal, one document or several; 8K tokens a GPU
on H100 and 16K on B200, on 8 to 64 GPUs. Of several documents, lengths follow their distribution (`bench/lib/lengths`),
and those longer than a quarter of the batch are cut into quarters. A rate is the operations of `bench.gpu.calls.flops`
over the time of the slowest rank and the number of GPUs. Their packs are drawn by another generator than ours.

`PUBLISHED` holds what they show for H100, in TFLOP/s for each GPU. They publish bars and not numbers: the heights were
read off the pictures, to about 3 TFLOP/s. They say that they used experimental features of theirs, and that baselines
run on FlashAttention 3. Their page has B200 as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

import seqpar
from bench.gpu.calls import Setup
from bench.gpu.rows import Row
from bench.lib import lengths
from seqpar.planner import ModelShape

SOURCE = (
    "MagiAttention v1.1.1 (Apache-2.0), docs/source/blog/cp_benchmark.md at commit 36edccedd108, Distributed Level, "
    "For H100, read off assets/magi_attn/exp/distributed/h100/*/flops_report.png"
)
GPUS = (8, 16, 32, 64)
# mask -> method -> TFLOP/s for each GPU, forward and backward, on each number of GPUs
PUBLISHED = {
    "full": {
        "Ulysses": ((605, 576, 585, 620), (577, 577, 583, 578)),
        "Ring P2P": ((512, 535, 518, 514), (498, 519, 513, 506)),
        "Ring AllGather": ((607, 594, 587, 585), (534, 543, 540, 537)),
        "USP": ((581, 603, 594, 605), (572, 589, 587, 582)),
        "LoongTrain": ((579, 602, 597, 604), (571, 578, 573, 577)),
        "Megatron HybridCP": ((509, 534, 522, 514), (497, 517, 513, 505)),
        "MagiAttention, all-to-all-v": ((649, 646, 626, 619), (515, 520, 516, 516)),
        "MagiAttention, native": ((664, 652, 644, 628), (534, 545, 546, 549)),
    },
    "causal": {
        "Ulysses": ((602, 559, 581, 584), (582, 562, 574, 585)),
        "Ring P2P": ((423, 455, 452, 448), (434, 475, 469, 458)),
        "Ring AllGather": ((602, 593, 592, 582), (517, 525, 523, 524)),
        "USP": ((594, 590, 594, 586), (573, 570, 575, 572)),
        "LoongTrain": ((594, 587, 581, 590), (567, 549, 547, 561)),
        "Megatron HybridCP": ((425, 458, 454, 448), (430, 474, 470, 458)),
        "MagiAttention, all-to-all-v": ((610, 589, 579, 572), (503, 510, 502, 497)),
        "MagiAttention, native": ((645, 647, 620, 594), (529, 530, 538, 528)),
    },
    "varlen full": {
        "Ulysses": ((390, 308, 285, 261), (426, 400, 379, 347)),
        "Ring P2P": ((160, 136, 94, 58), (161, 162, 103, 51)),
        "Ring AllGather": ((388, 387, 326, 252), (230, 193, 126, 66)),
        "USP": ((374, 371, 374, 294), (421, 408, 376, 283)),
        "LoongTrain": ((372, 373, 317, 294), (416, 365, 278, 251)),
        "Megatron HybridCP": ((307, 260, 222, 192), (266, 249, 214, 185)),
        "MagiAttention, all-to-all-v": ((462, 420, 377, 302), (412, 425, 407, 355)),
        "MagiAttention, native": ((535, 539, 454, 400), (447, 461, 456, 424)),
    },
    "varlen causal": {
        "Ulysses": ((278, 202, 187, 164), (332, 296, 278, 250)),
        "Ring P2P": ((89, 70, 49, 30), (98, 87, 58, 30)),
        "Ring AllGather": ((289, 293, 243, 183), (179, 157, 106, 57)),
        "USP": ((261, 251, 256, 194), (325, 310, 286, 198)),
        "LoongTrain": ((259, 252, 210, 194), (321, 256, 182, 172)),
        "Megatron HybridCP": ((277, 225, 192, 163), (227, 221, 192, 165)),
        "MagiAttention, all-to-all-v": ((387, 309, 277, 210), (337, 354, 327, 245)),
        "MagiAttention, native": ((459, 426, 317, 237), (361, 372, 333, 264)),
    },
}


@dataclass(frozen=True)
class Workload:
    """One mask of the benchmark. name: as they call it. tokens: of a rank."""

    name: str
    tokens: int
    setup: Setup

    def mask(self, tokens: int) -> seqpar.Mask:
        """The mask over the tokens of all ranks."""
        documents = lengths.packed("magi", tokens, most=tokens // 4) if "varlen" in self.name else [tokens]
        return seqpar.Mask([int(n) for n in documents], causal="causal" in self.name)

    def plans(self, mask: seqpar.Mask, ranks: int) -> dict[str, seqpar.Plan]:
        """The planner's choice, for attention alone and equal shares of rows, and each schedule by itself."""
        s = self.setup
        model = ModelShape("attention", s.heads * s.dim, 1, s.heads, s.kv_heads, s.dim, ffn=1, vocab=1)
        found = {"planned": seqpar.plan_batch(mask.lengths, ranks, masks=mask, model=model)}
        causal = "causal" in self.name
        layout = seqpar.Layout.zigzag(mask.lengths, ranks) if causal else seqpar.Layout.contiguous(mask.tokens, ranks)
        options: dict[str, dict[str, Any]] = {"ring": {"transport": "ring"}, "fetch": {"transport": "fetch"}}
        if s.kv_heads % ranks == 0:
            options["Ulysses"] = {"ulysses": ranks}
        return found | {name: seqpar.Plan(mask, layout, **schedule) for name, schedule in options.items()}

    def published(self, ranks: int) -> dict[str, tuple[int, int]]:
        """Their TFLOP/s for each GPU, forward and backward, by method; nothing for sizes that they do not have."""
        if self.tokens != 8192 or ranks not in GPUS:
            return {}
        n = GPUS.index(ranks)
        return {method: (fwd[n], bwd[n]) for method, (fwd, bwd) in PUBLISHED[self.name].items()}

    def __str__(self) -> str:
        return f"{self.name}, {self.tokens} tokens a rank"


def workloads(tiny: bool) -> list[Workload]:
    """Every mask, at 8K tokens a rank and then at 16K; the last one if tiny."""
    made = {"heads": 64, "kv_heads": 8, "dim": 128, "v_dim": 128}
    small = {"heads": 8, "kv_heads": 2, "dim": 8, "v_dim": 8, "dtype": torch.float32}
    if tiny:
        return [Workload("varlen causal", 32, Setup("varlen causal", (32,), **small))]
    return [Workload(name, n, Setup(name, (n,), **made)) for n in (8192, 16384) for name in PUBLISHED]


def table(rows: Iterable[Row], ranks: int) -> str:
    """Markdown: TFLOP/s for each GPU at 8K tokens, forward / backward, published and, from rows of `magi`, measured."""
    lines = ["| | " + " | ".join(PUBLISHED) + " |", "|---" * (1 + len(PUBLISHED)) + "|"]
    n = GPUS.index(ranks)
    for method in PUBLISHED["full"]:
        both = [methods[method] for methods in PUBLISHED.values()]
        lines.append(f"| {method}, published | " + " | ".join(f"{f[n]} / {b[n]}" for f, b in both) + " |")
    ours: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows:
        name, _, rest = row["case"].partition(", ")
        if row["slice"] == "magi" and row.get("tflops") and rest == f"8192 tokens a rank, {ranks} ranks":
            schedule, mode = row["mode"].split(", ")
            ours.setdefault(f"seqpar {schedule}, {row['kernel']}", {}).setdefault(name, {})[mode] = (
                f"{row['tflops']:.0f}"
            )
    for method, masks in (ours or {"seqpar": {}}).items():
        cells = [masks.get(name, {}) for name in PUBLISHED]
        shown = [f"{c['forward']} / {c['backward']}" if {"forward", "backward"} <= set(c) else "not run" for c in cells]
        lines.append(f"| {method} | " + " | ".join(shown) + " |")
    return "\n".join(lines)
