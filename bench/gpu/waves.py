"""Simulated times of attention launches on an H200: programs in the order of their table, each on the first free slot.

    python -m bench.gpu.waves                       # modelled beside recorded; the use of the device by dk and dv

A program takes a fixed time, and a time for each tile that it visits. Its visits are read from the table of the launch,
so no GPU is needed. A multiprocessor has a slot for one program of 8 warps, or two for 4 warps; a program whose
neighbour has ended, with none left to start, is faster by ``alone``.

Times are fitted to rows of `bench/results/gpu.jsonl`, at head dim 128 in bf16 on Triton 3.6: `FORWARD` and `PROGRAM` to
slices `accumulate` and `forward`, `DQ` and `DKDV` to slice `backward`, ``alone`` to the window with sinks of slice
`trees`. The rows do not say how the full visits of a backward are shared between dq and dkdv. The instructions of a
warp by visit, as compiled for 9.0, share them: 289 and 647, at the rate of forward's 557. What it leaves out: caches,
clocks that fall under load, the order of programs on a device, and launches before and after.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bench.gpu import trees
from bench.gpu.calls import facts_of
from bench.gpu.rows import Row, read
from bench.gpu.speed import setups
from bench.lib import lengths
from seqpar import Mask
from seqpar.kernels import StepFacts
from seqpar.kernels.triton import shares
from seqpar.kernels.triton.config import Descriptor, LaunchConfig, configure
from seqpar.kernels.triton.tables import key_table, query_table
from seqpar.planner.hardware import AttentionCost

RECORDED = Path(__file__).resolve().parents[1] / "results" / "gpu.jsonl"
PROCESSORS = 132  # of an H200
LAUNCH = 3.0  # microseconds of a launch besides its programs
Costs = NDArray[np.float64]  # microseconds by program, in the order of launch


class Kernel(NamedTuple):
    """Microseconds of a kernel's programs.

    full, masked, skipped: of a visit, and of a tile in range that is not visited. program, empty: the fixed part of one
    with visits and of one without. alone: time on a multiprocessor without a neighbour, over that with one.
    """

    config: LaunchConfig
    full: float
    masked: float
    program: float
    skipped: float = 0.0
    empty: float = 0.0
    alone: float = 1.0

    @property
    def each(self) -> int:
        """Programs that a multiprocessor runs at once."""
        return max(1, 8 // self.config.warps)


def _shipped(direction: str) -> LaunchConfig:
    return configure(Descriptor(direction, 128, 128, 2, 90))


PROGRAM = {"plain": 7.0, "first": 8.2, "accumulating": 11.2, "last": 10.4}  # of a forward, by what it does with sums
FORWARD = Kernel(_shipped("forward"), full=2.0, masked=4.1, program=PROGRAM["plain"])
DQ = Kernel(_shipped("dq"), full=1.0, masked=3.0, program=11.0)
VISIT = 2.27  # of dkdv, which `seqpar.kernels.triton.shares` counts in such visits
DKDV = Kernel(
    _shipped("dkdv"), VISIT, VISIT * shares.MASKED, VISIT * shares.PROGRAM, VISIT * shares.SKIPPED, alone=shares.ALONE
)
# The tiles of dkdv when the tree was raced with packed documents: one program a multiprocessor. Only the ratio counts.
RACED = DKDV._replace(config=LaunchConfig(64, 128, 8, 2), alone=1.0)


def makespan(costs: Costs, kernel: Kernel) -> float:
    """Microseconds until all programs have ended."""
    free = [(0.0, slot) for slot in range(PROCESSORS * kernel.each)]
    for cost in costs.tolist():
        end, slot = free[0]
        heapq.heapreplace(free, (end + cost, slot))
    ends = np.array([end for end, _ in sorted(free, key=lambda x: x[1])]).reshape(kernel.each, PROCESSORS)
    ends.sort(axis=0)
    return float((ends[0] + (ends[-1] - ends[0]) * kernel.alone).max())


def of_queries(facts: StepFacts, kernel: Kernel, heads: int) -> Costs:
    """The programs of forward or dq."""
    table, tiles = query_table(facts, kernel.config)
    _, _, begin, full_begin, full_end, end, *_ = table[:tiles].numpy().astype(np.int64).T
    full, fixed = full_end - full_begin, np.where(begin < end, kernel.program, kernel.empty)
    return np.repeat(full * kernel.full + (end - begin - full) * kernel.masked + fixed, heads)


def of_keys(facts: StepFacts, kernel: Kernel, kv_heads: int, group: int, processors: int = PROCESSORS) -> Costs:
    """The programs of dkdv. processors: of the device that the table is made for."""
    table, queries, _, _, by_tile, rows, _ = key_table(facts, kernel.config, kv_heads, group, processors)
    first, _, begin, end = queries.numpy().T
    at, costs = facts.pos.numpy()[first], []
    for j, q_begin, full_begin, full_end, q_end, part, parts, _ in table[:rows].tolist():
        tile = np.r_[q_begin:full_begin, full_end:q_end]
        visited = (begin[tile] <= j) & (j < end[tile])
        if facts.until is not None:
            visited &= at[tile] < int(facts.until[j * kernel.config.bn : (j + 1) * kernel.config.bn].max())
        visited, full = np.tile(visited, group), (full_end - full_begin) * group
        a, b = (len(visited) * n // parts for n in (part, part + 1))
        masked = int(visited[a:b].sum())
        visits = (full * (part + 1) // parts - full * part // parts) * kernel.full + masked * kernel.masked
        fixed = kernel.program if q_begin < q_end else kernel.empty
        costs.append(visits + (b - a - masked) * kernel.skipped + fixed)
    return np.repeat(costs, kv_heads) if by_tile else np.tile(costs, kv_heads)


def joining(facts: StepFacts, kernel: Kernel, kv_heads: int, group: int) -> float:
    """Microseconds until the parts of cut key tiles are summed."""
    table, *_, rows, _ = key_table(facts, kernel.config, kv_heads, group, PROCESSORS)
    return kernel.full * shares.summing(table[rows:, 2].numpy())


def key_use(mask: Mask, kv_heads: int, group: int = 4) -> float:
    """The part of the device that dk and dv use: the time of uncut tiles if all slots are busy, over their time."""
    ideal = taken = 0.0
    for step in facts(mask):
        t = step.tiles(DKDV.config.bm, DKDV.config.bn)
        fixed = np.where(t.q_begin < t.q_end, DKDV.program, DKDV.empty)
        work = shares.key_work(t).sum() * group * DKDV.full + fixed.sum()
        ideal += work * kv_heads / (PROCESSORS * DKDV.each)
        taken += makespan(of_keys(step, DKDV, kv_heads, group), DKDV) + joining(step, DKDV, kv_heads, group)
    return ideal / taken


def facts(mask: Mask) -> list[StepFacts]:
    """The step of all queries and keys, band by band."""
    return facts_of(mask, np.arange(mask.kv_tokens), torch.device("cpu"))


def forward(mask: Mask, heads: int, kernel: Kernel = FORWARD) -> float:
    """Modelled milliseconds."""
    return sum(makespan(of_queries(x, kernel, heads), kernel) + LAUNCH for x in facts(mask)) / 1e3


def backward(mask: Mask, heads: int, kv_heads: int, dkdv: Kernel = DKDV) -> float:
    """Modelled milliseconds of dq, and of dk and dv."""
    group = heads // kv_heads
    of_dkdv = sum(
        makespan(of_keys(x, dkdv, kv_heads, group), dkdv) + joining(x, dkdv, kv_heads, group) + LAUNCH
        for x in facts(mask)
    )
    return forward(mask, heads, DQ) + of_dkdv / 1e3


@contextmanager
def recorded_tables() -> Iterator[None]:
    """Tables of dk and dv as they were when the rows were recorded: by head."""
    gain, shares.GAIN = shares.GAIN, 0.0
    try:
        yield
    finally:
        shares.GAIN = gain


class Modelled(NamedTuple):
    """A recorded figure beside the modelled one: milliseconds, or the ratio of a race."""

    case: str
    mode: str
    recorded: float
    modelled: float

    @property
    def error(self) -> float:
        """Modelled over recorded, less 1."""
        return self.modelled / self.recorded - 1


def accumulated(rows: list[Row]) -> Iterator[Modelled]:
    """Slice `accumulate`: launches as rings have them."""
    for row in rows:
        if row["slice"] == "accumulate":
            queries, keys = (int(word) for word in row["case"].split() if word.isdigit())
            mask, kernel = (
                Mask([queries], causal=False, kv_lengths=[keys]),
                FORWARD._replace(program=PROGRAM[row["mode"]]),
            )
            yield Modelled(row["case"], row["mode"], row["ms"], forward(mask, 32, kernel))


def single(rows: list[Row], names: Sequence[str]) -> Iterator[Modelled]:
    """Slices `forward` and `backward` at 16 heads of 128, the masks with these names."""
    calls = {str(s): s for s, _ in setups(False) if s.dim == 128 and s.heads == 16}
    for row in rows:
        s = calls.get(row["case"])
        if row["slice"] in ("forward", "backward") and row["kernel"] == "triton" and s is not None and s.name in names:
            heads = s.heads, s.kv_heads
            ms = backward(s.mask(), *heads) if row["slice"] == "backward" else forward(s.mask(), heads[0])
            yield Modelled(row["case"], row["slice"], row["ms"], ms)


def raced(rows: list[Row]) -> Iterator[Modelled]:
    """Slice `trees`: how much faster a tree is than a document for each of its answers."""
    prompt, *answers = trees.setups(False)[0].lengths
    tree, packed = Mask.shared_prefix([(prompt, answers)]), Mask([prompt + answer for answer in answers])
    modelled = {
        "forward": forward(packed, 32) / forward(tree, 32),
        "backward": backward(packed, 32, 8, RACED) / backward(tree, 32, 8, RACED),
    }
    for row in rows:
        if row["slice"] == "trees" and row["mode"] == "prompt for each answer":
            direction = row["case"].split(", ")[-1]
            yield Modelled("tree : packed", direction, row["ratio"], modelled[direction])


def windowed(rows: list[Row]) -> Iterator[Modelled]:
    """Slice `trees`: the window with sinks."""
    setup = trees.setups(False)[1]
    for row in rows:
        if row["slice"] == "trees" and row["kernel"] == "triton" and row["case"].startswith(setup.name) and "ms" in row:
            back = row["mode"] != "forward"
            ms = backward(setup.mask(), 32, 8) if back else forward(setup.mask(), 32)
            yield Modelled(str(setup), "backward" if back else "forward", row["ms"], ms)


def planned(rows: list[Row]) -> tuple[AttentionCost, list[Modelled]]:
    """The coefficients of `seqpar.planner.hardware` as they fit the rows, with the least squares of relative errors.

    Forward: slice `accumulate` and the causal and full calls of slice `forward`. Backward has the same cost of a row in
    pairs, and its rate is the mean that the two calls of slice `backward` ask for. key_pairs: of the programs of dkdv,
    in pairs of both directions.
    """
    terms, seconds, names, backs = [], [], [], []
    for row in rows:
        words = [int(word) for word in row["case"].replace(",", "").split() if word.isdigit()]
        if row["slice"] == "accumulate":
            queries, keys = words
            merged, area, heads = queries * (row["mode"] in ("accumulating", "last")), queries * keys, 32
        elif row["slice"] in ("forward", "backward") and row["kernel"] == "triton" and words[1:] == [16, 128]:
            name, queries, heads = row["case"].split()[0], *words[:2]
            if queries != 16384 or name not in ("causal", "full"):
                continue
            area, merged = queries * (queries + 1) // 2 if name == "causal" else queries**2, 0
            if row["slice"] == "backward":
                backs.append((area, queries, row["ms"] / 1e3))
                continue
        else:
            continue
        terms.append([512 * heads * area, 512 * heads * queries, 512 * heads * merged, 1.0])
        seconds.append(row["ms"] / 1e3)
        names.append((row["case"], row.get("mode", "")))
    x, y = np.array(terms), np.array(seconds)
    scale = np.abs(x / y[:, None]).max(0)
    pair, query, merge, stage = np.linalg.lstsq(x / y[:, None] / scale, np.ones(len(y)), rcond=None)[0] / scale
    rate = np.mean([1280 * 16 * (area + query / pair * n) / t for area, n, t in backs])
    fixed = DKDV.program / 1e6 / (DKDV.config.bn * PROCESSORS * DKDV.each)  # seconds of a key row
    cost = AttentionCost(
        1 / pair, float(rate), 0.0, query / pair, fixed / (512 * pair + 1280 / rate), stage, (query + merge) / pair
    )
    fitted = [Modelled(*name, t, e) for name, t, e in zip(names, y * 1e3, x @ [pair, query, merge, stage] * 1e3)]
    return cost, fitted


def masks() -> dict[str, Mask]:
    """Masks whose dk and dv are simulated."""
    tree, sinks = (setup.mask() for setup in trees.setups(False))
    made = {
        "causal 4,096": Mask([4096]), "causal 16,384": Mask([16384]), "causal 65,536": Mask([65536]),
        "full 8,192": Mask([8192], causal=False), "window 1,024": Mask([16384], window=(1024, None)),
        "window 128": Mask([16384], window=(128, None)), "prompt and answers": tree, "window and sinks": sinks,
        "window 1,024, 64 sinks": Mask([16384], window=(1024, None), sink_tokens=64),
        "prompt 8,192, 16 answers": Mask.shared_prefix([(8192, [1024] * 16)]),
        "16 prompts": Mask.shared_prefix([(1024, [512] * 8)] * 16),
        "one long answer": Mask.shared_prefix([(512, [16384, *[512] * 7])]),
    }  # fmt: skip
    return made | {f"packed {name}": Mask(lengths.packed(name, 32768)) for name in lengths.NAMES}


def main() -> int:
    """Print both tables."""
    import rich
    from rich.table import Table

    rows, table = read(RECORDED), Table("case", "mode", "recorded", "modelled", "error")
    names = sorted({setup.name for setup, _ in setups(False)})
    with recorded_tables():
        for x in (*accumulated(rows), *single(rows, names), *raced(rows), *windowed(rows)):
            table.add_row(x.case, x.mode, f"{x.recorded:.4g}", f"{x.modelled:.4g}", f"{x.error:+.1%}")
    rich.print(table)
    rich.print("the planner's, fitted:", planned(rows)[0])
    heads = (1, 2, 4, 8)
    table = Table("device in use by dk and dv, by head and as shared", *(f"{n} key heads" for n in heads))
    for name, mask in masks().items():
        now = [key_use(mask, n) for n in heads]
        with recorded_tables():
            before = [key_use(mask, n) for n in heads]
        table.add_row(name, *(f"{a:.2f} {b:.2f}" for a, b in zip(before, now, strict=True)))
    rich.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
