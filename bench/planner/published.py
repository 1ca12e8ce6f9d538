"""Compares the simulator with the published figures of two systems, on which trust in all its other figures rests.

    python -m bench.planner.published [--batches 8] [--seconds 5] [--json FILE]

- FlexSP (Wang et al. 2025, ASPLOS): 1.72 times DeepSpeed-Ulysses of one degree, GPT of 7B, Wikipedia cut at
  192K, 512 documents, 64 A100, and 1.34 for its own choice of one degree for each batch. Its published cost constants,
  memory and all-to-all bandwidths are those of the preset ``a100-flexsp``; every round pays its constant of 629.4 ms.
  HiGHS gets the seconds for each round that SCIP had, and as few rounds as fit or up to two more, of their four.
- Megatron-LM's README of dynamic context parallelism (examples/dynamic_context_parallel, runs of June 2026): 1.285,
  1.412, 1.212, 1.375 and 1.495 times groups of 4 on 4 to 64 GPUs, 4 to a node; 12 layers of 2048, 8 documents for each
  group, log-normal lengths, 2,048 rows a rank. The README names no GPU; ``h100`` stands in.

Nothing is fitted to these figures. The second comes from steps of some 100 ms with a few milliseconds of kernels. There
the fixed cost of a micro-batch decides, which the README does not give, so a range of it is shown.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.lib import lengths as published
from bench.lib import records
from bench.planner.policies import Schedule, flexsp, megatron, static
from bench.planner.schedules import Case, Micro, run
from seqpar.planner import Hardware, ModelShape

TOLERANCE = 0.1
CAPACITY = (28 * 1024, 4.48)  # MiB of memory, and of a token, of FlexSP's 7B
BETA = 0.6294  # seconds of a published micro-batch
GAINS = {4: 1.285, 8: 1.412, 16: 1.212, 32: 1.375, 64: 1.495}
MICROS = (0.0, 0.01, 0.1)


class Line(NamedTuple):
    """A figure as published and as simulated."""

    what: str
    published: float
    simulated: float

    @property
    def off(self) -> float:
        """By how much the simulated figure exceeds the published one."""
        return self.simulated / self.published - 1


def flexsp_case(index: int) -> Case:
    """A batch of FlexSP's experiment. Degree 64 of its 32 heads is priced in equal parts, as there."""
    rng = np.random.default_rng(index)
    drawn = published.from_histogram(*published.HISTOGRAMS["wikipedia"], 512, rng)
    shape, machine = ModelShape.preset("gpt-7b"), Hardware.preset("a100-flexsp")
    memory, token = CAPACITY
    rows = int((memory - 16 * shape.parameters / 64 / 2**20) / token)
    case = Case.of(np.minimum(drawn, 192 * 1024), 64, shape, machine, micro=BETA, room=rows)
    return replace(case, weights=replace(case.weights, heads=64, kv_heads=64, label=0))


def flexsp_lines(batches: int, seconds: float, note: Callable[[], None]) -> list[Line]:
    """FlexSP's speed-ups in lockstep, over the static degree that holds its longest document, and over the best."""
    ways = ("ulysses",)
    static_, adaptive, solved = [], [], []
    for index in range(batches):
        case = flexsp_case(index)
        one = {width: static(case, width) for width in case.widths[1:]}
        # the first micro-batch costs as much as the others here
        fixed = {w: run(case, m, ways).lockstep + case.micro for w, m in one.items() if m is not None}
        least = -(-int(case.lengths.sum()) // (case.room * case.ranks))
        tried = [flexsp(case, (least + more, ways, seconds)) for more in range(3)]
        static_.append(fixed[64])
        adaptive.append(min(fixed.values()))
        solved.append(min(run(case, m, ways).lockstep + case.micro for m in tried if m is not None))
        note()
    mean = [float(np.mean(x)) for x in (static_, adaptive, solved)]
    return [
        Line("FlexSP over one degree of 64", 1.72, mean[0] / mean[2]),
        Line("FlexSP's degree for each batch over 64", 1.34, mean[0] / mean[1]),
    ]


def in_order(case: Case, width: int) -> Schedule:
    """Documents in their order, packed until the next does not fit; the number of packs is a multiple of the groups.

    Megatron-LM's ``dp_balanced``.
    """
    packs: list[list[int]] = [[]]
    rows = 0
    for index, length in enumerate(case.lengths.tolist()):
        if rows + length > case.room * width:
            packs.append([])
            rows = 0
        packs[-1].append(index)
        rows += length
    groups = case.ranks // width
    while len(packs) % groups:
        longest = max(range(len(packs)), key=lambda i: len(packs[i]))
        if len(packs[longest]) == 1:
            break
        half = len(packs[longest]) // 2
        packs.append(packs[longest][half:])
        packs[longest] = packs[longest][:half]
    return [Micro(i % groups * width, width, np.array(pack)) for i, pack in enumerate(packs)]


def megatron_case(ranks: int, index: int, micro: float) -> Case:
    """A batch of Megatron-LM's example."""
    rng = np.random.default_rng([index, ranks])
    shape = ModelShape("megatron-example", 2048, 12, 16, 16, 128, 8192, 131_072, gated=False)
    machine = replace(Hardware.preset("h100"), node=4)
    drawn = published.from_megatron(8 * ranks // 4, rng)
    return Case.of(drawn, ranks, shape, machine, micro=micro, room=2048)


def megatron_lines(batches: int, note: Callable[[], None]) -> list[Line]:
    """Dynamic context parallelism over groups of 4, free-running, a ring in each group, by ranks and micro-batch."""
    lines = []
    for micro in MICROS:
        gains: list[Line] = []
        for ranks, gain in GAINS.items():
            before, after = [], []
            for index in range(batches):
                case = megatron_case(ranks, index, micro)
                for policy, found in ((in_order(case, 4), before), (megatron(case, case.room), after)):
                    # the first micro-batch costs as much as the others here
                    found.append(run(case, policy, ("ring",)).free + case.micro)
            gains.append(Line(f"  on {ranks} GPUs", gain, float(np.mean(before) / np.mean(after))))
            note()
        what = f"Megatron-LM's, mean of 4 to 64 GPUs, {micro * 1e3:.0f} ms a micro-batch"
        mean = Line(what, float(np.mean([g.published for g in gains])), float(np.mean([g.simulated for g in gains])))
        lines += [mean, *gains]
    return lines


def table(lines: Sequence[Line]) -> Table:
    """The figures side by side."""
    shown = Table("speed-up of", "published", "simulated", "off", title="Published results and the simulator")
    for line in lines:
        mark = "" if abs(line.off) <= TOLERANCE else f" [yellow]beyond {TOLERANCE:.0%}[/]"
        shown.add_row(line.what, f"{line.published:.3f}", f"{line.simulated:.3f}", f"{line.off:+.1%}{mark}")
    return shown


def main(given: Sequence[str] | None = None) -> None:
    """Runs the comparisons and shows them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=8, help="of FlexSP's experiment; of Megatron-LM's 25 times more")
    parser.add_argument("--seconds", type=float, default=5.0, help="of the solver for each round")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args(given)
    console = Console()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("batches", total=args.batches + len(GAINS) * len(MICROS))
        lines = megatron_lines(25 * args.batches, lambda: progress.advance(task))
        lines = flexsp_lines(args.batches, args.seconds, lambda: progress.advance(task)) + lines
    console.print(table(lines))
    if args.json:
        rows: list[dict[str, Any]] = [line._asdict() | {"off": line.off} for line in lines]
        records.write(args.json, records.environment() | {"rows": rows})


if __name__ == "__main__":
    main()
