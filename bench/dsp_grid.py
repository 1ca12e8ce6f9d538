"""The planned Latte step beside Ulysses over a grid of published clips: what is run, and whether the promise holds.

Two processes are measured over shared memory, over gloo on loopback, and over shared memory with every exchange held
back to a link that is to a core of this machine what InfiniBand is to an H100 for the published width. 4 and 8 ranks
run one after another with their exchanges composed, at the measured link of shared memory and at that slow one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from dsp_latte import METHODS, PAIRS, PUBLISHED, WIDTH, Clip, hardware_of, machine, measured, virtual
from planned import interval
from rich.console import Console
from rich.table import Table

from seqpar.planner import Hardware, Link
from seqpar.testing import run_processes

# Latents of the VAE: an eighth of height and width. OpenSora 1.2 makes 5 of 17 frames, Latte one of each.
FRAMES = {"51": 15, "102": 30, "204": 60}
HEIGHTS = {"144p": (18, 32), "240p": (30, 52), "360p": (44, 80), "480p": (60, 106), "720p": (90, 160)}
CLIPS = (
    Clip("Latte 16 x 256^2", 16, 32, 32),
    Clip("Latte 16 x 512^2", 16, 64, 64),
    *(Clip(f"OpenSora {n} x {p}", t, *hw) for n, t in FRAMES.items() for p, hw in HEIGHTS.items()),
    Clip("short, 17 x 240p", 5, *HEIGHTS["240p"]),
    Clip("short, 17 x 480p", 5, *HEIGHTS["480p"]),
    Clip("32 images of 256^2", 1, 32, 32, batch=32),
    Clip("an image of 720p", 1, *HEIGHTS["720p"]),
)
QUICK = CLIPS[:1]
TOKENS = 4096  # of a clip at most; published ones have up to 216,000
SMALL = 1024  # tokens up to which steps are short, and there are more of them
Row = dict[str, Any]
THIRD, FASTER = 1 / 3, 1.3


def slow(fast: Hardware) -> Hardware:
    """The machine with a link on which switches take the part of a step that they take on H100 nodes.

    As many times slower as a core is than an H100, and faster by what a narrower model moves more for its operations.
    """
    h100 = Hardware.preset("h100")
    scale = fast.linear_rate / h100.linear_rate * (PUBLISHED / WIDTH) * (4 / 2)  # fp32 instead of bf16
    wire = Link(fast.inside.latency, h100.across.bandwidth * scale)
    return replace(fast, name=f"{fast.name}, slow link", inside=wire, across=wire)


def grid(quick: bool, repeat: int, show: Callable[[Row], None]) -> tuple[list[Row], Row]:
    """A row for every clip, ranks and link; and the machine by link."""
    machines = {}
    for comm in ("shm", "gloo"):
        found = run_processes(2, machine, 2 if quick else 7, comm=comm, timeout=120.0)
        machines[comm] = hardware_of(found, comm)
    machines["slow"] = slow(machines["shm"])
    rows, worlds = [], [(n, over) for over in ("shm", "slow") for n in ((4,) if quick else (4, 8))]
    for clip in QUICK if quick else CLIPS:
        clip = clip.fitted(128 if quick else TOKENS)
        turns = repeat if clip.tokens > SMALL else 3 * repeat
        for over, hardware in machines.items():
            held = hardware.inside if over == "slow" else None
            comm = "gloo" if over == "gloo" else "shm"
            found = run_processes(2, measured, clip, hardware, turns, held, comm=comm, timeout=120.0)
            rows.append(row_of(clip, 2, over, found))
            show(rows[-1])
        jobs = [(n, replace(machines[over], node=n)) for n, over in worlds]
        shares = run_processes(2, virtual, clip, jobs, max(1, turns // 2), timeout=120.0)
        for n, by_rank in sorted({n: each for share in shares for n, each in share.items()}.items()):
            rows.append(row_of(clip, worlds[n][0], f"{worlds[n][1]}, composed", by_rank))
            show(rows[-1])
    return rows, {name: each.to_dict() for name, each in machines.items()}


def row_of(clip: Clip, ranks: int, over: str, found: Sequence[dict[str, Row]]) -> Row:
    """One cell: both methods, their ratio, and the part of the Ulysses step that exchanges take."""
    ways = {name: way([rank[name] for rank in found]) for name in METHODS}
    planned, ulysses = ways["planned"], ways["ulysses"]
    share = ulysses["exchanging"] / ulysses["seconds"]
    return {
        "clip": clip.name, "batch": clip.batch, "frames": clip.frames, "space": clip.space, "shrunk": clip.shrunk,
        "ranks": ranks, "over": over, "same": planned["layouts"] == ulysses["layouts"], "share": share,
        "ratio": ulysses["seconds"] / planned["seconds"],
        # what the bytes alone would give
        "by_bytes": 1 / (1 - share * (1 - planned["bytes"] / ulysses["bytes"])),
    } | ways  # fmt: skip


def way(ranks: Sequence[Row]) -> Row:
    """A method over all ranks: the slowest rank's step, what the rank spends in exchanges that waits least in them."""
    steps = [max(turn) for turn in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    exchanging = [min(turn) for turn in zip(*(rank["exchanging"] for rank in ranks), strict=True)]
    low, high = interval(steps)
    most = {key: max(rank[key] for rank in ranks) for key in ("bytes", "messages", "exchanges")}
    return most | {
        "seconds": median(steps), "low": low, "high": high, "exchanging": median(exchanging),
        "cpu": max(median(rank["cpu"]) for rank in ranks), "loss": ranks[0]["loss"], "layouts": ranks[0]["layouts"],
        "predicted": ranks[0]["predicted"],
    }  # fmt: skip


def name(row: Row) -> str:
    """A cell in words."""
    figures = f"{row['ratio']:.2f} at a share of {row['share']:.0%}, by bytes {row['by_bytes']:.2f}"
    return f"{row['clip']} on {row['ranks']} over {row['over']} ({figures})"


def equal(row: Row) -> bool:
    """Faster, or no slower than the intervals say."""
    return row["same"] or row["ratio"] >= 1 or row["planned"]["low"] <= row["ulysses"]["high"]


def verdict(rows: Sequence[Row]) -> Row:
    """Where the plan is not Ulysses itself: cells that are slower, and those with much communication below 1.3."""
    much = [row for row in rows if row["share"] >= THIRD and not row["same"]]
    slower = [name(row) for row in rows if not equal(row)]
    below = [name(row) for row in much if row["ratio"] < FASTER]
    return {
        "holds": not slower and not below, "cells": len(rows), "same": sum(row["same"] for row in rows),
        "much": len(much), "slower": slower, "below": below,
        "same_and_much": [name(row) for row in rows if row["same"] and row["share"] >= THIRD],
        "least": min((row["ratio"] for row in much), default=math.nan),
    }  # fmt: skip


def table(rows: Sequence[Row]) -> Table:
    """All cells."""
    found = Table(
        "clip", "b t s", "ranks over", "ms planned", "90 %", "ms Ulysses", "90 %", "CPU", "in exchanges", "share",
        "KiB", "messages", "ratio", "plan", title=f"Latte, {PAIRS} pairs {WIDTH} wide, planned beside Ulysses",
    )  # fmt: skip
    for row in rows:
        ways = row["planned"], row["ulysses"]
        both = (
            [f"{w['seconds'] * 1e3:.0f}" for w in ways],
            [f"{w['low'] * 1e3:.0f}-{w['high'] * 1e3:.0f}" for w in ways],
        )
        pairs = [
            " / ".join(f"{w[key] * scale:,.0f}" for w in ways)
            for key, scale in (("cpu", 1e3), ("exchanging", 1e3), ("bytes", 1 / 1024), ("messages", 1))
        ]
        shrunk = f" /{row['shrunk']}" if row["shrunk"] > 1 else ""
        found.add_row(
            row["clip"] + shrunk, f"{row['batch']} {row['frames']} {row['space']}", f"{row['ranks']} {row['over']}",
            both[0][0], both[1][0], both[0][1], both[1][1], pairs[0], pairs[1], f"{row['share']:.0%}", pairs[2],
            pairs[3], f"{row['ratio']:.2f}", "Ulysses" if row["same"] else short(row["planned"]["layouts"]),
            style="bold" if row["share"] >= THIRD else None,
        )  # fmt: skip
    return found


def short(layouts: str) -> str:
    """Dimensions, with the ways of sharing a stage that are not local."""
    return " ".join(each.removesuffix(":local") for each in layouts.split())


def told(found: Row, console: Console) -> None:
    """The verdict in words."""
    slower, below = found["slower"], found["below"]
    console.print(
        f"{found['cells']} cells, in {found['same']} of them the plan is Ulysses itself. Slower than Ulysses beyond "
        f"the intervals: {len(slower)}" + (f": {'; '.join(slower)}" if slower else "")
    )
    console.print(
        f"Exchanges take a third of the Ulysses step or more, and the plan is another: {found['much']} cells, least "
        f"ratio {found['least']:.2f}; below {FASTER}: {len(below)}" + (f": {'; '.join(below)}" if below else "")
    )
    if same := found["same_and_much"]:
        console.print(f"A third or more, and no plan is faster than Ulysses: {'; '.join(same)}")
    console.print("HOLDS" if found["holds"] else "DOES NOT HOLD")
