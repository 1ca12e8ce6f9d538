"""Places batches under four masks by other packages' policies and by this one's, beside their published ratios.

    python -m bench.planner.masks                                      # 16 ranks, about two minutes
    python -m bench.planner.masks --batches 2 --masks lambda,causal --json bench/results/masks.json

The masks are those of DCP's evaluation (Jiang et al. 2025, SOSP; defined in ``dcp/runtime/flash_attention/utils.py`` of
github.com/chenyu-jiang/dcp at 7384c2c), by document:

    causal             up to the query's own key
    lambda             the first 64 keys, and the last 4,096 up to its own
    shared question    a fifth is a question, followed by four answers of equal length, which see it and themselves
    causal blockwise   blocks of 256: the first block and the last 512 keys before its own; the last block sees all

Each batch has 131,072 tokens on 16 ranks, in two settings as in that paper: attention alone, 8 query heads on 2 key
heads, in nodes of 4 A100 with 100 Gb/s; and a training step of a quarter of Llama-8B, as tensor parallelism over 4 GPUs
leaves it, in nodes of 8 A100 with 400 Gb/s, layers recomputed. Lengths are from a distribution of `bench.lib.lengths`:
those of the paper's data sets are not published. All policies have this package's kernels, which skip what a mask
hides, its sizes of stages and its cost model. So plans are compared, not systems, and published ratios, which also
hold their systems' kernels and transports, stand beside and are fitted to nothing:

    ring               Megatron-LM's static context parallelism as DCP ran it with Transformer Engine: documents zigzag
                       over all ranks, all keys around, heads shared by up to as many ranks as there are key heads
    dynamic groups     Megatron-LM's dynamic context parallelism, which looks at squared lengths and at no mask
    dispatch           MagiAttention's chunks of equal length, balanced by their exact pairs
    bytes first        DCP's blocks, partitioned greedily
    seqpar             this package's plan

A rival's knob is the best of a sweep for each mask.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.lib import lengths as published
from bench.lib import records
from bench.planner.policies import Policy, bytes_first, dispatch, megatron, ours
from bench.planner.schedules import Case, Micro, run, shared_by_count
from seqpar import Layout, Mask, Plan
from seqpar.facts.value import Ints
from seqpar.planner import Hardware, ModelShape

RANKS, TOKENS = 16, 131_072
SINKS, WINDOW = 64, 4096
QUESTION, ANSWERS = 0.2, 4
BLOCK, LOCAL = 256, 2


def _sinks(lengths: Ints) -> Mask:
    return Mask(lengths, window=(WINDOW - 1, None), sink_tokens=SINKS)


def _questions(lengths: Ints) -> Mask:
    groups = []
    for length in lengths.tolist():
        question = int(length * QUESTION)
        each = (length - question) // ANSWERS
        groups.append((question, [each] * (ANSWERS - 1) + [length - question - (ANSWERS - 1) * each]))
    return Mask.shared_prefix(groups)


def _blockwise(lengths: Ints) -> Mask:
    near = Mask(lengths, window=(LOCAL * BLOCK, None), sink_tokens=BLOCK)
    stop = np.cumsum(lengths)
    last = stop - ((lengths - 1) % BLOCK + 1)  # where each document's last block begins
    whole = Mask.from_slices(
        np.stack([last, stop], 1), np.stack([stop - lengths, stop], 1), ["causal"] * lengths.size, tokens=int(stop[-1]),
        lengths=lengths,
    )  # fmt: skip
    return near | whole


MASKS: dict[str, Callable[[Ints], Mask]] = {
    "causal": Mask, "lambda": _sinks, "shared question": _questions, "causal blockwise": _blockwise,
}  # fmt: skip


def _machine(node: int, gigabits: int, gpus: int) -> Hardware:
    machine = Hardware.preset("a100")
    bandwidth = gigabits * 1e9 / 8 / gpus
    return replace(machine, node=node, across=replace(machine.across, bandwidth=bandwidth))


_LLAMA = ModelShape.preset("llama-8b")
SETTINGS: dict[str, tuple[ModelShape, Hardware]] = {
    "attention": (
        ModelShape("attention", hidden=1, layers=1, heads=8, kv_heads=2, dim=128, ffn=1, vocab=1),
        _machine(4, 100, 4),
    ),
    # tensor parallelism leaves 2 ranks a node, and each has the links of its 4 GPUs only for its own quarter of heads
    "step": (
        replace(_LLAMA, heads=8, kv_heads=2, ffn=_LLAMA.ffn // 4, vocab=_LLAMA.vocab // 4, recompute="full"),
        _machine(2, 400, 8),
    ),
}


def case_of(setting: str, mask: str, distribution: str, index: int) -> Case:
    """A batch in a setting. A rank holds at most twice the mean of the rows."""
    shape, machine = SETTINGS[setting]
    lengths = published.packed(distribution, TOKENS, index, most=TOKENS)
    room = 2 * TOKENS // RANKS
    return Case.of(lengths, RANKS, shape, machine, micro=0.0, room=room, mask=MASKS[mask](lengths))


def _static(case: Case, _: None) -> list[Micro]:
    return [Micro(0, case.ranks, np.arange(case.lengths.size))]


POLICIES: dict[str, Policy] = {
    "ring": Policy(_static, lambda case: [None], ways=("ring",)),
    "dynamic groups": Policy(megatron, lambda case: [case.mean // 2, case.mean, case.room], ways=("ring",)),
    "dispatch": Policy(dispatch, lambda case: [512, 1024, 2048], ways=("fetch",)),
    "bytes first": Policy(
        bytes_first, lambda case: [(b, part) for b in (512, 1024, 2048) for part in (0.03, 0.1)], ways=("fetch",)
    ),
    "seqpar": Policy(ours, lambda case: [False], ways=("fetch",)),
}


def plans_of(case: Case, micros: Sequence[Micro], ways: Sequence[str]) -> Iterator[Plan]:
    """The plans of micro-batches, as they are priced."""
    for micro in micros:
        mask = case.layers_for(micro.documents)[0][0]
        if micro.layout is not None:
            node = case.machine.node if micro.forwarded == (True,) else None
            yield Plan(mask, micro.layout, ulysses=1 if micro.ulysses is None else micro.ulysses.tolist(), node=node)
        else:
            way = shared_by_count(case, micro, ways)
            layout = Layout.zigzag(mask.lengths, micro.width)
            yield Plan(mask, layout, transport=way.transport, ulysses=way.ulysses)


def moved(case: Case, micros: Sequence[Micro], ways: Sequence[str]) -> int:
    """The bytes that all ranks send in the forward of a layer."""
    shape = case.shape
    call = {"heads": shape.heads, "kv_heads": shape.kv_heads, "dim": shape.dim, "dtype": shape.dtype}
    return sum(plan.bytes(rank, **call) for plan in plans_of(case, micros, ways) for rank in range(plan.ranks))


class Figure(NamedTuple):
    """A policy under a mask: seconds, times over the bound, bytes moved in a layer's forward; means over batches."""

    setting: str
    mask: str
    policy: str
    knob: str
    batches: int
    seconds: float
    over: float
    moved: float


def figures(setting: str, mask: str, distribution: str, batches: int, note: Callable[[], None]) -> list[Figure]:
    """The figures of all policies, each with the knob that is best for it over the batches."""
    cases = [case_of(setting, mask, distribution, index) for index in range(batches)]
    rows = []
    for name, policy in POLICIES.items():
        tried: dict[str, list[tuple[int, Case, list[Micro]]]] = {}
        for case in cases:
            for knob in policy.knobs(case):
                micros = policy.place(case, knob)
                if micros is not None:
                    tried.setdefault(str(knob), []).append((run(case, micros, policy.ways).free, case, micros))
        whole = {knob: found for knob, found in tried.items() if len(found) == batches}
        best = min(whole, key=lambda knob: sum(ticks for ticks, *_ in whole[knob]))
        seconds = [ticks * case.weights.second for ticks, case, _ in whole[best]]
        over = [ticks / case.bound for ticks, case, _ in whole[best]]
        sent = [moved(case, micros, policy.ways) for _, case, micros in whole[best]]
        means = (float(np.mean(x)) for x in (seconds, over, sent))
        rows.append(Figure(setting, mask, name, best, batches, *means))
        note()
    return rows


# How many times faster than their baselines, as published. DCP: its abstract for attention; for steps the bars of its
# artifact (docs/figures/reference/end_to_end, 64 A100, 8B, Megatron-LM with Transformer Engine, two data sets cut at
# 131,072 tokens), read off to about 1 %. MagiAttention: over the ring of its own comparison, forward of packed causal
# documents on 16 H100, 426 and 69 TFLOP/s a GPU, read off its figure. Megatron-LM: the README of its dynamic context
# parallelism, over groups of 4, on 4 to 64 GPUs. They publish no figure for other masks.
PUBLISHED: dict[tuple[str, str, str], str] = {
    ("attention", "bytes first", "causal"): "1.19 to 2.45",
    **{("attention", "bytes first", mask): "2.15 to 3.77" for mask in MASKS if mask != "causal"},
    ("step", "bytes first", "causal"): "0.99, 1.05",
    ("step", "bytes first", "lambda"): "1.23, 1.46",
    ("step", "bytes first", "shared question"): "1.15, 1.16",
    ("step", "bytes first", "causal blockwise"): "1.26, 1.36",
    ("attention", "dispatch", "causal"): "6.2",
    ("step", "dynamic groups", "causal"): "1.21 to 1.50",
}


def tables(rows: Sequence[Figure]) -> Iterator[Table]:
    """For each setting: times over the bound with bytes, and how much faster than the ring, published and simulated."""
    for setting in dict.fromkeys(row.setting for row in rows):
        mine = {(row.mask, row.policy): row for row in rows if row.setting == setting}
        masks = list(dict.fromkeys(mask for mask, _ in mine))
        shown = Table("mask", *POLICIES, title=f"{setting}: time / bound, and GB sent in the forward of a layer")
        faster = Table("mask", *list(POLICIES)[1:], title=f"{setting}: times faster than the ring (published)")
        for mask in masks:
            own = [mine[mask, name] for name in POLICIES]
            shown.add_row(mask, *(f"{row.over:.3f}  {row.moved / 1e9:.3f}" for row in own))
            cells = []
            for row in own[1:]:
                theirs = PUBLISHED.get((setting, row.policy, mask))
                cells.append(f"{own[0].seconds / row.seconds:.2f}" + (f" ({theirs})" if theirs else ""))
            faster.add_row(mask, *cells)
        yield shown
        yield faster


def main(given: Sequence[str] | None = None) -> None:
    """Places the batches and shows the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=8, help="of each mask and setting")
    parser.add_argument("--distribution", default="wlb", choices=[*published.HISTOGRAMS, "megatron"])
    parser.add_argument("--masks", default=",".join(MASKS), help="some of them, separated by commas")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args(given)
    masks = args.masks.split(",")
    if unknown := set(masks) - set(MASKS):
        parser.error(f"--masks: {', '.join(sorted(unknown))} unknown; known: {', '.join(MASKS)}")
    console, rows = Console(width=150), []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("policies", total=len(SETTINGS) * len(masks) * len(POLICIES))
        for setting in SETTINGS:
            for mask in masks:
                rows += figures(setting, mask, args.distribution, args.batches, lambda: progress.advance(task))
    for table in tables(rows):
        console.print(table)
    if args.json:
        settings: dict[str, Any] = {"ranks": RANKS, "tokens": TOKENS, "distribution": args.distribution}
        found = [row._asdict() for row in rows]
        records.write(args.json, records.environment() | {"settings": settings, "rows": found})


if __name__ == "__main__":
    main()
