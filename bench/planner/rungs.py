"""A rung for each block: the exact optimum, `fit`, two rungs, OSDP's knapsack, and one rung everywhere.

    python -m bench.planner.rungs             # 300 random cases by brute force, 200 of models: a minute

Bytes and seconds of a block on a rung are the planner's. Models, machines, ranks and documents are drawn, with rows
between the most that fit without recomputation and the most that fit at all, so that blocks need several rungs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from bench.planner.exact import Blocks, Choice, brute, everywhere, knapsack, optimum, random_blocks, two_rungs
from seqpar.planner import Hardware, ModelShape, Training, plan_batch
from seqpar.planner.ladder import RUNGS as LADDER
from seqpar.planner.ladder import Machine, first_with_room
from seqpar.planner.memory import Memory
from seqpar.planner.problem import STAGE_BYTES

RUNGS = ("none", "keep-attention", "full", "tiled", "offload")  # from the fastest to the smallest
MODELS = ("llama-8b", "qwen3-8b", "llama-70b", "qwen3-30b-a3b", "gpt-30b")
MACHINES = ("h100", "h100-100g", "a100", "h200")
DOCUMENTS = (4096, 32_768, 1 << 40)  # tokens of the longest; of the last, one document
TRAINING = Training(host_bytes=1 << 50)
SLOWER = 0.02  # of a step, that `fit` may take longer
Rule = Callable[[Blocks], Choice]
RULES: dict[str, Rule] = {
    "two neighbouring rungs": lambda blocks: two_rungs(blocks, [(n + 1, n) for n in range(blocks.held.shape[1] - 1)]),
    "two rungs": two_rungs,
    "knapsack": knapsack,
    "recompute always": lambda blocks: everywhere(blocks, RUNGS.index("full")),
    "recompute never": lambda blocks: everywhere(blocks, RUNGS.index("none")),
    "smallest rung always": lambda blocks: everywhere(blocks, len(RUNGS) - 1),
}


def memory_of(model: ModelShape, machine: Hardware, ranks: int, rung: str) -> Memory:
    """Bytes of a rank whose blocks are all on one rung."""
    return Memory.of(replace(model, recompute=rung), machine, STAGE_BYTES[-1], TRAINING, ranks)


def blocks_of(model: ModelShape, machine: Hardware, lengths: list[int], ranks: int) -> tuple[Blocks, float]:
    """A model's blocks on every rung, and the seconds of a step that do not depend on rungs."""
    rows, layers, endless = sum(lengths) // ranks, model.layers, replace(machine, memory=1 << 50)
    held, working, seconds, at_loss = [], [], [], []
    for rung in RUNGS:
        moments = {m.name: m for m in memory_of(model, machine, ranks, rung).moments}
        first, last = moments["first"], moments["last"]
        held.append((last.row - first.row) // (layers - 1) * rows)
        # from the second last block to the first each adds a block's gradient
        ends = [m.bytes(rows) - m.row * rows for m in (first, moments["earlier"], last)]
        fixed = np.linspace(ends[0], ends[1], layers - 1).round().astype(np.int64)
        working.append(np.append(fixed, ends[2]) + first.row * rows)
        at_loss.append(max(moments[name].bytes(rows) for name in ("loss", "head")) - layers * held[-1])
        forecast = plan_batch(lengths, ranks, model=replace(model, recompute=rung), hardware=endless).forecast
        head = float(forecast.phases["head"].max())
        seconds.append((forecast.seconds - head) / layers)
    usable = memory_of(model, machine, ranks, "none").usable
    limits = np.full(layers + 1, usable)
    limits[-1] -= max(at_loss)
    each = np.ones((layers, 1))
    return Blocks((each * held).astype(np.int64), np.stack(working, 1), each * seconds, limits), head


def fitted(blocks: Blocks, model: ModelShape, machine: Hardware, lengths: list[int], ranks: int) -> Choice:
    """What `fit` takes for one micro-batch of these documents."""
    at, rows = Machine(model, machine, TRAINING, ranks), sum(lengths) // ranks
    names = [name for name, (_, whole_logits) in LADDER.items() if not whole_logits and name != "state-on-host"]
    mixes = [first_with_room(at, part, rows) for part in at.mixes(names)]
    order = np.arange(model.layers)
    chosen = [np.where(order < mix.number, RUNGS.index(mix.first), RUNGS.index(mix.rest)) for mix in mixes]
    return min(Choice(blocks.time(rungs), tuple(rungs.tolist())) for rungs in chosen)


def cases(count: int, seed: int = 0) -> Iterator[tuple[ModelShape, Hardware, list[int], int]]:
    """Models, machines, documents and ranks."""
    rng = np.random.default_rng(seed)
    while count:
        model, machine = ModelShape.preset(rng.choice(MODELS)), Hardware.preset(rng.choice(MACHINES))
        ranks, longest = int(rng.choice([8, 16, 32, 64, 128])), int(rng.choice(DOCUMENTS))
        least, most = (memory_of(model, machine, ranks, rung).rows for rung in (RUNGS[0], RUNGS[-1]))
        rows = int(least + rng.random() ** 2 * (most - least)) // 64 * 64
        if 0 < rows <= 1 << 18:
            tokens, count = rows * ranks, count - 1
            full, rest = divmod(tokens, longest)
            yield model, machine, [longest] * full + [rest] * (rest > 0), ranks


def main() -> int:
    """Compare all rules; 1 if the solver is not exact, or `fit` is more than 2 % of a step slower."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    drawn = [random_blocks(rng) for _ in range(300)]
    wrong = sum(optimum(blocks).seconds != brute(blocks).seconds for blocks in drawn)
    print(f"the solver differs from brute force in {wrong} of {len(drawn)} random cases", flush=True)
    steps: dict[str, list[float]] = {name: [] for name in ("fit", *RULES)}
    for model, machine, lengths, ranks in cases(args.cases):
        blocks, head = blocks_of(model, machine, lengths, ranks)
        best = optimum(blocks).seconds + head
        steps["fit"].append((fitted(blocks, model, machine, lengths, ranks).seconds + head) / best)
        for name, rule in RULES.items():
            steps[name].append((rule(blocks).seconds + head) / best)
    for name, ratios in steps.items():
        fits = np.isfinite(ratios)
        middle, worst = np.median(np.array(ratios)[fits]), np.max(np.array(ratios)[fits])
        print(
            f"{name:24s} fits {fits.sum():3d} of {len(ratios)}; a step {middle:.3f} of the optimum's, most {worst:.3f}"
        )
    two = max(steps["fit"])
    return 1 if wrong or two > 1 + SLOWER else 0


if __name__ == "__main__":
    sys.exit(main())
