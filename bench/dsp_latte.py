"""`LatteTransformer3DModel` of diffusers, unchanged, on some ranks: as planned, and as Ulysses.

Both run through `parallelize` with the shipped spec on the same weights; the plan alone differs. Ulysses holds space
throughout, and in spatial blocks queries, keys and values go to heads and what comes out goes back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any
from unittest import mock

import torch
from planned import pinned
from torch import Tensor, nn
from torch.nn import functional as F
from virtual import Post, Run, Tape, compose

import seqpar
from seqpar import dsp
from seqpar.comm import Comm, LocalComm, Tag, Work
from seqpar.dsp.planner import Choice, StagePlan
from seqpar.dsp.stage import Costs, Stage
from seqpar.ops import parcel
from seqpar.planner import Hardware, Link
from seqpar.planner.hardware import BACKWARD, Attention

HEADS, DIM = 16, 8  # published: 16 heads of 72
PAIRS = 2  # of a spatial and a temporal block; published: 14
PUBLISHED = 1152
WIDTH = HEADS * DIM
TEXT, CHANNELS = 120, 1  # tokens of text, latent channels; published: 120, 4
LARGE = 1 << 20  # elements of a switch that measures bandwidth


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
        clip = replace(self, height=self.height // 2, width=self.width // 2, shrunk=2 * self.shrunk)
        return clip if clip.tokens <= tokens else clip.fitted(tokens)

    @property
    def space(self) -> int:
        """Tokens of a frame."""
        return (self.height // 2) * (self.width // 2)

    @property
    def tokens(self) -> int:
        """Of all samples and frames."""
        return self.batch * self.frames * self.space

    @property
    def text(self) -> int:
        """Tokens of text, in the published proportion to those of a frame."""
        return max(1, round(TEXT / self.shrunk**2))


# --- the model --------------------------------------------------------------------------------------------------------


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
    """The plan that holds space throughout, and shares heads where it is mixed."""
    costs = Costs(dict(dims), ranks, hardware, training)
    modes = ["ulysses" if "s" in stage.whole else "local" for stage in stages]
    choices = [Choice("s" if n else None, "s", mode) for n, mode in enumerate(modes)]
    seconds = sum(costs.modes(stage, "s")[mode] for stage, mode in zip(stages, modes, strict=True))
    return StagePlan(tuple(stages), tuple(choices), costs, None, "s", seconds, 0.0)


METHODS: dict[str, Callable[..., StagePlan]] = {"planned": dsp.plan_stages, "ulysses": ulysses}


class Ready:
    """A rank's model, and what it is trained on. method: what makes the plan, or None for the model as it is."""

    def __init__(self, comm: Comm, clip: Clip, hardware: Hardware | None = None, method: str | None = None) -> None:
        self.model = latte(clip.frames)
        if method is not None:
            planner = partial(METHODS[method], hardware=hardware)
            self.handle = dsp.parallelize(self.model, comm, planner=planner)
        g = torch.Generator().manual_seed(1)
        height, width = (size // 2 * 2 for size in (clip.height, clip.width))
        self.x = torch.randn(clip.batch, CHANNELS, clip.frames, height, width, generator=g)
        self.text = torch.randn(clip.batch, clip.text, 4 * WIDTH, generator=g)
        self.timestep = torch.arange(clip.batch) * 10 + 7

    def step(self) -> float:
        """Forward and backward; the loss."""
        self.model.zero_grad()
        out = self.model(self.x, timestep=self.timestep, encoder_hidden_states=self.text).sample
        loss = (out - self.x).square().mean()
        loss.backward()
        return float(loss.detach())

    @property
    def plan(self) -> StagePlan:
        """Of the only batch shape."""
        (plan,) = self.handle.plans.values()
        return plan

    def layouts(self) -> str:
        """What is sharded in each stage."""
        costs = self.plan.costs
        grid = [f"{costs.groups}x{costs.core}, {costs.held} held:"] if costs.core > 1 else []
        return " ".join([*grid, *(f"{c.layout or 'whole'}:{c.mode}" for c in self.plan.choices)])


# --- a comm that is looked at -----------------------------------------------------------------------------------------


Side = Mapping[int, Sequence[Tensor]]


@dataclass
class Meter:
    """Seconds that a rank spends in exchanges, and with packing for them: of time and of the CPU."""

    seconds: float = 0.0
    cpu: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """What runs inside is communication."""
        wall, cpu = time.perf_counter(), time.thread_time()
        yield
        self.seconds += time.perf_counter() - wall
        self.cpu += time.thread_time() - cpu

    @contextmanager
    def packing(self) -> Iterator[None]:
        """Copies that verbs make around exchanges are communication too."""
        copy = parcel.copy

        def metered(pairs: Any) -> None:
            with self.running():
                copy(pairs)

        with mock.patch.object(parcel, "copy", metered):
            yield


class Metered:
    """A comm with a meter. link: what every exchange is held back to, as if bytes travelled on that, or None."""

    def __init__(self, comm: Comm, meter: Meter, link: Link | None = None) -> None:
        self._comm, self._meter, self._link = comm, meter, link

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def sub(self, ranks: Sequence[int]) -> Comm:
        """As the comm's own, with the same meter."""
        return Metered(self._comm.sub(ranks), self._meter, self._link)

    def exchange(self, sends: Side, recvs: Side, *, tag: Tag) -> Work:
        """As the comm's own."""
        with self._meter.running():
            work, due = self._comm.exchange(sends, recvs, tag=tag), 0.0
            if self._link is not None:
                sizes = (sum(x.nbytes for xs in side.values() for x in xs) for side in (sends, recvs))
                due = time.perf_counter() + self._link.seconds(max(sizes))
            return _Metered(self._meter, work, due)


class _Metered:
    """`Work` of a `Metered` comm."""

    def __init__(self, meter: Meter, work: Work, due: float) -> None:
        self._meter, self._work, self._due = meter, work, due

    def wait(self) -> None:
        with self._meter.running():
            self._work.wait()
            time.sleep(max(0.0, self._due - time.perf_counter()))


# --- what a rank runs -------------------------------------------------------------------------------------------------


def measured(comm: Comm, clip: Clip, hardware: Hardware, repeat: int, link: Link | None) -> dict[str, dict[str, Any]]:
    """By method: of each turn the seconds of a step, of the CPU outside exchanges, and in exchanges; what was sent."""
    torch.set_num_threads(1)
    with pinned(cores()[comm.rank % len(cores())]):
        meter = Meter()
        comm = Metered(comm, meter, link)
        ready = {name: Ready(comm, clip, hardware, name) for name in METHODS}
        found: dict[str, dict[str, Any]] = {name: {"seconds": [], "cpu": [], "exchanging": []} for name in ready}
        with meter.packing():
            for turn in range(repeat + 1):
                # each goes first as often as the other
                for name in list(ready) if turn % 2 else reversed(ready):
                    timed(comm, meter, ready[name], found[name], counts=turn > 0)
    return {name: row | said(ready[name]) for name, row in found.items()}


def timed(comm: Comm, meter: Meter, ready: Ready, row: dict[str, Any], *, counts: bool) -> None:
    """One step, noted in the row; a first one, for what is made once, does not count."""
    comm.gather("a turn", 0)
    comm.stats.reset()
    meter.seconds = meter.cpu = 0.0
    started, cpu = time.perf_counter(), time.thread_time()
    loss = ready.step()
    took, worked = time.perf_counter() - started, time.thread_time() - cpu
    if counts:
        row["seconds"].append(took)
        row["cpu"].append(worked - meter.cpu)
        row["exchanging"].append(meter.seconds)
    sent = comm.stats
    row |= {"bytes": sent.bytes_sent, "messages": sent.messages_sent, "exchanges": sent.exchanges, "loss": loss}


def said(ready: Ready) -> dict[str, Any]:
    """What the plan says."""
    return {"layouts": ready.layouts(), "predicted": ready.plan.seconds}


def composed(clip: Clip, ranks: int, hardware: Hardware, repeat: int) -> list[dict[str, dict[str, Any]]]:
    """What `measured` returns on every rank, of ranks that run one after another: see `virtual`."""
    tapes = [Tape(rank, ranks) for rank in range(ranks)]
    ready = {name: [Ready(tape, clip, hardware, name) for tape in tapes] for name in METHODS}
    found = [{name: {"seconds": [], "cpu": [], "exchanging": [], "loss": 0.0} for name in ready} for _ in tapes]
    for turn in range(repeat + 1):
        for name in list(ready) if turn % 2 else reversed(ready):
            events = []
            for tape, each, rows in zip(tapes, ready[name], found, strict=True):
                tape.start()
                each.step()
                events.append(tape.stop())
                posts = [event for event in events[-1] if isinstance(event, Post)]
                sent = [len(post.sent) for post in posts]
                rows[name] |= {
                    "bytes": sum(sum(post.sent.values()) for post in posts), "messages": sum(sent),
                    "exchanges": len(sent),
                } | said(each)  # fmt: skip
            for seconds, one, rows in zip(compose(events, hardware.inside), events, found, strict=True):
                if turn:
                    cpu = sum(event.seconds for event in one if isinstance(event, Run))
                    rows[name]["seconds"].append(seconds)
                    rows[name]["cpu"].append(cpu)
                    rows[name]["exchanging"].append(seconds - cpu)
    return found


def virtual(comm: Comm, clip: Clip, worlds: Sequence[tuple[int, Hardware]], repeat: int) -> dict[int, Any]:
    """Composed rows by the number of a world. Of the worlds every process takes its share."""
    torch.set_num_threads(1)
    mine = range(comm.rank, len(worlds), comm.size)
    with pinned(cores()[comm.rank % len(cores())]):
        return {n: composed(clip, *worlds[n], repeat) for n in mine}


def cores() -> list[int]:
    """Those of this machine."""
    return sorted(os.sched_getaffinity(0))


# --- the machine ------------------------------------------------------------------------------------------------------


def machine(comm: Comm, repeat: int) -> dict[str, float]:
    """What a rank achieves while all of them work: operations a second of the model and of attention, and the link."""
    torch.set_num_threads(1)
    # a rank with a core of its own computes as fast as that; others share one
    clock = time.thread_time if comm.size <= len(cores()) else time.perf_counter
    with pinned(cores()[comm.rank % len(cores())]):
        return rates(repeat, clock) | link(comm, repeat)


def rates(repeat: int, clock: Callable[[], float]) -> dict[str, float]:
    """Operations a second of linear layers with all that surrounds them, and of attention both ways."""
    batch, tokens = 8, 256
    q, k, v = (torch.randn(batch, HEADS, tokens, DIM, requires_grad=True) for _ in range(3))
    flops, (forward, backward) = 4.0 * batch * tokens**2 * WIDTH, ([], [])
    clip = Clip("calibration", 16, 16, 16)
    ready, steps = Ready(LocalComm(), clip), []
    for _ in range(repeat + 1):
        times = [clock()]
        out = F.scaled_dot_product_attention(q, k, v)
        times.append(clock())
        out.sum().backward()
        times.append(clock())
        ready.step()
        times.append(clock())
        for each, (a, b) in zip((forward, backward, steps), pairwise(times), strict=True):
            each.append(b - a)
    rate, backward_rate = flops / median(forward[1:]), BACKWARD * flops / median(backward[1:])
    rows = clip.frames * clip.space
    blocks = (*ready.model.transformer_blocks, *ready.model.temporal_transformer_blocks)
    linear = 6.0 * rows * sum(p.numel() for block in blocks for p in block.parameters() if p.dim() > 1)
    mixed = 4.0 * rows * (clip.space + clip.frames) * WIDTH * PAIRS
    beside = mixed / rate + BACKWARD * mixed / backward_rate
    return {"linear": linear / max(median(steps[1:]) - beside, 1e-9), "forward": rate, "backward": backward_rate}


def link(comm: Comm, repeat: int) -> dict[str, float]:
    """Seconds of the smallest switch, and bytes a second of a large one beyond that."""
    took = []
    for rows in (comm.size, comm.size * -(-LARGE // (comm.size * WIDTH))):
        x, seconds = torch.randn(1, rows, comm.size, WIDTH), []
        for _ in range(3 * repeat):
            comm.gather("a turn", 0)
            started = time.perf_counter()
            seqpar.switch(x, comm, split_dim=1, concat_dim=2)
            seconds.append(time.perf_counter() - started)
        took.append((x.nbytes * (1 - 1 / comm.size), median(seconds)))
    (_, latency), (size, seconds) = took
    return {"latency": latency, "bandwidth": size / max(seconds - latency, 1e-9)}


def hardware_of(found: Sequence[Mapping[str, float]], name: str) -> Hardware:
    """The machine as the planner takes it: the middle of what the ranks say."""
    middle = {key: median(rank[key] for rank in found) for key in found[0]}
    attention = Attention(middle["forward"], middle["backward"], 0.0, 0.0, 0.0, 0.0)
    wire = Link(middle["latency"], middle["bandwidth"])
    return Hardware(
        name, "measured by bench/dsp.py", attention, middle["linear"], wire, wire, memory=1 << 34, node=len(found)
    )
