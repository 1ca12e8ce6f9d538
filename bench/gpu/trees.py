"""Slice `trees`: answers that share a prompt, and a window with sinks, as one launch sees them.

Operations are counted from attended pairs, as everywhere; ``cover`` is their part of the pairs of visited tiles. Rows
"prompt for each answer" are the same answers without a tree, as packed documents that each hold the prompt: ``ratio``
is what sharing it saves.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from bench.gpu.calls import BACKWARD, FORWARD, Label, OfKernel, Problem, Setup, kernels, plainly, refused
from bench.gpu.machine import Machine
from bench.gpu.rows import Case, Row
from bench.gpu.speed import TINY, race, rate, tile

PROMPT, ANSWERS = 2048, tuple(range(1024, 8193, 1024))
TOKENS, WINDOW, SINKS = 131072, 4096, 4


def trees(tiny: bool) -> list[Case]:
    """The cases of both masks, forward and backward."""
    return [
        Case("trees", f"{setup}, {BACKWARD if back else FORWARD}", partial(_raced, setup, back))
        for setup in setups(tiny)
        for back in (False, True)
    ]


def setups(tiny: bool) -> list[Setup]:
    """The calls of both masks."""
    made = {"heads": 32, "kv_heads": 8, "dim": 128, "v_dim": 128}
    prompt, answers, tokens, window = PROMPT, ANSWERS, TOKENS, WINDOW
    if tiny:
        made = {"heads": 2, "kv_heads": 1, "dim": 16, "v_dim": 16, "dtype": torch.float16}
        prompt, answers, tokens, window = 16, (9, 24), TINY, 20
    tree = Setup("prompt and answers", (prompt, *answers), **made, tree=True)
    sinks = Setup("window and sinks", (tokens,), **made, window=window, sinks=SINKS)
    return [tree, sinks]


def _raced(setup: Setup, back: bool, machine: Machine) -> Iterator[Row]:
    cover = Problem(setup, machine.device).cover(*tile("triton", setup, machine, back))
    for row in race(setup, back, machine):
        yield row | ({"cover": cover} if row["kernel"] == "triton" and "ms" in row else {})
    if setup.tree:
        yield from _shared(setup, back, machine)


def _shared(setup: Setup, back: bool, machine: Machine) -> Iterator[Row]:
    """Triton's kernel on the tree, and on a document for each answer with the prompt before it."""
    prompt, *answers = setup.lengths
    fields = (setup.heads, setup.kv_heads, setup.dim, setup.v_dim, setup.dtype)
    each = Setup("packed", tuple(prompt + answer for answer in answers), *fields)
    label, triton = Label("triton", "prompt for each answer"), kernels()["triton"]
    for one in (setup, each):
        row = refused(machine, Label("triton", label.mode), one, plainly(triton), backward=back)
        if row:
            yield row
            return
    problems = {"tree": Problem(setup, machine.device), "packed": Problem(each, machine.device)}
    contestants = {name: OfKernel(triton, problem) for name, problem in problems.items()}
    times, missing = machine.times({n: one.backward if back else one.forward for n, one in contestants.items()})
    yield from ({**label._asdict(), **why} for why in missing.values())
    if not missing:
        row = rate(times["packed"], flops=problems["packed"].flops(backward=back))
        yield {**label._asdict(), **row, "baseline": "packed", "ratio": times["packed"].ms / times["tree"].ms}
