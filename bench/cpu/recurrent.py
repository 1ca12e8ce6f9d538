"""Seconds of recurrences on this CPU on one thread: seqpar, transformers' PyTorch fallbacks and batched products.

    python -m bench.cpu.recurrent                                  # all families, about three minutes
    python -m bench.cpu.recurrent --families "gated delta rule" --repeat 9

One document of 4,096 tokens, 8 heads of 128, float32, through `seqpar.recurrent.linear_attention`; a step is forward
and backward with the gradients of all inputs. Everything in a row is timed in turns, by the processor's time, and
medians are compared; a ratio has the interval that encloses its true median with probability 0.9. Before anything is
timed, results are compared.

Work is what one pass of chunks of C = 64 rows needs, with K and V channels, multiply-adds twice and triangles half::

    forward     4 K V + C (K + V) a row and head        delta rules 6 K V + 2 C (K + V)        backward     twice that

What backward computes again is not counted. The rate of work is given as a share of the rate of `torch.bmm` of 64 x 128
x 64, a matrix for each chunk and head, or for each head of one chunk, which stays in cache: the faster one.

The fallback of Kimi's delta attention keeps all decays of all pairs of a chunk, 8 GB of them for 4,096 tokens: it is
compared at 512. transformers has no fallback for constant states, for decays of channels without the delta rule, or for
the delta rule without decay. Exit code 1 if the gated delta rule's step takes more than a fifth of the fallback's, or
if any step runs at less than 0.35 of the products.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.nn.functional import normalize

import seqpar
from bench.lib import records
from bench.lib.interval import interval
from seqpar import recurrent
from seqpar.testing import relative_rms

CHUNK = 64
PRODUCT = (64, 128, 64)
SHARE, FIFTH = 0.35, 0.2  # what must hold


@dataclass(frozen=True)
class Family:
    """A recurrence. tokens: of the case that has a fallback, None for all."""

    name: str
    decay: str = "none"
    delta: bool = False
    fallback: str | None = None
    tokens: int | None = None


FAMILIES = (
    Family("none"),
    Family("scalar decay", "scalar", fallback="mamba2"),
    Family("channel decay", "channel"),
    Family("delta rule", delta=True),
    Family("gated delta rule", "scalar", delta=True, fallback="qwen3_next"),
    Family("Kimi delta attention", "channel", delta=True),
    Family("Kimi delta attention, short", "channel", delta=True, fallback="kimi_linear", tokens=512),
)

Function = Callable[..., Tensor]


def inputs(family: Family, tokens: int, heads: int, dim: int) -> tuple[list[Tensor | None], Tensor]:
    """q, k, v, decay and beta, and the gradient of the output."""
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    rows = [tokens, heads, dim]
    decay = {"none": None, "scalar": rows[:2], "channel": rows}[family.decay]
    return [
        draw(*rows), normalize(draw(*rows), dim=-1), draw(*rows),
        None if decay is None else -torch.rand(decay, generator=g) * 0.3,
        torch.rand(rows[:2], generator=g) if family.delta else None,
    ], draw(*rows)  # fmt: skip


def ours(tokens: int) -> Function:
    """seqpar's, on one rank."""
    plan = seqpar.Plan(seqpar.Mask([tokens]), seqpar.Layout.contiguous(tokens, 1))
    comm = seqpar.LocalComm()

    def call(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, beta: Tensor | None) -> Tensor:
        out = recurrent.linear_attention(q, k, v, plan, comm, decay=decay, beta=beta)
        assert isinstance(out, Tensor)
        return out

    return call


def theirs(name: str) -> Function:
    """transformers' fallback in PyTorch, on the same tensors."""
    if name == "qwen3_next":
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as chunks

        return lambda *x: chunks(*(y[None] for y in x))[0][0]
    if name == "kimi_linear":
        from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention as chunks_of_kimi

        return lambda *x: chunks_of_kimi(*(y[None] for y in x))[0][0]
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    def scan(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, _: None) -> Tensor:
        # the decay is the time step times A = -1
        return mamba2_chunk_scan(v[None], -decay[None], -torch.ones(v.shape[1]), k[None], q[None], chunk_size=256)[0]

    return scan


def step(function: Function, x: list[Tensor | None], dout: Tensor, *, backward: bool) -> tuple[float, list[Tensor]]:
    """Seconds of the processor for a call; out and the gradients of all inputs."""
    leaves = [None if y is None else y.detach().clone().requires_grad_(backward) for y in x]
    start = time.process_time()
    out = function(*leaves)
    if backward:
        out.backward(dout)
    seconds = time.process_time() - start
    return seconds, [out.detach(), *(y.grad for y in leaves if y is not None and y.grad is not None)]


def work(family: Family, tokens: int, heads: int, dim: int, *, backward: bool) -> float:
    """Floating-point operations of a call; see the module."""
    one = 4 * dim * dim + CHUNK * 2 * dim
    if family.delta:
        one = 6 * dim * dim + 2 * CHUNK * 2 * dim
    return float(tokens * heads * one * (3 if backward else 1))


def products(count: int) -> tuple[Callable[[], float], float]:
    """Seconds of the processor for so many products, a few times, and the operations of that."""
    m, k, n = PRODUCT
    a, b, into = torch.randn(count, m, k), torch.randn(count, k, n), torch.empty(count, m, n)
    times = max(1, 1024 // count)

    def call() -> float:
        start = time.process_time()
        for _ in range(times):
            torch.bmm(a, b, out=into)
        return time.process_time() - start

    return call, 2.0 * times * count * m * k * n


def measured(family: Family, backward: bool, args: argparse.Namespace) -> dict[str, object]:
    """One row: seconds, timed in turns, their ratio, and the rate of work beside that of products."""
    tokens = min(args.tokens, family.tokens or args.tokens)
    x, dout = inputs(family, tokens, args.heads, args.dim)
    mine, fallback = ours(tokens), theirs(family.fallback) if family.fallback else None
    calls = {"seqpar": lambda: step(mine, x, dout, backward=backward)[0]}
    if fallback is not None:
        given, compared = x, 6
        if family.fallback == "mamba2":  # it multiplies values by the time step, and has no scale
            q, k, v, decay, _ = x
            given, compared = [q * args.dim**-0.5, k, v / -decay[..., None], decay, None], 1
        calls["transformers"] = lambda: step(fallback, given, dout, backward=backward)[0]
        one, other = step(mine, x, dout, backward=backward)[1], step(fallback, given, dout, backward=backward)[1]
        for a, b in zip(one[:compared], other[:compared], strict=True):
            assert relative_rms(a, b.double()) < 1e-4, f"{family.name}: results differ"
    batches = {f"products of {n}": products(n) for n in (args.heads, max(args.heads, tokens // CHUNK * args.heads))}
    calls |= {name: call for name, (call, _) in batches.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(args.repeat + 1):
        for name, call in calls.items():
            seconds = call()
            if turn:  # the first turn warms up
                times[name].append(seconds)
    median = {name: statistics.median(t) for name, t in times.items()}
    flops = work(family, tokens, args.heads, args.dim, backward=backward)
    rate = max(operations / median[name] for name, (_, operations) in batches.items())
    row: dict[str, object] = {
        "family": family.name, "direction": "step" if backward else "forward", "tokens": tokens,
        "heads": args.heads, "dim": args.dim, "seqpar": median["seqpar"], "gflop": flops / 1e9,
        "gflop_per_second": flops / median["seqpar"] / 1e9, "products_gflop_per_second": rate / 1e9,
        "of_products": flops / median["seqpar"] / rate,
    }  # fmt: skip
    if fallback is not None:
        ratios = [a / b for a, b in zip(times["seqpar"], times["transformers"], strict=True)]
        row |= {"fallback": family.fallback, "transformers": median["transformers"]}
        row |= {"ratio": median["seqpar"] / median["transformers"], "interval": interval(ratios)}
    return row


def table(rows: list[dict[str, object]], title: str) -> Table:
    """The rows as a table to print."""
    result = Table(title=title, title_justify="left", box=None)
    headings = ("family", "", "tokens", "GFLOP", "seqpar ms", "transformers ms", "ratio", "interval", "/ products")
    for heading in headings:
        result.add_column(heading, justify="left" if heading in ("family", "") else "right")
    for row in rows:
        cells = [f"{row['family']}", f"{row['direction']}", f"{row['tokens']:,}", f"{row['gflop']:.1f}"]
        cells += [f"{1e3 * row['seqpar']:.0f}", "", "", ""]  # type: ignore[operator]
        if "ratio" in row:
            low, high = row["interval"]  # type: ignore[misc]
            cells[-3:] = [f"{1e3 * row['transformers']:.0f}", f"{row['ratio']:.3f}", f"{low:.3f} to {high:.3f}"]  # type: ignore[operator]
        result.add_row(*cells, f"{row['of_products']:.2f}")
    return result


def main() -> int:
    """Measure the selected families and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [family.name for family in FAMILIES]
    parser.add_argument("--families", nargs="+", default=names, choices=names)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=5, help="timings of each variant")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=120)
    todo = [(family, backward) for family in FAMILIES if family.name in args.families for backward in (False, True)]
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        rows = [measured(*case, args) for case in progress.track(todo, description="recurrences")]
    origin = records.environment()
    console.print(table(rows, f"recurrences on one thread: {origin['machine']}"))
    steps = [row for row in rows if row["direction"] == "step"]
    slow = [row for row in steps if row["of_products"] < SHARE]  # type: ignore[operator]
    slow += [row for row in steps if row.get("fallback") == "qwen3_next" and row["ratio"] > FIFTH]  # type: ignore[operator]
    if args.json:
        records.write(args.json, origin | {"threads": 1, "rows": rows})
        console.print(f"written to {args.json}")
    console.print(f"steps that take longer than they must: {len(slow)} of {len(steps)}")
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
