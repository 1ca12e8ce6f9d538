"""`fit`: the rung, the micro-batches and the ranks for documents of these lengths, in words and as lines to paste."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from numpy.typing import ArrayLike

from seqpar.facts.layout import RANKS
from seqpar.facts.mask import Mask
from seqpar.facts.value import integer
from seqpar.planner.forecast import in_words
from seqpar.planner.hardware import PRESETS, Hardware
from seqpar.planner.ladder import HOST, RUNGS, Batch, Choice, LadderRow, Machine, Mix
from seqpar.planner.memory import KINDS, SLACK, WORDS
from seqpar.planner.shape import TILE, ModelShape
from seqpar.planner.step import MOST
from seqpar.planner.training import Training

HEADER = ("rung", "longest", "micro-batches", "seconds", *(f"{kind} GB" for kind in KINDS), "of GB", "limit")
GB = 1_000_000_000


@dataclass(frozen=True, eq=False)
class Ladder:
    """What `fit` found. rungs: on the ranks of the choice. by_ranks: numbers of ranks with the seconds of a step."""

    model: ModelShape
    hardware: Hardware
    training: Training
    tokens: int
    longest: int
    rungs: tuple[LadderRow, ...]
    choice: Choice
    by_ranks: tuple[tuple[int, float], ...]
    hiding: int

    def rows(self) -> list[list[str]]:
        """The table of rungs, with `HEADER`."""
        return [_cells(rung) for rung in self.rungs]

    def describe(self) -> str:
        """The table, the choice and its reasons, and the lines to paste."""
        cells = [list(HEADER), *self.rows()]
        widths = [max(len(row[i]) for row in cells) for i in range(len(HEADER))]
        table = (
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
        )
        return "\n".join([self.headline, "", *table, "", self.reasons, "", self.lines])

    @property
    def headline(self) -> str:
        """The batch and the choice, in a sentence."""
        c = self.choice
        return (
            f"{self.tokens:,} tokens, the longest document {self.longest:,}, {self.model.name} on "
            f"{self.hardware.name}: {c.ranks} rank{'s' * (c.ranks > 1)}, {c.mix}, {c.micro_batches} "
            f"micro-batch{'es' * (c.micro_batches > 1)}, {in_words(c.seconds)} a step"
        )

    @property
    def reasons(self) -> str:
        """The memory of a rank, numbers of ranks, and whether weights arrive in time, in words."""
        c = self.choice
        each = ", ".join(f"{ranks}: {in_words(seconds)}" for ranks, seconds in self.by_ranks)
        most = c.memory.most(c.rows)
        kinds = ", ".join(f"{kind} {held / GB:.1f}" for kind, held in most.kinds(c.rows).items())
        size = f"{most.bytes(c.rows) / GB:.1f} of {c.memory.usable / GB:.1f} GB {WORDS[most.name]}"
        said = (
            f"memory of a rank {size}: {kinds}\n"
            f"seconds of a step by ranks: {each}\n"
            f"{in_words(c.exposed)} of a step wait for weights, gradients or the host; a layer's weights arrive while "
            f"the layer before computes from {self.hiding:,} rows a rank on, and a rank has up to {c.rows:,}"
        )
        if c.memory.host is None:
            return said
        host = c.memory.host.bytes(c.rows) / GB
        return (
            f"{said}\n{host:.1f} GB of the host's memory for each rank; {self.hardware.host / GB:g} GB/s between them, "
            "also for the optimizer there, are an assumption (Hardware.host)"
        )

    @property
    def lines(self) -> str:
        """Lines to paste into a program that has ``model``, ``comm`` and ``lengths``; see `lines`."""
        return "\n".join(_lines(self))

    def facts(self) -> dict[str, Any]:
        """The ladder as plain data; times are in seconds, sizes in bytes."""
        c = self.choice
        return {
            "model": self.model.name, "hardware": self.hardware.name, "tokens": self.tokens, "longest": self.longest,
            "ranks": c.ranks, "first_layers": c.mix.number, "first": c.mix.first, "rest": c.mix.rest,
            "state_on_host": c.mix.state_on_host, "rows": c.rows, "micro_batches": c.micro_batches,
            "seconds": c.seconds, "exposed": c.exposed, "bytes": c.memory.bytes(c.rows), "usable": c.memory.usable,
            "by_ranks": [{"ranks": ranks, "seconds": seconds} for ranks, seconds in self.by_ranks],
            "hiding_rows": self.hiding,
            "rungs": [
                {
                    "rung": r.name, "longest": r.longest, "micro_batches": r.micro_batches, "seconds": r.seconds,
                    **r.limit.kinds(r.rows), "limit": r.limit.name,
                }
                for r in self.rungs
            ],
        }  # fmt: skip


def fit(
    lengths: ArrayLike | Mask,
    ranks: int,
    *,
    model: str | ModelShape = "llama-8b",
    hardware: str | Hardware = "h100",
    training: Training | None = None,
    tolerance: float = 0.15,
    rungs: Sequence[str] | None = None,
) -> Ladder:
    """How documents of these lengths are trained on at most so many ranks: the rung of each layer, and the ranks.

    lengths: tokens of each document of a global batch, or its mask. model, hardware: values, or names of presets; what
    the model recomputes is chosen here. training: by default ``Training()``. rungs: names of the rungs that may be
    taken, by default all of `seqpar.planner.ladder.RUNGS` for which there is memory on the host. The ranks are a
    divisor of ``ranks``: the fewest whose step takes at most ``1 + tolerance`` times the shortest step.

    Raises: ValueError for arguments out of range, and for a document that fits no rung: the error says how many bytes
    are missing, and three changes with which it fits.
    """
    ranks, machine = integer("ranks", ranks, 1, RANKS), Hardware.of(hardware)
    training = Training() if training is None else training
    if not isinstance(training, Training):
        raise ValueError(f"training must be a Training or None, got {training!r:.100}")
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not 0 <= tolerance < float("inf"):
        raise ValueError(f"tolerance must be a finite number of at least 0, got {tolerance!r:.60}")
    shape = model if isinstance(model, ModelShape) else ModelShape.preset(model)
    shape = replace(shape, recompute="none")
    training.over(ranks)
    names = _names(rungs, training)
    batch = Batch(lengths, shape, machine)
    guesses = []
    for at in _machines(shape, machine, training, ranks):
        if (guess := batch.guessed(at, names)) is not None:
            guesses.append((at, *guess))
    if not guesses:
        at = Machine(shape, machine, training, ranks)
        at = at if batch.longest > at.longest(names) else at.of(2)
        raise ValueError(_refusal(batch, at, names, chosen=rungs is not None))
    least = min(seconds for _, seconds, _, _ in guesses)
    found = [
        batch.planned(at, mix, memory) for at, seconds, mix, memory in guesses if seconds <= least * (2 + tolerance)
    ]
    best = min(choice.seconds for choice in found)
    choice = next(choice for choice in found if choice.seconds <= best * (1 + tolerance))
    at = Machine(shape, machine, training, choice.ranks)
    return Ladder(
        shape, machine, training, batch.tokens, batch.longest, tuple(_rung(batch, at, name) for name in names), choice,
        tuple((choice.ranks, choice.seconds) for choice in found), at.hiding,
    )  # fmt: skip


def _names(rungs: Sequence[str] | None, training: Training) -> list[str]:
    """The names of the rungs, in the order of the ladder."""
    if rungs is None:
        return [name for name in RUNGS if training.host_bytes or name not in HOST]
    known = list(RUNGS)
    if isinstance(rungs, str) or not isinstance(rungs, Collection) or not rungs or any(x not in known for x in rungs):
        raise ValueError(f"rungs must be some of {', '.join(RUNGS)}, got {rungs!r:.100}")
    if not training.host_bytes and (given := sorted(set(rungs) & set(HOST))):
        raise ValueError(f"the rung {given[0]} needs memory of the host; give Training(host_bytes=...), for a rank")
    return [name for name in RUNGS if name in rungs]


def _machines(shape: ModelShape, hardware: Hardware, training: Training, ranks: int) -> Iterator[Machine]:
    """The machines of fewer ranks, all divisors that can share the state as asked."""
    for fewer in (n for n in range(1, ranks + 1) if not ranks % n):
        with suppress(ValueError):
            training.over(fewer)
            yield Machine(shape, hardware, training, fewer)


def _rung(batch: Batch, at: Machine, name: str) -> LadderRow:
    """A row of the table."""
    policy, whole = RUNGS[name]
    mix = Mix(0, policy, policy, whole, at.training.state_on_host or name == "state-on-host")
    memory = at.memory(mix)
    longest = min(memory.rows * at.ranks, MOST)
    if batch.longest <= longest < batch.tokens:
        memory = at.of(2).memory(mix)
    if batch.longest > min(longest, memory.rows * at.ranks):
        return LadderRow(name, longest, -(-batch.longest // at.ranks), memory)
    planned = batch.planned(at, mix, memory)
    return LadderRow(name, longest, planned.rows, memory, planned.micro_batches, planned.seconds)


def _cells(rung: LadderRow) -> list[str]:
    limit = rung.limit
    of = rung.memory.usable_on_host if limit.name == "host" else rung.memory.usable
    known = ["does not fit", "-"]
    if rung.seconds is not None:
        known = [str(rung.micro_batches), in_words(rung.seconds)]
    return [
        rung.name, f"{rung.longest:,}", *known, *(f"{held / GB:.1f}" for held in limit.kinds(rung.rows).values()),
        f"{of / GB:.1f}",
        WORDS[limit.name],
    ]  # fmt: skip


def _gb(size: int) -> str:
    """Bytes in words: 12.3 GB."""
    return f"{size / GB:.1f} GB" if size >= GB // 10 else f"{size / GB:.3g} GB"


def _refusal(batch: Batch, at: Machine, names: Sequence[str], *, chosen: bool) -> str:
    """Why the longest document fits no rung, and three changes with which it does. chosen: the rungs, by the caller."""
    rows = -(-batch.longest // at.ranks)
    missing, limit, has, mix = min(
        (limit.bytes(rows) - has, limit, has, part[-1])
        for part in at.mixes(names)
        for limit, has in [max(at.memory(part[-1]).limits, key=lambda each: each[0].bytes(rows) - each[1])]
    )
    ways = list(islice(_ways(batch, at, names, chosen=chosen), 3)) or [
        "a smaller model, since no single change here suffices"
    ]
    return (
        f"a document of {batch.longest:,} tokens fits {at.ranks} rank{'s' * (at.ranks > 1)} of {at.hardware.name} on "
        f"no rung: with {mix}, a rank needs {_gb(limit.bytes(rows))} {WORDS[limit.name]} and has {_gb(has)}, "
        f"{_gb(missing)} too little; give {', '.join(ways[:-1])}{', or ' * (len(ways) > 1)}{ways[-1]}"
    )


def _ways(batch: Batch, at: Machine, names: Sequence[str], *, chosen: bool) -> Iterator[str]:
    """Changes with which the longest document fits, each confirmed by the same counts."""

    def fits(changed: Machine) -> bool:
        return changed.longest(names) >= batch.longest

    more = at.ranks
    while more * 2 <= RANKS:
        more *= 2
        if fits(at._replace(ranks=more)):
            yield f"{more} ranks"
            break
    if longest := at.longest(names):
        yield f"documents of at most {longest:,} tokens"
    roomy = at._replace(training=replace(at.training, host_bytes=1 << 60))
    tokens = min(batch.longest, roomy.longest(list(RUNGS)))
    for held in () if chosen else (at.training.state_on_host, True):
        memory, rows = roomy.memory(Mix(0, "offload", "offload", False, held)), -(-tokens // at.ranks)
        if tokens and memory.rows >= rows and memory.host is not None:
            size = -(-memory.host.bytes(rows) // GB) * GB
            host = f"{size / GB:.0f} GB of the host's memory for each rank (Training(host_bytes={size}))"
            if size > at.training.host_bytes:
                yield host if tokens == batch.longest else f"documents of at most {tokens:,} tokens with {host}"
            break
    rows = -(-batch.longest // at.ranks)
    memories = (at.memory(mix) for part in at.mixes(names) for mix in part)
    on_host = (memory for memory in memories if memory.host is None or memory.host.bytes(rows) <= memory.usable_on_host)
    needed = min((memory.bytes(rows) for memory in on_host), default=0)
    size = -(-((needed + at.hardware.reserve) * SLACK // (SLACK - 1) + SLACK) // GB) * GB
    if needed and fits(at._replace(hardware=replace(at.hardware, memory=size))):
        yield f"a machine with {size / GB:.0f} GB for each rank"
    for name, value in (("reshard", True), ("fused_norms", True), ("reductions", "bfloat16")):
        changed = replace(at.training, **{name: value})  # type: ignore[arg-type]
        if getattr(at.training, name) != value and fits(at._replace(training=changed)):
            yield f"Training({name}={value!r})"


def _lines(ladder: Ladder) -> Iterator[str]:
    """The lines of `Ladder.lines`."""
    c, t, layers = ladder.choice, ladder.training, ladder.model.layers
    shards, mix = t.over(c.ranks), c.mix
    parts = [(mix.first, slice(0, mix.number)), (mix.rest, slice(mix.number, layers))]
    if not mix.number:
        parts = [(mix.rest, slice(0, layers))]
    host = mix.state_on_host
    names = ["CPUOffloadPolicy"] * host + ["MixedPrecisionPolicy", "fully_shard"]
    yield from (
        "import torch",
        f"from torch.distributed.fsdp import {', '.join(names)}",
        "",
        "import seqpar",
        "from seqpar.planner import ModelShape",
        "",
        "shape = ModelShape.from_config(model.config, recompute=" + f'"{mix.planned}")',
        "seqpar.parallelize(model, comm, average_over=comm.size)",
        "layers = model.model.layers",
    )
    for policy, part in parts:
        if policy == "none" or part.start == part.stop:
            continue
        where = "layers" if part == slice(0, layers) else f"layers[{part.start or ''}:{part.stop % layers or ''}]"
        yield f"for layer in {where}:"
        if policy in ("tiled", "offload"):
            mlp = "" if ladder.model.sparse_count else ' or name == "mlp"'  # experts cannot be tiled
            yield "    for name, part in layer.named_children():"
            yield f'        if name.endswith("norm"){mlp}:'
            yield f"            seqpar.train.tile(part, {TILE})"
        how = {"keep-attention": ", save_attention=True", "offload": ", offload=True"}.get(policy, "")
        yield f"    seqpar.train.recompute(layer{how})"
    if mix.rest in ("tiled", "offload"):
        yield f"seqpar.train.tile(model.model.norm, {TILE})"
    given = "mp_policy=policy" + ", offload_policy=CPUOffloadPolicy()" * host
    if shards < c.ranks:
        dims = '("copies", "shards")'
        sizes = f"{c.ranks // shards}, {shards}"
        yield f"mesh = torch.distributed.init_device_mesh(model.device.type, ({sizes}), mesh_dim_names={dims})"
        given = f"mesh=mesh, {given}"
    yield f"policy = MixedPrecisionPolicy(torch.{t.weights}, torch.{t.reductions})"
    yield "for layer in layers:"
    yield f"    fully_shard(layer, {given}, reshard_after_forward={t.reshard})"
    yield f"fully_shard(model, {given})"
    preset = ladder.hardware.name in PRESETS and ladder.hardware == Hardware.preset(ladder.hardware.name)
    machine = f'"{ladder.hardware.name}"' if preset else "hardware"
    yield f"parts = seqpar.plan_step(lengths, {c.ranks}, model=shape, hardware={machine}, max_tokens_per_rank={c.rows})"
