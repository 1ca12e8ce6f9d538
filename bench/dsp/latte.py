"""diffusers' `LatteTransformer3DModel`, unchanged, on several ranks: as planned, and as Ulysses.

Both run through `parallelize` with the shipped spec on the same weights, and only the plan differs. Ulysses shards
space throughout; in spatial blocks queries, keys and values are traded for heads, and the output is traded back.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn

from bench.lib.virtual import Event, Post, Run, Tape, compose, least
from bench.lib.watched import Side, Watched
from bench.planner.planned import pinned
from seqpar import dsp
from seqpar.comm import Comm, Tag, Work
from seqpar.dsp.costs import Costs, Stage
from seqpar.dsp.plan import StageChoice, StagePlan
from seqpar.ops.move import pack as parcel
from seqpar.planner import Hardware, Link

HEADS, DIM = 16, 8  # published: 16 heads of 72
PAIRS = 2  # of a spatial and a temporal block; published: 14
PUBLISHED = 1152
WIDTH = HEADS * DIM
TEXT, CHANNELS = 120, 1  # tokens of text, latent channels; published: 120, 4
Row = dict[str, Any]


class Machine(NamedTuple):
    """The planner's hardware, and the bare link, whose latency excludes the computation of a switch."""

    hardware: Hardware
    link: Link


@dataclass(frozen=True)
class Clip:
    """A published clip. frames, height, width: of its latents. shrunk: what height and width were divided by."""

    name: str
    frames: int
    height: int
    width: int
    batch: int = 1
    shrunk: int = 1

    def fitted(self, tokens: int) -> Clip:
        """The clip with height and width halved, until it has at most so many tokens."""
        half = replace(self, height=self.height // 2, width=self.width // 2, shrunk=2 * self.shrunk)
        return self if self.tokens <= tokens else half.fitted(tokens)

    @property
    def space(self) -> int:
        """The tokens of one frame."""
        return (self.height // 2) * (self.width // 2)

    @property
    def tokens(self) -> int:
        """The tokens of all samples and frames."""
        return self.batch * self.frames * self.space

    @property
    def text(self) -> int:
        """The tokens of text, in the published proportion to those of a frame."""
        return max(1, round(TEXT / self.shrunk**2))


def latte(frames: int) -> nn.Module:
    """The model, the same on every rank."""
    from diffusers import LatteTransformer3DModel

    torch.manual_seed(0)
    return LatteTransformer3DModel(
        num_attention_heads=HEADS, attention_head_dim=DIM, in_channels=CHANNELS, out_channels=CHANNELS,
        num_layers=PAIRS, cross_attention_dim=WIDTH, attention_bias=True, sample_size=64, patch_size=2,
        activation_fn="gelu-approximate", norm_type="ada_norm_single", norm_elementwise_affine=False, norm_eps=1e-6,
        caption_channels=4 * WIDTH, video_length=frames,
    )  # fmt: skip


def ulysses(
    stages: Sequence[Stage], dims: Mapping[str, int], ranks: int, *, hardware: Hardware, end: object, training: bool
) -> StagePlan:
    """The plan that shards space throughout, and shares heads in stages that mix space."""
    costs = Costs(dict(dims), ranks, hardware, training)
    modes = ["ulysses" if "s" in stage.whole else "local" for stage in stages]
    choices = [StageChoice("s" if n else None, "s", mode) for n, mode in enumerate(modes)]
    seconds = sum(costs.modes(stage, "s")[mode] for stage, mode in zip(stages, modes, strict=True))
    return StagePlan(tuple(stages), tuple(choices), costs, None, "s", seconds, 0.0)


METHODS: dict[str, Callable[..., StagePlan]] = {"planned": dsp.plan_stages, "ulysses": ulysses}


class Ready:
    """A rank's model and its inputs. method: the function that makes the plan, None for the model without one."""

    def __init__(self, comm: Comm, clip: Clip, hardware: Hardware | None = None, method: str | None = None) -> None:
        self.model = latte(clip.frames)
        if method is not None:
            planner = partial(METHODS[method], hardware=hardware)
            self.handle = dsp.parallelize(self.model, comm, plan=planner)
        g = torch.Generator().manual_seed(1)
        height, width = (size // 2 * 2 for size in (clip.height, clip.width))
        self.x = torch.randn(clip.batch, CHANNELS, clip.frames, height, width, generator=g)
        self.text = torch.randn(clip.batch, clip.text, 4 * WIDTH, generator=g)
        self.timestep = torch.arange(clip.batch) * 10 + 7

    def step(self) -> float:
        """Run forward and backward; returns the loss."""
        self.model.zero_grad()
        out = self.model(self.x, timestep=self.timestep, encoder_hidden_states=self.text).sample
        loss = (out - self.x).square().mean()
        loss.backward()
        return float(loss.detach())

    @property
    def plan(self) -> StagePlan:
        """The plan of the only shape of batches."""
        (plan,) = self.handle.plans.values()
        return plan

    def layouts(self) -> str:
        """The sharding and mode of each stage."""
        costs = self.plan.costs
        grid = [f"{costs.groups}x{costs.core}, {costs.held} held:"] if costs.core > 1 else []
        ways = (f"{c.sharding or 'whole'}:{c.mode}" for c in self.plan.choices)
        return " ".join([*grid, *ways])


@dataclass
class Meter:
    """The seconds that a rank spends in exchanges and in packing for them, by the clock and of the CPU."""

    seconds: float = 0.0
    cpu: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """A block whose time counts as communication."""
        wall, cpu = time.perf_counter(), time.thread_time()
        yield
        self.seconds += time.perf_counter() - wall
        self.cpu += time.thread_time() - cpu

    @contextmanager
    def packing(self) -> Iterator[None]:
        """A block in which copies around exchanges count as communication too."""
        copy = parcel.copy

        def metered(pairs: Any) -> None:
            with self.running():
                copy(pairs)

        with mock.patch.object(parcel, "copy", metered):
            yield


@dataclass
class Wire:
    """A simulated link of a rank, which carries one exchange after another. free: the time when the last one ends."""

    link: Link
    free: float = 0.0

    def through(self, size: float) -> float:
        """The time when an exchange of so many bytes ends that starts now."""
        if size:
            self.free = max(time.perf_counter(), self.free) + self.link.seconds(size)
        return self.free if size else 0.0


@dataclass
class Metered:
    """Measures exchanges with a meter. wire: the simulated link that delays them, or None."""

    meter: Meter
    wire: Wire | None = None

    def exchange(self, post: Callable[[], Work], sends: Side, recvs: Side, tag: Tag) -> Work:
        """The comm's own exchange, which ends no sooner than on the wire."""
        with self.meter.running():
            work, due = post(), 0.0
            if self.wire is not None:
                due = self.wire.through(max(sum(x.nbytes for xs in s.values() for x in xs) for s in (sends, recvs)))
            return _MeteredWork(self.meter, work, due)


class _MeteredWork:
    """The `Work` of a metered exchange."""

    def __init__(self, meter: Meter, work: Work, due: float) -> None:
        self._meter, self._work, self._due = meter, work, due

    def wait(self) -> None:
        with self._meter.running():
            self._work.wait()
            time.sleep(max(0.0, self._due - time.perf_counter()))


def measured(comm: Comm, clip: Clip, hardware: Hardware, turns: int, link: Link | None) -> dict[str, Row]:
    """By method and turn: seconds of a step, of the CPU outside exchanges, and in exchanges; and bytes sent.

    Methods with the same plan run once: a second run would only show the machine's noise.
    """
    torch.set_num_threads(1)
    with pinned(cores()[comm.rank % len(cores())]):
        meter = Meter()
        comm = Watched(comm, Metered(meter, None if link is None else Wire(link)))
        ready = {name: Ready(comm, clip, hardware, name) for name in METHODS}
        rows: dict[str, Row] = {}
        with meter.packing():
            for name, each in ready.items():
                rows[name] = {"seconds": [], "cpu": [], "exchanging": [], "loss": each.step()} | said(each)
            once = {rows[name]["layouts"]: name for name in ready}
            for name in in_turns(list(once.values()), turns):
                comm.gather("a turn", 0)
                comm.stats.reset()
                timed(meter, ready[name], rows[name])
                sent = comm.stats
                rows[name] |= {"bytes": sent.bytes_sent, "messages": sent.messages_sent, "exchanges": sent.exchanges}
    return {name: rows[once[row["layouts"]]] | {"loss": row["loss"]} for name, row in rows.items()}


def timed(meter: Meter, ready: Ready, row: Row) -> None:
    """Run one step and add its times to the row."""
    meter.seconds = meter.cpu = 0.0
    started, cpu = time.perf_counter(), time.thread_time()
    ready.step()
    took, worked = time.perf_counter() - started, time.thread_time() - cpu
    row["seconds"].append(took)
    row["cpu"].append(worked - meter.cpu)
    row["exchanging"].append(meter.seconds)


def in_turns(names: Sequence[Any], turns: int) -> Iterator[Any]:
    """The names of every turn, each first as often as last. Garbage is collected only between steps."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for turn in range(turns):
            for name in names if turn % 2 else reversed(names):
                gc.collect()
                yield name
    finally:
        gc.enable()
        gc.unfreeze()


def said(ready: Ready) -> Row:
    """What the plan says."""
    return {"layouts": ready.layouts(), "predicted": ready.plan.seconds}


def composed(clip: Clip, ranks: int, machines: Mapping[str, Machine], turns: int) -> dict[str, list[dict[str, Row]]]:
    """The results of `measured` by machine and rank, for ranks that run one after another: see `virtual`.

    A plan is run once a turn, however many machines and methods have it, and composed over the link of each. The first
    figure of a row is of the least of all turns; the others of halves of them, to say how far chance goes.
    """
    tapes = [Tape(rank, ranks) for rank in range(ranks)]
    ready = {
        (over, name): [Ready(tape, clip, machine.hardware, name) for tape in tapes]
        for over, machine in machines.items() for name in METHODS
    }  # fmt: skip
    once: dict[str, tuple[str, str]] = {}
    rows: dict[str, list[dict[str, Row]]] = {over: [{} for _ in tapes] for over in machines}
    for (over, name), several in ready.items():
        for each, row in zip(several, rows[over], strict=True):
            each.step()
            row[name] = {"seconds": [], "cpu": [], "exchanging": [], "loss": 0.0, "grouped": True} | said(each)
        once.setdefault(several[0].layouts(), (over, name))
    tried: dict[str, list[list[list[Event]]]] = {plan: [] for plan in once}  # plan -> turns -> ranks
    for plan in in_turns(list(once), turns):
        tried[plan].append([taped(tape, each) for tape, each in zip(tapes, ready[once[plan]], strict=True)])
    for plan, all_turns in tried.items():
        half = turns // 2
        groups = all_turns, all_turns[::2], all_turns[1::2], all_turns[:half], all_turns[half:]
        for group in filter(None, groups):
            found = [least(each) for each in zip(*group, strict=True)]
            for over, machine in machines.items():
                took = compose(found, machine.link)
                for seconds, events, row in zip(took, found, rows[over], strict=True):
                    for each in row.values():
                        if each["layouts"] == plan:
                            note(each, seconds, events)
    return rows


def taped(tape: Tape, ready: Ready) -> list[Event]:
    """The events of one step."""
    tape.start()
    ready.step()
    return tape.stop()


def note(row: Row, seconds: float, events: Sequence[Event]) -> None:
    """Add the composed step of a rank to its row."""
    posts = [event for event in events if isinstance(event, Post)]
    cpu = sum(event.seconds for event in events if isinstance(event, Run))
    row["seconds"].append(seconds)
    row["cpu"].append(cpu)
    row["exchanging"].append(seconds - cpu)
    row |= {
        "bytes": sum(sum(post.sent.values()) for post in posts), "messages": sum(len(post.sent) for post in posts),
        "exchanges": len(posts),
    }  # fmt: skip


def virtual(
    comm: Comm, clip: Clip, worlds: Sequence[tuple[int, Mapping[str, Machine]]], turns: int
) -> dict[int, dict[str, list[dict[str, Row]]]]:
    """The results of `composed` by number of ranks. Each process runs its share of the worlds."""
    torch.set_num_threads(1)
    with pinned(cores()[comm.rank % len(cores())]):
        return {ranks: composed(clip, ranks, over, turns) for ranks, over in worlds[comm.rank :: comm.size]}


def cores() -> list[int]:
    """The cores of this machine."""
    return sorted(os.sched_getaffinity(0))
