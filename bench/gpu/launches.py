"""Host time of Triton launches and of the steps of each schedule on a GPU, without one: CPU time, the driver stubbed.

    python -m bench.gpu.launches                                   # this tree
    python -m bench.gpu.launches --before COMMIT --pairs 5         # beside another commit: processes in turn
    python -m bench.gpu.launches --json bench/results/launches.jsonl

Kernels are compiled for capability 9.0 and launched through Triton up to the driver: tensor descriptors are not
encoded, and nothing runs. Tensors lie on the CPU and are small, so what else a step does costs about what it costs to
issue on a GPU: allocations, sums and casts are the CPU's own. Of a schedule, one rank of 8 runs; its exchanges are
noted and cost nothing, where a batch of NCCL's has a cost of its own; the time of the notes themselves is measured and
left out. A figure is the least of all calls, or blocks of calls, in all processes of a tree, since nothing makes a call
faster than it is; a ratio is that of two such figures.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import seqpar
from bench.gpu.binaries import Offline
from bench.lib.virtual import Run, Tape
from seqpar.comm import Tag
from seqpar.kernels import KERNELS, Grads, Operands, Score, Sums, softmax
from seqpar.kernels import triton as package
from seqpar.kernels.triton import Triton
from seqpar.kernels.triton.config import configure
from seqpar.ops.attention.call import uploaded

GENERATION, DIM, RANKS, ROWS = 90, 128, 8, 16
SCHEDULES: dict[str, dict[str, Any]] = {
    "ring": {"transport": "ring"}, "fetch": {"transport": "fetch"}, "Ulysses": {"ulysses": 8},
    "Ulysses 2, ring 4": {"transport": "ring", "ulysses": 2},
}  # fmt: skip
Figures = dict[str, float]  # microseconds


class Stub(Offline):
    """A driver that loads nothing, and counts launches instead of making them."""

    def __init__(self, capability: int) -> None:
        super().__init__(capability)
        self.launched: list[tuple[Any, ...]] = []  # what each launch would have told the driver
        self.keeps = True
        self.utils = self

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """What launches a binary."""
        return lambda *arguments: self.launched.append((source.name, *arguments)) if self.keeps else None

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Enough shared memory for anything."""
        return {"max_shared_mem": 1 << 20}

    def load_binary(self, *about: Any) -> tuple[int, int, int, int, int]:
        """Module, function, registers, spills and most threads of a binary."""
        return 1, 2, 0, 0, 1024

    def unload_module(self, module: int) -> None:
        """Nothing was loaded."""


def least(call: Callable[[], Any], calls: int, blocks: int) -> float:
    """Microseconds of CPU of a call: the least of some blocks of calls."""
    call()
    times = []
    for _ in range(blocks):
        start = time.thread_time()
        for _ in range(calls):
            call()
        times.append((time.thread_time() - start) / calls * 1e6)
    return min(times)


def of_launches(kernel: Triton, calls: int) -> Figures:
    """A launch of each kernel in the middle of a ring."""
    plan = seqpar.Plan(seqpar.Mask([512]), seqpar.Layout.zigzag([512], 2), transport="ring")
    step: Any = uploaded(plan, plan.steps(0), torch.device("cpu")).facts[0]
    facts = step[0] if isinstance(step, (list, tuple)) else step  # another commit may know no bands
    rows, keys = len(facts.pos), len(facts.key_pos)
    q, dout = (torch.zeros(rows, 8, DIM, dtype=torch.bfloat16) for _ in range(2))
    kv = torch.zeros(keys, 2, 2 * DIM, dtype=torch.bfloat16)
    acc, dq, home = torch.zeros(rows, 8, DIM), torch.zeros(rows, 8, DIM), torch.zeros(keys, 2, 2 * DIM)
    lse, delta = torch.zeros(8, rows), torch.zeros(8, rows)
    x = Operands(q, kv[..., :DIM], kv[..., DIM:], facts, Score(DIM**-0.5))
    sums = Sums(acc, lse, None, first=False)
    grads = Grads(dout, lse, delta, None, dq, home[..., :DIM], home[..., DIM:])
    runs: dict[str, Callable[[], None]] = {
        "a launch of forward": lambda: kernel.forward(x, sums),
        "the two launches of backward": lambda: kernel.backward(x, grads),
    }
    return {name: least(run, calls, 15) for name, run in runs.items()}


def of_noting(tape: Tape, exchanges: int = 500, blocks: int = 9) -> float:
    """What a tape adds to a stretch between two exchanges: the least mean of some blocks of exchanges of nothing."""
    means = []
    for _ in range(blocks):
        tape.start()
        for number in range(exchanges):
            tape.exchange({}, {}, tag=Tag(0, number, 0, 0)).wait()
        runs = [event.seconds for event in tape.stop() if isinstance(event, Run)]
        means.append(sum(runs) / len(runs) * 1e6)
    return min(means)


def of_schedule(name: str, calls: int) -> Figures:
    """A step of forward, and of forward and backward, on one rank of some."""
    tokens = RANKS * ROWS
    plan = seqpar.Plan(seqpar.Mask([tokens]), seqpar.Layout.zigzag([tokens], RANKS), **SCHEDULES[name])
    tape, steps = Tape(3, RANKS), len(plan.steps(3))
    q, k, v = (torch.zeros(ROWS, 8, DIM, dtype=torch.bfloat16) for _ in range(3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    noting = of_noting(tape)

    def forward() -> None:
        with torch.no_grad():
            seqpar.attention(q, k, v, plan, tape, kernel="triton")

    def both() -> None:
        seqpar.attention(*leaves, plan, tape, kernel="triton").backward(q)

    def host(run: Callable[[], None]) -> float:
        tape.start()
        run()
        runs = [event.seconds for event in tape.stop() if isinstance(event, Run)]
        return sum(runs) * 1e6 - len(runs) * noting

    figures = {}
    for mode, run in (("forward", forward), ("forward and backward", both)):
        run()
        figures[f"{name}, {mode}, a step of {steps}"] = min(host(run) for _ in range(calls)) / steps
    return figures


def stand_in(capability: int, processors: int) -> None:
    """Make Triton's kernels compile for a GPU that is not here and launch nothing, on CPU tensors, in this process."""
    import triton

    stub = Stub(capability)
    stub.keeps = False
    triton.runtime.driver.set_active(stub)
    package._processors = lambda device: processors
    softmax.on_triton = lambda x: True  # type: ignore[attr-defined]
    Triton.refuses = lambda self, spec: None


def process(calls: int = 200) -> Figures:
    """Microseconds by case."""
    torch.set_num_threads(1)
    stand_in(GENERATION, 1)  # one processor, so that no key tile's work is split: its sums would be the CPU's
    kernel = next(each for each in KERNELS if each.name == "triton")
    assert isinstance(kernel, Triton)
    kernel.configure = lambda descriptor: configure(replace(descriptor, generation=GENERATION))
    kernel.variants = False
    figures = of_launches(kernel, calls)
    for name in SCHEDULES:
        figures |= of_schedule(name, calls)
    return figures


def figures_of(tree: Path) -> Figures:
    """`process`, by the seqpar of a tree."""
    from bench.lib import before

    code = "import json, launches; print(json.dumps(launches.process()))"
    environment = before.environment(tree, Path(__file__).parent) | {"OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, env=environment, check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    """Prints a row for each case."""
    import rich
    from rich.table import Table

    from bench.lib import before, records

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", help="a commit to compare with")
    parser.add_argument("--pairs", type=int, default=3, help="processes of each tree (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="file for the record, one line, added at its end")
    options = parser.parse_args()
    trees = ([before.tree(options.before)] if options.before else []) + [before.ROOT]
    runs = [[figures_of(tree) for tree in trees] for _ in range(options.pairs)]
    table, rows = Table("CPU time of", "before, us", "now, us", "ratio"), []
    for name in runs[0][-1]:
        *old, new = (min(run[side][name] for run in runs) for side in range(len(trees)))
        row: dict[str, Any] = {"case": name, "us": round(new, 2)}
        if old:
            row |= {"before_us": round(old[0], 2), "ratio": round(new / old[0], 3)}
        rows.append(row)
        table.add_row(name, str(row.get("before_us", "-")), str(row["us"]), str(row.get("ratio", "-")))
    rich.print(table)
    if options.json:
        about = {"before": before.commit_of(options.before)} if options.before else {}
        with options.json.open("a") as file:
            file.write(json.dumps(records.environment() | about | {"pairs": options.pairs, "rows": rows}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
