"""A training step on answers that share a prompt, on one tree, beside a sequence for each answer.

    python -m bench.cpu.shared_prefix --json bench/results/shared_prefix.json      # 1 and 2 processes, some minutes
    python -m bench.cpu.shared_prefix --prompt 64 --answers 16 24 --short 32 --long 128 --turns 2

A decoder in float32, forward and backward, on processes of one core each. A step costs ``a`` seconds a token and ``b``
seconds an attended pair; both follow from causal documents of two lengths, timed in the same turns::

    predicted speed-up    (a tokens + b pairs) of the separate sequences / (a tokens + b pairs) of the tree
    measured speed-up     seconds of the separate sequences / seconds of the tree

The median over turns, and the interval that has the true median in 90 of 100 runs. Outputs of both are compared first.
Exit code 1 if a measured speed-up is below 0.8 of the predicted one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import seqpar
from bench.dsp.latte import cores
from bench.lib import records
from bench.lib.interval import interval
from bench.planner.planned import pinned
from seqpar.comm import Comm
from seqpar.testing import relative_rms, run_processes

DIM, HEADS, KV_HEADS, LAYERS = 512, 8, 2, 2
SHAPE = seqpar.ModelShape(
    "decoder", DIM, LAYERS, HEADS, KV_HEADS, DIM // HEADS, 4 * DIM, vocab=1, gated=False, dtype="float32"
)
LEAST, AGREEMENT = 0.8, 1e-4
CASES = ("short", "long", "separate", "tree")


class Layer(nn.Module):
    """Attention with grouped key heads and two linear layers, as of a decoder."""

    def __init__(self) -> None:
        super().__init__()
        head = DIM // HEADS
        self.qkv, self.out = nn.Linear(DIM, DIM + 2 * KV_HEADS * head), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor, plan: seqpar.Plan, comm: Comm) -> Tensor:
        """x [T, DIM] -> the same."""
        heads = self.qkv(nn.functional.rms_norm(x, (DIM,))).unflatten(-1, (-1, DIM // HEADS))
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], 1)
        x = x + self.out(seqpar.attention(q, k, v, plan, comm).flatten(1))
        return x + self.down(nn.functional.silu(self.up(nn.functional.rms_norm(x, (DIM,)))))


def masks(prompt: int, answers: Sequence[int], short: int, long: int) -> dict[str, seqpar.Mask]:
    """The batches that take turns. The causal documents of two lengths have as many tokens together."""
    return {
        "short": seqpar.Mask([short] * (long // short)),
        "long": seqpar.Mask([long]),
        "separate": seqpar.Mask([prompt + n for n in answers]),
        "tree": seqpar.Mask.shared_prefix([(prompt, answers)]),
    }


def measured(comm: Comm, prompt: int, answers: list[int], short: int, long: int, turns: int) -> dict[str, list[float]]:
    """By batch, this rank's seconds of every turn."""
    torch.set_num_threads(1)
    with pinned(cores()[comm.rank % len(cores())]):
        torch.manual_seed(0)
        model = nn.ModuleList(Layer() for _ in range(LAYERS))
        rows = torch.randn(prompt + sum(answers), DIM)
        steps: dict[str, Callable[[], Tensor]] = {}
        plans: dict[str, seqpar.Plan] = {}
        outs: dict[str, Tensor] = {}
        for name, mask in masks(prompt, answers, short, long).items():
            plans[name] = plan = seqpar.plan_batch(mask, comm.size, model=SHAPE, hardware="cpu")
            whole = _separate(rows, prompt, answers) if name == "separate" else rows
            whole = whole if name in ("separate", "tree") else torch.randn(mask.tokens, DIM)
            steps[name] = partial(_step, model, seqpar.shard(whole, plan, comm.rank), plan, comm)
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(-1, turns):  # the first warms up
            for name in CASES if turn % 2 else reversed(CASES):
                comm.gather("a turn", 0)
                started = time.perf_counter()
                out = steps[name]()
                if turn >= 0:
                    seconds[name].append(time.perf_counter() - started)
                elif name in ("separate", "tree"):
                    outs[name] = seqpar.unshard(out, plans[name], comm)
            if turn < 0:
                _agree(outs["separate"], _separate(outs["tree"], prompt, answers))
        return seconds


def _step(model: nn.ModuleList, x: Tensor, plan: seqpar.Plan, comm: Comm) -> Tensor:
    """Forward and backward; the output."""
    out = x.detach().requires_grad_()
    for layer in model:
        out = layer(out, plan, comm)
    out.sum().backward()
    return out.detach()


def _separate(rows: Tensor, prompt: int, answers: Sequence[int]) -> Tensor:
    """Rows of a tree as those of a sequence for each answer."""
    head, *tails = rows.split([prompt, *answers])
    return torch.cat([part for tail in tails for part in (head, tail)])


def _agree(separate: Tensor, tree: Tensor) -> None:
    if (error := relative_rms(tree, separate)) > AGREEMENT:
        raise ValueError(f"the tree differs from separate sequences by {error:.1e}, relative")


def row(ranks: int, prompt: int, answers: list[int], short: int, long: int, turns: int) -> dict[str, Any]:
    """The figures of one number of processes."""
    found = run_processes(ranks, measured, prompt, answers, short, long, turns, timeout=900.0)
    seconds = {name: [max(turn) for turn in zip(*(rank[name] for rank in found), strict=True)] for name in CASES}
    batches = masks(prompt, answers, short, long)
    shares = []
    for turn in zip(*(seconds[name] for name in CASES), strict=True):
        took = dict(zip(CASES, turn, strict=True))
        tokens, pairs = ({name: count(mask) for name, mask in batches.items()} for count in (_tokens, seqpar.Mask.area))
        b = max(0.0, (took["long"] - took["short"] * tokens["long"] / tokens["short"]))
        b /= pairs["long"] - pairs["short"] * tokens["long"] / tokens["short"]
        a = (took["long"] - b * pairs["long"]) / tokens["long"]
        predicted = [a * tokens[name] + b * pairs[name] for name in ("separate", "tree")]
        shares.append((took["separate"] / took["tree"], predicted[0] / predicted[1]))
    speedup, predicted, share = zip(*((x, y, x / y) for x, y in shares), strict=True)
    figures = {name: [round(x, 3) for x in (statistics.median(v), *interval(v))] for name, v in (
        ("speedup", speedup), ("predicted", predicted), ("share", share)
    )}  # fmt: skip
    tokens = {name: batches[name].tokens for name in ("separate", "tree")}
    medians = {name: round(statistics.median(each), 4) for name, each in seconds.items()}
    sizes = {"prompt": prompt, "answers": answers, "short": short, "long": long}
    return {"ranks": ranks, "turns": turns} | sizes | {"tokens": tokens, "seconds": medians} | figures


def _tokens(mask: seqpar.Mask) -> int:
    return mask.tokens


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows as a table to print."""
    result = Table(title="answers that share a prompt, forward and backward", title_justify="left", box=None)
    for head in ("ranks", "tokens, separate", "tree", "s, separate", "s, tree", "speed-up", "predicted", "share"):
        result.add_column(head, justify="right")
    for each in rows:
        ratios = (each[name] for name in ("speedup", "predicted", "share"))
        told = [f"{m:.2f} ({low:.2f} to {high:.2f})" for m, low, high in ratios]
        counts = [f"{each['tokens'][name]:,}" for name in ("separate", "tree")]
        seconds = [f"{each['seconds'][name]:.3f}" for name in ("separate", "tree")]
        result.add_row(str(each["ranks"]), *counts, *seconds, *told)
    return result


def main() -> int:
    """Measure and print everything; returns 0 if the requirement holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--answers", type=int, nargs="+", default=[128, 256, 384, 512, 512, 640, 768, 896])
    parser.add_argument("--short", type=int, default=512, help="tokens of the shorter causal documents")
    parser.add_argument("--long", type=int, default=4096, help="tokens of the longer one")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    rows = [row(ranks, args.prompt, args.answers, args.short, args.long, args.turns) for ranks in args.ranks]
    Console(width=150).print(table(rows))
    if args.json:
        records.write(args.json, records.environment() | {"rows": rows})
    wrong = [each for each in rows if each["share"][0] < LEAST]
    for each in wrong:
        print(f"{each['ranks']} ranks: {each['share'][0]} of the predicted speed-up, below {LEAST}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
