"""CPU time of small calls, of planning and of the import, beside another commit: pairs of processes in turn.

    python -m bench.host_time --before COMMIT                                    # 24 pairs, about ten minutes
    python -m bench.host_time --before COMMIT --comms                            # one rank alone, two minutes
    python -m bench.host_time --before COMMIT --json bench/results/host_time.jsonl

Calls have 128 tokens, and the forward of a model 256 rows, so that the host's work dominates. A process times every
case; its figure is the least over some blocks of calls, of both ranks together where there are two. A ratio is the
geometric mean over pairs, new by old, with a bootstrap interval of 95 %. It holds if the interval begins at 1.02 or
less and the ratio is at most 1.05.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

BENCH = Path(__file__).resolve().parent
BEGINS, MOST = 1.02, 1.05
TOKENS = 128
COMMS = ("gloo", "shm")


def blocks(call: Callable[[], Any], calls: int, count: int = 6) -> list[float]:
    """CPU milliseconds of a call, one figure for each block of calls; one more block warms up."""
    found = []
    for _ in range(count + 1):
        start = time.process_time()
        for _ in range(calls):
            call()
        found.append((time.process_time() - start) / calls * 1e3)
    return found[1:]


def verbs(comm: Any, calls: int) -> dict[str, list[float]]:
    """The blocks of the verbs on a comm."""
    import torch

    import seqpar
    from seqpar import Layout

    plan = seqpar.Plan(seqpar.Mask([96, 32]), Layout.zigzag([96, 32], comm.size))
    apart = Layout.contiguous(TOKENS, comm.size)
    g = torch.Generator().manual_seed(0)
    rows = plan.rows(comm.rank)
    q, k, v, x = (torch.randn(rows, heads, 32, generator=g) for heads in (4, 2, 2, 4))
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]

    def step() -> None:
        seqpar.attention(*leaves, plan, comm).sum().backward()

    return {
        "attention, forward": blocks(lambda: seqpar.attention(q, k, v, plan, comm), calls),
        "attention, forward and backward": blocks(step, calls),
        "switch": blocks(lambda: seqpar.switch(x, comm, split_dim=1, concat_dim=0), calls),
        "relayout": blocks(lambda: seqpar.relayout(x, comm, src=plan.layout, dst=apart), calls),
    }


def llama(comm: Any, calls: int) -> dict[str, list[float]]:
    """The blocks of a training forward of a parallel model, with 256 rows on each rank."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import seqpar

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=61, **sizes))
    seqpar.parallelize(model, comm)
    ids = torch.arange(256)[None] % 61
    return {"a parallel Llama's forward of 256 rows": blocks(lambda: model(input_ids=ids, labels=ids), calls)}


def of_rank(_: Any, kind: str) -> dict[str, list[float]]:
    """The blocks of a rank that is a process, on a comm as users create it."""
    import seqpar

    comm = {"gloo": seqpar.GroupComm, "shm": seqpar.ShmComm}[kind]()
    return verbs(comm, 40) | llama(comm, 10)


def planning() -> dict[str, list[float]]:
    """The blocks of planning: `plan_batch`, and a plan with the steps of a rank."""
    import seqpar

    rng = np.random.default_rng(0)
    lengths = np.exp(rng.uniform(4, 9, 64)).astype(int).tolist()

    def steps() -> None:
        seqpar.Plan(seqpar.Mask(lengths), seqpar.Layout.zigzag(lengths, 8)).steps(3)

    return {
        "plan_batch, 64 documents, 8 ranks": blocks(partial(seqpar.plan_batch, lengths, 8), 8),
        "a plan and the steps of a rank of 8": blocks(steps, 8),
    }


def process(kinds: Sequence[str]) -> dict[str, float]:
    """Milliseconds by case; kinds: the comms of two ranks that are tried."""
    import torch

    start = time.process_time()
    import seqpar

    figures = {"import, after torch": (time.process_time() - start) * 1e3}
    from seqpar.testing import run_processes

    torch.set_num_threads(1)
    figures |= {name: min(found) for name, found in planning().items()}
    alone = verbs(seqpar.LocalComm(), 150) | llama(seqpar.LocalComm(), 20)
    figures |= {f"{name}, 1 rank": min(found) for name, found in alone.items()}
    for kind in kinds:
        one, two = run_processes(2, of_rank, kind)
        figures |= {f"{name}, 2 ranks, {kind}": min(map(sum, zip(one[name], two[name]))) for name in one}
    return figures


def figures_of(tree: Path, kinds: Sequence[str]) -> dict[str, float]:
    """The result of `process`, by the seqpar of a tree."""
    from bench.lib import before

    code = "import json, sys, host_time; print(json.dumps(host_time.process(sys.argv[1:])))"
    environment = before.environment(tree, BENCH) | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *kinds], cwd=tree, env=environment, check=True, stdout=subprocess.PIPE
    )
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def ratio(old: list[float], new: list[float], seed: int = 0) -> tuple[float, float, float]:
    """The geometric mean of new over old, and its interval of 95 %."""
    logs = np.log(np.asarray(new) / np.asarray(old))
    means = np.random.default_rng(seed).choice(logs, (10_000, logs.size)).mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(np.exp(logs.mean())), float(np.exp(low)), float(np.exp(high))


def main() -> int:
    import rich
    from rich.table import Table

    from bench.lib import before, records

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default="46b7fc0", help="the commit to compare with (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--comms", nargs="*", choices=COMMS, default=COMMS, help="of two ranks; none is one rank alone")
    parser.add_argument("--json", type=Path, help="file for the record, one line, added at its end")
    options = parser.parse_args()
    before.build(before.ROOT)
    trees = [before.tree(options.before), before.ROOT]
    pairs = []
    for number in range(options.pairs + 1):
        order = (0, 1) if number % 2 else (1, 0)
        found = {side: figures_of(trees[side], options.comms) for side in order}
        if number:  # the first compiles bytecode and fills caches
            pairs.append([found[0], found[1]])
        print(f"\rpair {number} of {options.pairs}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    table = Table("CPU time", "before, ms", "now, ms", "ratio", "95 %", "holds")
    rows = []
    for name in pairs[0][1]:
        old, new = ([pair[side][name] for pair in pairs] for side in (0, 1))
        middle, low, high = ratio(old, new)
        holds = low <= BEGINS and middle <= MOST
        rows.append({
            "case": name, "before_ms": round(float(np.median(old)), 4), "now_ms": round(float(np.median(new)), 4),
            "ratio": round(middle, 4), "low": round(low, 4), "high": round(high, 4),
        })  # fmt: skip
        figures = (f"{rows[-1]['before_ms']:.3f}", f"{rows[-1]['now_ms']:.3f}", f"{middle:.3f}")
        table.add_row(name, *figures, f"{low:.3f} to {high:.3f}", "yes" if holds else "NO")
    rich.print(table)
    if options.json:
        record = {
            "before": before.commit_of(options.before),
            "pairs": options.pairs,
            "rows": rows,
        }
        with options.json.open("a") as file:
            file.write(json.dumps(records.environment() | record) + "\n")
    return int(any(row["low"] > BEGINS or row["ratio"] > MOST for row in rows))


if __name__ == "__main__":
    sys.exit(main())
