"""A recurrent layer over ranks: states that pass on, beside Ulysses on the same layer and beside gathering all rows.

    python -m bench.cpu.states --json bench/results/states.json      # 2 and 4 processes, about half an hour
    python -m bench.cpu.states --ranks 2 --tokens 512 --heads 4 --dim 16 --turns 2 --sweep 32 64

One document of 16,384 tokens in contiguous shards, 8 heads of 128 in float32, scalar decay without and with the delta
rule; a step is forward and backward with the gradients of all inputs::

    states     `seqpar.recurrent.linear_attention` on the shards
    ulysses    rows are switched from tokens to heads, the recurrence runs over the whole document, out is switched back
    rows       every rank gathers all rows, computes all heads of the whole document and keeps its own rows

The three take turns, in an order that changes, on the same processes of one core each; outputs and gradients are
compared first. A turn's seconds are those of the slowest rank. Ratios are of one turn, theirs over ours: the median,
and the interval that has the true median in 90 of 100 runs. Seconds in exchanges, with packing for them, are those of a
second step, in which ranks meet before each exchange, so that they are not those of waiting for a slower rank. In a
chain or a pipeline, where some ranks have nothing to move while others do, they are those of the step's exchanges once
more, posted and waited for in the same order by ranks that compute nothing in between: a wait for a neighbour's
computation counts in the step alone. "loopback" is gloo as it is. The "held" link is simulated, so slow that Ulysses'
rows take as large a part of this layer's time as those of a layer of Qwen3-Next, with its projections and experts,
between nodes of H100s.

Bytes are those of the busiest rank, forward and backward. With states S and maps M of a run and rows R of the inputs
and the output, in bytes, a rank's states are fewer if it has more tokens than ``P ((P - 1) S + (P - 2) M) / ((P - 1)
R)`` on P ranks. The sweep counts bytes and times exchanges at several numbers of tokens, where "gather" and Ulysses
take turns, and says between which two the order changes.

Exit code 1 if at 16,384 tokens on 4 processes states spend more than a third of Ulysses' seconds in exchanges, or if a
step is not 1.15 times as fast over loopback (the delta rule 0.95), or 1.5 times over the held link.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import seqpar
from bench.dsp.latte import Meter, Metered, Wire, cores
from bench.lib import records
from bench.lib.interval import interval
from bench.lib.watched import Side, Watched
from bench.planner.planned import pinned
from seqpar import recurrent
from seqpar.comm import Comm, Tag, Work
from seqpar.ops import switch_all
from seqpar.plan.recurrence import LayerBytes
from seqpar.plan.runs import DocumentRuns
from seqpar.plan.travel import LAYER_WAYS, layer_way
from seqpar.planner import Hardware, Link, ModelShape, RecurrentLayer
from seqpar.testing import relative_rms, run_processes

FAMILIES = {"scalar decay": False, "delta rule": True}  # and whether it is one
WAYS = ("states", "ulysses", "rows")
LINKS = ("loopback", "held")
AGREEMENT = 1e-4  # of float32 outputs, relative
TOKENS, RANKS, THIRD = 16_384, 4, 1 / 3
LEAST = {"loopback": {"scalar decay": 1.15, "delta rule": 0.95}, "held": dict.fromkeys(FAMILIES, 1.5)}


@dataclass(frozen=True)
class Case:
    """A layer on some ranks. link: "loopback" or "held"."""

    ranks: int
    link: str
    family: str
    tokens: int
    heads: int
    dim: int

    @property
    def layer(self) -> LayerBytes:
        """What the layer may pass."""
        layer = RecurrentLayer(self.heads, self.dim, self.dim, delta=FAMILIES[self.family])
        return layer.bytes("float32", device="cpu")

    @property
    def plan(self) -> seqpar.Plan:
        """The document in contiguous shards."""
        return seqpar.Plan(seqpar.Mask([self.tokens]), seqpar.Layout.contiguous(self.tokens, self.ranks))

    def way(self, travel: str) -> str:
        """How states travel."""
        return layer_way(DocumentRuns.of(self.plan.residence), self.layer, travel).travel

    def inputs(self, rank: int) -> list[Tensor]:
        """q, k, v, decay and, for the delta rule, beta: the rows of a rank; keys have length 1."""
        g = torch.Generator().manual_seed(rank)
        rows = self.plan.rows(rank)
        q, k, v = torch.randn(3, rows, self.heads, self.dim, generator=g).unbind(0)
        gates = torch.rand(2, rows, self.heads, generator=g)
        k = torch.nn.functional.normalize(k, dim=-1)
        return [q, k, v, -0.1 * gates[0], *([gates[1]] if FAMILIES[self.family] else [])]


Step = Callable[[Sequence[Tensor]], Tensor]


def recurred(plan: seqpar.Plan, comm: Comm, tensors: Sequence[Tensor], travel: str = "auto") -> Tensor:
    """The recurrence of q, k, v, decay and perhaps beta."""
    q, k, v, decay, *beta = tensors
    out = recurrent.linear_attention(q, k, v, plan, comm, decay=decay, beta=beta[0] if beta else None, travel=travel)
    assert isinstance(out, Tensor)
    return out


def ways(case: Case, comm: Comm, *, travel: str = "auto") -> dict[str, Step]:
    """The layer, computed in each way."""
    plan, alone = case.plan, seqpar.LocalComm()
    whole = seqpar.Plan(seqpar.Mask([case.tokens]), seqpar.Layout.contiguous(case.tokens, 1))

    def ulysses(tensors: Sequence[Tensor]) -> Tensor:
        """All tokens of this rank's heads, and back."""
        several = len(tensors)
        by_heads = switch_all(tensors, comm, split_dims=[1] * several, concat_dims=[0] * several)
        out = recurred(whole, alone, by_heads)
        return switch_all([out], comm, split_dims=[0], concat_dims=[1])[0]

    def rows(tensors: Sequence[Tensor]) -> Tensor:
        """All rows on every rank."""
        out = recurred(whole, alone, [seqpar.unshard(x, plan, comm) for x in tensors])
        return out[plan.layout.positions(comm.rank)]

    return {"states": partial(recurred, plan, comm, travel=travel), "ulysses": ulysses, "rows": rows}


@dataclass
class Together:
    """Hands exchanges on to a watcher that measures them. "met": ranks meet before each; "noted": for `again`."""

    comm: Comm
    watcher: Metered
    how: str = ""
    noted: list[Callable[[], None]] = field(default_factory=list)

    def exchange(self, post: Callable[[], Work], sends: Side, recvs: Side, tag: Tag) -> Work:
        """The comm's own exchange."""
        if self.how == "noted":
            return Noted(self, post(), post, sends, recvs, tag)
        if self.how == "met":
            self.comm.gather("meet", 0)
        return self.watcher.exchange(post, sends, recvs, tag)

    def again(self) -> None:
        """Run the noted exchanges once more, with nothing in between."""
        self.comm.gather("meet", 0)
        for event in self.noted:
            event()
        self.noted.clear()


class Noted:
    """The `Work` of an exchange that runs once more later."""

    def __init__(
        self, together: Together, work: Work, post: Callable[[], Work], sends: Side, recvs: Side, tag: Tag
    ) -> None:
        self._work, self._events, self._second = work, together.noted, list[Work]()
        self._events.append(lambda: self._second.append(together.watcher.exchange(post, sends, recvs, tag)))

    def wait(self) -> None:
        """Wait, now and then."""
        self._work.wait()
        self._events.append(lambda: self._second.pop().wait())


def measured(comm: Comm, case: Case, link: Link | None, turns: int, names: Sequence[str], travel: str) -> Any:
    """By way: the bytes that this rank sends, forward and backward, and by turn its seconds and those in exchanges."""
    torch.set_num_threads(1)
    with pinned(cores()[comm.rank % len(cores())]):
        meter = Meter()
        together = Together(comm, Metered(meter, None if link is None else Wire(link)))
        comm, in_steps = Watched(comm, together), case.way(travel) in ("chain", "pipeline")
        inputs, steps = case.inputs(comm.rank), ways(case, comm, travel=travel)
        dout = torch.randn(inputs[2].shape, generator=torch.Generator().manual_seed(99))
        found: dict[str, Any] = {name: {"seconds": [], "exchanging": [], "bytes": (0, 0)} for name in names}
        outs = {}
        with meter.packing():
            for turn in range(-1, turns):  # the first warms up
                for name in names if turn % 2 else reversed(names):
                    comm.gather("a turn", 0)
                    comm.stats.reset()
                    started = time.perf_counter()
                    outs[name], forward = once(steps[name], inputs, dout, comm)
                    seconds = time.perf_counter() - started
                    found[name]["bytes"] = forward, comm.stats.bytes_sent - forward
                    meter.seconds, together.how = 0.0, "noted" if in_steps and name == "states" else "met"
                    once(steps[name], inputs, dout, comm)
                    together.how = ""
                    together.again()
                    if turn >= 0:
                        found[name]["seconds"].append(seconds)
                        found[name]["exchanging"].append(meter.seconds)
                if turn < 0:
                    agree(outs)
        return found


def once(step: Step, inputs: Sequence[Tensor], dout: Tensor, comm: Comm) -> tuple[list[Tensor], int]:
    """One step: the output and the gradients of all inputs, and the bytes sent before backward."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = step(leaves)
    sent = comm.stats.bytes_sent
    out.backward(dout)
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)], sent


def agree(outs: dict[str, list[Tensor]]) -> None:
    """Raise ValueError if two ways do not give the same output and gradients."""
    first, *others = outs.values()
    for name, other in zip(list(outs)[1:], others, strict=True):
        for x, y in zip(first, other, strict=True):
            if (error := relative_rms(y, x)) > AGREEMENT:
                raise ValueError(f"{name} differs from {next(iter(outs))} by {error:.1e}, relative")


def core_rate(comm: Comm) -> float:
    """Operations per second of a product of float32 matrices on one core, while all processes compute."""
    torch.set_num_threads(1)
    with pinned(cores()[comm.rank % len(cores())]):
        a, times = torch.randn(768, 768), []
        for _ in range(9):
            started = time.perf_counter()
            a @ a
            times.append(time.perf_counter() - started)
        return 2 * 768**3 / statistics.median(times)


def held_link(ranks: int, heads: int, dim: int) -> Link:
    """A link as much slower than an H100's across nodes as this layer's operations, for as many bytes, take longer."""
    h100, model = Hardware.preset("h100"), ModelShape.preset("qwen3-next-80b-a3b")
    theirs, ours = model.recurrent, RecurrentLayer(heads, dim, dim, delta=True)
    assert theirs is not None
    moved, own = theirs.bytes(), ours.bytes("float32")
    seconds = (model.linear_flops / model.layers + theirs.flops) / h100.linear_rate / (moved.row + moved.out)
    here = ours.flops / min(run_processes(ranks, core_rate)) / (own.row + own.out)
    return Link(h100.across.latency, h100.across.bandwidth * seconds / here)


def row(
    case: Case, link: Link | None, turns: int, *, names: Sequence[str] = WAYS, travel: str = "auto"
) -> dict[str, Any]:
    """The figures of a case: of each way, and theirs over ours."""
    ranks = run_processes(case.ranks, measured, case, link, turns, list(names), travel, timeout=900.0)
    figures: dict[str, Any] = {}
    columns: dict[str, dict[str, list[float]]] = {}
    for name in names:
        columns[name] = {
            what: [max(turn) for turn in zip(*(rank[name][what] for rank in ranks), strict=True)]
            for what in ("seconds", "exchanging")
        }
        figures[name] = {what: round(statistics.median(column), 5) for what, column in columns[name].items()}
        # each direction lasts as long as its busiest rank
        figures[name]["bytes"] = sum(map(max, zip(*(rank[name]["bytes"] for rank in ranks), strict=True)))
    ratios = {}
    for name in names[1:]:
        for what, theirs in columns[name].items():
            each = [x / y for x, y in zip(theirs, columns[names[0]][what], strict=True)]
            low, high = interval(each)
            ratios[f"{name}, {what}"] = [round(statistics.median(each), 3), round(low, 3), round(high, 3)]
    return asdict(case) | {"turns": turns, "travel": case.way(travel), "ways": figures, "ratios": ratios}


def formula(case: Case) -> float:
    """Tokens per rank from which states are fewer bytes than Ulysses' rows."""
    layer, p = case.layer, case.ranks
    return p * ((p - 1) * layer.state + (p - 2) * layer.map) / ((p - 1) * (layer.row + layer.out))


def crossover(case: Case, link: Link | None, turns: int, sweep: Sequence[int]) -> dict[str, Any]:
    """Where states begin to beat Ulysses: by the formula, and the tokens per rank between which the order changes."""
    rows = [
        row(
            Case(case.ranks, case.link, case.family, n * case.ranks, case.heads, case.dim), link, turns,
            names=WAYS[:2], travel="gather",
        )
        for n in sweep
    ]  # fmt: skip
    found: dict[str, Any] = {"ranks": case.ranks, "link": case.link, "family": case.family}
    found["formula"] = round(formula(case))
    for what in ("bytes", "exchanging", "seconds"):
        ours, theirs = ([each["ways"][name][what] for each in rows] for name in WAYS[:2])
        wins = [n for n, x, y in zip(sweep, ours, theirs, strict=True) if x < y]
        loses = [n for n, x, y in zip(sweep, ours, theirs, strict=True) if x >= y]
        found[what] = [max((n for n in loses if not wins or n < max(wins)), default=0), min(wins, default=None)]
    return found | {"sweep": [{"tokens per rank": n} | each["ways"] for n, each in zip(sweep, rows, strict=True)]}


def failures(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What must hold and does not."""
    found = []
    for each in rows:
        if (each["ranks"], each["tokens"]) != (RANKS, TOKENS):
            continue
        what = f"{each['family']}, {each['link']}"
        exchanging, step = (each["ratios"][f"ulysses, {name}"][0] for name in ("exchanging", "seconds"))
        if exchanging < 1 / THIRD:
            found.append(f"{what}: Ulysses' seconds in exchanges are {exchanging:.2f} of ours, below {1 / THIRD:.2f}")
        if step < LEAST[each["link"]][each["family"]]:
            found.append(f"{what}: a step is {step:.2f} times as fast, below {LEAST[each['link']][each['family']]}")
    return found


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows as a table to print."""
    result = Table(title="one recurrent layer, forward and backward", title_justify="left", box=None)
    heads = (
        "ranks",
        "link",
        "family",
        "way",
        "MB sent",
        "s in exchanges",
        "s a step",
        "exchanges / ours",
        "step / ours",
    )
    for head in heads:
        result.add_column(head, justify="right")
    for each in rows:
        for name, figures in each["ways"].items():
            told = [each["ratios"].get(f"{name}, {what}") for what in ("exchanging", "seconds")]
            cells = [f"{x[0]:.2f} ({x[1]:.2f} to {x[2]:.2f})" if x else "" for x in told]
            way = f"{name} ({each['travel']})" if name == "states" else name
            result.add_row(
                str(each["ranks"]), each["link"], each["family"], way, f"{figures['bytes'] / 1e6:.1f}",
                f"{figures['exchanging']:.4f}", f"{figures['seconds']:.3f}", *cells,
            )  # fmt: skip
    return result


def main() -> int:
    """Measure and print everything; returns 0 if the requirements hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, RANKS])
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    parser.add_argument("--families", nargs="+", choices=tuple(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128, help="of a key and of a value")
    parser.add_argument("--travel", choices=("auto", *LAYER_WAYS), default="auto", help="of states, but in the sweep")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--sweep", type=int, nargs="*", default=[64, 128, 256, 512, 1024], help="tokens per rank")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    console = Console(width=150)
    rows, crossovers, bandwidth = [], [], {}
    for ranks in args.ranks:
        held = held_link(ranks, args.heads, args.dim)
        bandwidth[ranks] = round(held.bandwidth)
        for link in args.links:
            wire = held if link == "held" else None
            for family in args.families:
                case = Case(ranks, link, family, args.tokens, args.heads, args.dim)
                rows.append(row(case, wire, args.turns, travel=args.travel))
                console.print(table(rows[-1:]))
                if args.sweep:
                    crossovers.append(crossover(case, wire, args.turns, sorted(args.sweep)))
                    told = {name: crossovers[-1][name] for name in ("formula", "bytes", "exchanging", "seconds")}
                    console.print(f"crossover in tokens per rank: {told}")
    if args.json:
        figures = {"held_bytes_per_second": bandwidth, "rows": rows, "crossovers": crossovers}
        records.write(args.json, records.environment() | figures)
    wrong = failures(rows)
    for line in wrong:
        console.print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
