"""The gain by overlapped stages: Latte as planned beside the plan with every stage in one part.

    python -m bench.dsp.overlap                   # about ten minutes on two cores
    python -m bench.dsp.overlap --modelled        # only the steps of published shapes on H100 GPUs
    python -m bench.dsp.overlap --json bench/results/dsp_overlap.jsonl

Measured in turns within one run: two processes over shared memory, over gloo, and over shared memory held back to a
link that is to a core what InfiniBand is to an H100 for the published width; 4 and 8 ranks one after another with their
exchanges composed over that link. Modelled: published shapes on H100 GPUs by the planner's costs, with the call of a
block that its presets have and with a tenth of it, which is a compiled block. A ratio is the step in one part by the
step as planned: above 1 overlap is faster.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from bench.dsp import latte
from bench.dsp.grid import CLIPS, TOKENS
from bench.dsp.latte import Clip, Row, composed, measured
from bench.dsp.machine import machines
from bench.dsp.step import PUBLISHED, dims_of
from bench.lib import records
from seqpar.comm import Comm
from seqpar.dsp import plan_stages
from seqpar.planner import Hardware
from seqpar.testing import run_processes

WAYS = {"planned": plan_stages, "one part": partial(plan_stages, parts=(1,))}
NAMES = ("Latte 16 x 512^2", "OpenSora 102 x 480p")
GPUS = (8, 16, 32, 64)


def both_ways(comm: Comm | None, run: Callable[..., Any], *arguments: Any) -> Any:
    """A measurement of `bench.dsp.latte` on a rank with the plans of this file."""
    with mock.patch.object(latte, "METHODS", WAYS):
        return run(*arguments) if comm is None else run(comm, *arguments)


def row_of(clip: Clip, ranks: int, over: str, found: Sequence[dict[str, Row]], turns: int) -> Row:
    """The ratio of the slowest ranks' seconds: the median over turns, and both quartiles.

    Composed steps give one figure, from the least of all turns.
    """
    count = 1 if over.endswith("composed") else turns
    steps = {way: [max(turn) for turn in zip(*(rank[way]["seconds"][:count] for rank in found))] for way in WAYS}
    ratios = sorted(one / parts for one, parts in zip(steps["one part"], steps["planned"], strict=True))
    one, planned = (found[0][way] for way in ("one part", "planned"))
    return {
        "clip": clip.name, "tokens": clip.tokens, "ranks": ranks, "over": over, "turns": turns,
        "planned": planned["layouts"], "one part": one["layouts"],
        "exchanging": round(median(one["exchanging"]) / median(one["seconds"]), 3),
        "predicted": round(one["predicted"] / planned["predicted"], 3), "ratio": round(median(ratios), 3),
        "quarters": [round(ratios[at], 3) for at in (len(ratios) // 4, -1 - len(ratios) // 4)],
    }  # fmt: skip


def rows(turns: int, show: Callable[[Row], None]) -> list[Row]:
    """A row for every clip, link and number of ranks."""
    found: list[Row] = []
    over_links = machines(5)
    slow = over_links["slow"]
    # on one clock, transfers overlap with computation
    composing = {"slow": slow._replace(hardware=replace(slow.hardware, hidden=1.0))}
    for clip in (clip.fitted(TOKENS) for clip in CLIPS if clip.name in NAMES):
        for ranks in (4, 8):
            (several,) = both_ways(None, composed, clip, ranks, composing, turns).values()
            found.append(row_of(clip, ranks, "slow, composed", several, turns))
            show(found[-1])
        for over, machine in over_links.items():
            comm, link = ("gloo" if over == "gloo" else "shm"), (machine.link if over == "slow" else None)
            arguments = measured, clip, machine.hardware, turns, link
            found.append(
                row_of(clip, 2, over, run_processes(2, both_ways, *arguments, comm=comm, timeout=300.0), turns)
            )
            show(found[-1])
    return found


def modelled(hardware: Hardware) -> list[Row]:
    """Rows of published shapes, by the planner's cost model."""
    found = []
    for model, clips in PUBLISHED:
        for clip in clips:
            dims = dims_of(clip)
            stages = [replace(stage, apart=frozenset(dims) - stage.whole) for stage in model.stages(dims, 2)]
            for call in (hardware.call, hardware.call / 10):
                for ranks in GPUS:
                    machine = replace(hardware, call=call)
                    plans = {name: way(stages, dims, ranks, hardware=machine) for name, way in WAYS.items()}
                    found.append({
                        "model": model.name, "clip": clip, "ranks": ranks, "over": f"{hardware.name}, modelled",
                        "call": call, "ratio": round(plans["one part"].seconds / plans["planned"].seconds, 4),
                        "in parts": sum(choice.parts > 1 for choice in plans["planned"].choices),
                        "stages": len(stages),
                    })  # fmt: skip
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--modelled", action="store_true", help="measure nothing")
    parser.add_argument("--json", type=Path, help="file for the figures, one record a line")
    args = parser.parse_args(arguments)

    def show(row: Row) -> None:
        print(json.dumps(row), flush=True)

    found = modelled(Hardware.preset("h100"))
    for row in found:
        show(row)
    if not args.modelled:
        found += rows(args.turns, show)
    if args.json:
        args.json.write_text("".join(json.dumps(row) + "\n" for row in [records.environment(), *found]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
