"""The planned Latte step beside Ulysses over a grid of published clips, and whether the promise holds.

Two processes run over shared memory, over gloo on loopback, and over shared memory with every exchange delayed to a
slow link: as slow beside a core of this machine as InfiniBand is beside an H100 for the published width. 4 and 8 ranks
run one after another, and their exchanges are composed for the measured link and for the slow one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from rich.console import Console
from rich.table import Table

from bench.dsp.latte import METHODS, PAIRS, WIDTH, Clip, Row, measured, virtual
from bench.dsp.machine import machines
from bench.lib.interval import interval
from seqpar.testing import run_processes

# Latents of the VAE: an eighth of height and width. OpenSora 1.2 makes 5 of 17 frames, Latte one of each.
# Short clips are one such chunk, with too few frames for many ranks; OpenSora 1.2 was trained on longer ones.
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
TOKENS = 6000  # of a clip at most; published ones have up to 216,000
THIRD, FASTER = 1 / 3, 1.3
UNEVEN = 1.25  # frames are too few if some rank gets more than this multiple of its share
NOISE = 0.01  # a smaller difference is noise: halves of one method's turns differ by 2 % in the median


def grid(quick: bool, repeat: int, show: Callable[[Row], None]) -> tuple[list[Row], Row]:
    """A row for every clip, ranks and link; and the machine by link."""
    over_links = machines(2 if quick else 7)
    # on one clock, transfers overlap with computation
    apart = {
        over: machine._replace(hardware=replace(machine.hardware, hidden=1.0))
        for over, machine in over_links.items() if over != "gloo"
    }  # fmt: skip
    rows = []
    for clip in QUICK if quick else CLIPS:
        clip = clip.fitted(128 if quick else TOKENS)
        turns = repeat if clip.tokens > TOKENS // 2 else repeat * 3 // 2  # short steps are noisier
        for over, machine in over_links.items():
            held = machine.link if over == "slow" else None
            comm = "gloo" if over == "gloo" else "shm"
            found = run_processes(2, measured, clip, machine.hardware, turns, held, comm=comm, timeout=120.0)
            rows.append(row_of(clip, 2, over, found, turns))
            show(rows[-1])
        worlds = [
            (n, {over: each._replace(hardware=replace(each.hardware, node=n)) for over, each in apart.items()})
            for n in ((4,) if quick else (4, 8))
        ]
        for share in run_processes(2, virtual, clip, worlds, turns, timeout=120.0):
            for n, by_machine in share.items():
                for over, by_rank in by_machine.items():
                    rows.append(row_of(clip, n, f"{over}, composed", by_rank, turns))
                    show(rows[-1])
    return rows, {name: each.hardware.to_dict() for name, each in over_links.items()}


def row_of(clip: Clip, ranks: int, over: str, found: Sequence[dict[str, Row]], turns: int) -> Row:
    """One cell: both methods, their ratio by turn or group, and the part of the Ulysses step that exchanges take."""
    ways = {name: way([rank[name] for rank in found]) for name in METHODS}
    planned, ulysses = ways["planned"], ways["ulysses"]
    share = ulysses["exchanging"] / ulysses["seconds"]
    ratios = [b / a for a, b in zip(planned.pop("steps"), ulysses.pop("steps"), strict=True)]
    ratio, low, high = middle(ratios, grouped=found[0]["planned"].get("grouped", False))
    return {
        "clip": clip.name, "batch": clip.batch, "frames": clip.frames, "space": clip.space, "text": clip.text,
        "shrunk": clip.shrunk, "ranks": ranks, "over": over, "same": planned["layouts"] == ulysses["layouts"],
        "share": share, "turns": turns, "ratio": ratio, "ratio_low": low, "ratio_high": high,
        # the ratio if only bytes counted
        "by_bytes": 1 / (1 - share * (1 - planned["bytes"] / ulysses["bytes"])),
    } | ways  # fmt: skip


def way(ranks: Sequence[Row]) -> Row:
    """A method's figures over all ranks: the slowest step, and the exchanges of the rank that waits least in them."""
    steps = [max(turn) for turn in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    exchanging = [min(turn) for turn in zip(*(rank["exchanging"] for rank in ranks), strict=True)]
    grouped = ranks[0].get("grouped", False)
    seconds, low, high = middle(steps, grouped)
    most = {key: max(rank[key] for rank in ranks) for key in ("bytes", "messages", "exchanges")}
    return most | {key: ranks[0][key] for key in ("loss", "layouts", "predicted")} | {
        "steps": steps, "seconds": seconds, "low": low, "high": high, "exchanging": middle(exchanging, grouped)[0],
        "cpu": max(middle(rank["cpu"], grouped)[0] for rank in ranks),
    }  # fmt: skip


def middle(figures: Sequence[float], grouped: bool) -> tuple[float, float, float]:
    """The median of turns with its interval of 90 %; for groups of turns the first, over all, and the range."""
    if grouped:
        return figures[0], min(figures), max(figures)
    return median(figures), *interval(figures)


def name(row: Row) -> str:
    """The name of a cell to print."""
    figures = f"{row['ratio']:.2f} at a share of {row['share']:.0%}, by bytes {row['by_bytes']:.2f}"
    return f"{row['clip']} on {row['ranks']} over {row['over']} ({figures})"


def equal(row: Row) -> bool:
    """Whether the ratio is at least 1, up to noise and its interval."""
    return bool(row["same"] or row["ratio_high"] >= 1 - NOISE)


def sharing(row: Row) -> bool:
    """Whether frames are too few for the ranks, and the plan shares heads in some stage, as Ulysses does."""
    frames, ranks = row["batch"] * row["frames"], row["ranks"]
    few = -(-frames // ranks) * ranks / frames > UNEVEN
    return few and any(mode in row["planned"]["layouts"] for mode in (":ulysses", ":ring"))


def verdict(rows: Sequence[Row]) -> Row:
    """The cells that are slower where the plan is not Ulysses, and those below the promise where it only switches."""
    third = [row for row in rows if row["share"] >= THIRD]
    much = [row for row in third if not sharing(row)]
    slower = [name(row) for row in rows if not equal(row)]
    below = [name(row) for row in much if row["ratio"] < FASTER]
    return {
        "holds": not slower and not below, "cells": len(rows), "same": sum(row["same"] for row in rows),
        "much": len(much), "slower": slower, "below": below, "sharing": [name(row) for row in third if sharing(row)],
        "least": min((row["ratio"] for row in much), default=math.nan),
    }  # fmt: skip


def table(rows: Sequence[Row]) -> Table:
    """A table of all cells. Ranges hold the median with 90 %; for composed ranks they come from halves of the turns."""
    found = Table(
        "clip", "b t s", "ranks over", "ms planned", "range", "ms Ulysses", "range", "CPU", "in exchanges", "share",
        "KiB", "messages", "ratio", "range", "plan", title=f"Latte, {PAIRS} pairs {WIDTH} wide, planned beside Ulysses",
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
            pairs[3], f"{row['ratio']:.2f}", f"{row['ratio_low']:.2f}-{row['ratio_high']:.2f}",
            "Ulysses" if row["same"] else short(row["planned"]["layouts"]),
            style="bold" if row["share"] >= THIRD else None,
        )  # fmt: skip
    return found


def short(layouts: str) -> str:
    """A plan in short: sharded dimensions, and modes that are not local."""
    return layouts.replace(":local", "")


def told(found: Row, console: Console) -> None:
    """The verdict as text."""
    slower, below = found["slower"], found["below"]
    console.print(
        f"{found['cells']} cells, in {found['same']} of them the plan is Ulysses itself. Slower than Ulysses beyond "
        f"the range and {NOISE:.0%}: {len(slower)}" + (f": {'; '.join(slower)}" if slower else "")
    )
    console.print(
        f"Exchanges take a third of the Ulysses step or more, and the plan only switches: {found['much']} cells, "
        f"least ratio {found['least']:.2f}; below {FASTER}: {len(below)}" + (f": {'; '.join(below)}" if below else "")
    )
    if cells := found["sharing"]:
        console.print(f"A third or more, and the plan shares attention too: {'; '.join(cells)}")
    console.print("HOLDS" if found["holds"] else "DOES NOT HOLD")
