"""Random batches, machines, models and mistakes: each ends as a plan that can be believed, or is refused by name.

``judged(17, most=1 << 22)`` is case 17 of the large ones.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest

from seqpar import Hardware, Mask, ModelShape, plan_batch, plan_step
from seqpar.planner.hardware import PRESETS as MACHINES
from seqpar.planner.presets import PRESETS as MODELS
from tests.fuzz.planned import assert_planned, refused

CASES, ALL, BLOCK = 40, 400, 50
CHEAP, LARGE = 1 << 12, 1 << 22  # ranks times documents, at most

MISTAKES: dict[str, tuple[Any, ...]] = {
    "lengths": ([], [0], [5, 0], [5, -1], [1.5], ["5"], "55", None, [[5]], [[5], [5, 6]], [2**31], [2**62], [2**63],
                [2**70], [True], 7, np.array([2**63], np.uint64), {}, [None]),
    "ranks": (0, -1, 2.0, "8", None, True, 2**21, 2**70),
    "model": ({}, None, 3, "gpt-5", b"tiny", Hardware),
    "hardware": ({}, None, 3, "tpu", ModelShape),
    "node": (0, -8, 2.5, "8", True),
    "token_slack": (-0.1, float("nan"), float("inf"), "1", None),
    "max_tokens_per_rank": (0, -5, 1.5, "7", True),
    "lockstep": (0, 1, "yes", None),
    "masks": (3, {}, "causal", [3], [], Mask([5])),
}  # fmt: skip


class Case(NamedTuple):
    """Arguments of a planner. rows: the most of a rank, if given. wrong: whether some argument is a mistake."""

    planner: Any
    lengths: Any
    ranks: Any
    options: dict[str, Any]
    rows: int | None
    wrong: bool


def lengths_drawn(draw: Random, documents: int) -> list[int]:
    """Documents of one of several distributions, together at most 10^8 tokens, now and then more than 2^31."""
    most = 10 ** draw.uniform(0, 8)
    kind = draw.choice(["equal", "even", "log", "log", "tail"])
    if kind == "equal":
        lengths = [max(1, int(most / documents))] * documents
    elif kind == "even":
        lengths = [draw.randint(1, max(1, int(2 * most / documents))) for _ in range(documents)]
    else:
        spread = draw.uniform(0.2, 2.5)
        lengths = [max(1, int(draw.lognormvariate(0, spread) * most / documents)) for _ in range(documents)]
    if kind == "tail":
        lengths += [max(1, int(most))]
    if draw.random() < 0.01:
        lengths += [draw.choice([2**31 - 1, 2**31, 10**10, 2**40])]
    while len(lengths) > 1 and sum(lengths) > 10**8:
        lengths.pop(draw.randrange(len(lengths)))
    draw.shuffle(lengths)
    return lengths


def masks_drawn(draw: Random, lengths: list[int], layers: int) -> Any:
    """A mask of these documents, one for each layer, or None for that of the model."""
    kind = draw.choice(["model"] * 4 + ["full", "window", "layers", "bounds"])
    if kind == "model":
        return None
    window = (draw.choice([0, 1, 50, 4096, 10**9]), draw.choice([None, 0, 7, 10**9]))
    if kind == "full":
        return Mask(lengths, causal=False)
    if kind == "bounds" and sum(lengths) <= 20_000:
        tokens = sum(lengths)
        lo = np.sort(np.array([draw.randrange(tokens) for _ in range(tokens)]))
        hi = np.minimum(lo + draw.randrange(1, tokens + 1), tokens)
        return Mask.from_bounds(lo, hi, lengths=lengths)
    windowed = Mask(lengths, causal=False, window=window)
    return windowed if kind != "layers" else [draw.choice([windowed, Mask(lengths)]) for _ in range(layers)]


def drawn(number: int, *, most: int) -> Case:
    """The case of a number."""
    draw = Random(number)
    ranks = draw.choice([1, 2, 3, 7, 8, 8, 16, 24, 64, 100, 512, 1000, 4096])
    documents = max(1, min(int(2 ** draw.uniform(0, 13)), most // ranks))
    lengths = lengths_drawn(draw, documents)
    tokens = sum(lengths)
    shape = ModelShape.preset(draw.choice(sorted(MODELS)))
    windows = draw.choice([shape.windows, (None,), (draw.randint(0, 9000), None), (draw.randint(0, 9000),)])
    shape = replace(shape, windows=windows, recompute=draw.choice(["none", "attention", "full"]))
    machine = Hardware.preset(draw.choice(sorted(MACHINES)))
    slower = 10 ** draw.uniform(-4, 2)
    machine = replace(
        machine,
        memory=min(2**61, max(1, int(machine.memory * 10 ** draw.uniform(-1, 9)))),
        node=draw.choice([1, 2, 4, 8, 9, 16, 72]),
        across=replace(machine.across, bandwidth=machine.across.bandwidth * slower),
    )
    options: dict[str, Any] = {"model": shape, "hardware": machine}
    if draw.random() < 0.2:
        options |= {"model": shape.name, "hardware": machine.name}
    options["masks"] = masks_drawn(draw, lengths, shape.layers)
    options["token_slack"] = draw.choice([0, 0.0, 0.01, 0.5, 3, 100.0, 1e300])
    options["lockstep"] = draw.choice([True, False])
    options["node"] = draw.choice([None, None, 1, 2, 8, 5, 10**6])
    rows = draw.choice([None, None, tokens, -(-tokens // ranks), -(-2 * tokens // ranks), 100])
    options["max_tokens_per_rank"] = rows
    planner: Any = plan_batch
    if draw.random() < 0.2:
        planner = plan_step
        options["micro_batches"] = draw.choice([None, None, 1, 2, 5])
    wrong = draw.choice(list(MISTAKES)) if draw.random() < 0.15 else None
    arguments: dict[str, Any] = {"lengths": lengths, "ranks": ranks, **options}
    if wrong is not None:
        arguments[wrong] = draw.choice(MISTAKES[wrong])
    return Case(planner, arguments.pop("lengths"), arguments.pop("ranks"), arguments, rows, wrong is not None)


def judged(number: int, *, most: int) -> str:
    """How the case of a number ends: "planned", or "refused" and why. Raises AssertionError for any other end."""
    case = drawn(number, most=most)
    try:
        try:
            found = case.planner(case.lengths, case.ranks, **case.options)
        except (ValueError, NotImplementedError, TypeError) as error:
            return refused(error)
        lengths = np.array(case.lengths)
        parts = [(np.arange(lengths.size), found)] if case.planner is plan_batch else found
        taken = np.sort(np.concatenate([documents for documents, _ in parts]))
        assert (taken == np.arange(lengths.size)).all(), "each document once"
        for documents, plan in parts:
            assert_planned(plan, lengths[documents], case.ranks, rows=case.rows)
        assert not case.wrong or "masks" in case.options, "a mistake was accepted"
    except Exception as error:
        what = f"{case.planner.__name__}({str(case.lengths)[:300]}, {case.ranks}, {case.options})"
        raise AssertionError(f"judged({number}, most={most}): {type(error).__name__}: {error}\n{what}") from error
    return "planned"


def test_random_batches_are_planned_or_refused() -> None:
    ends = [judged(number, most=CHEAP) for number in range(CASES)]
    planned = ends.count("planned")
    assert 10 <= planned < CASES, ends


@pytest.mark.exhaustive
@pytest.mark.parametrize("block", range(0, ALL, BLOCK))
def test_all_random_batches_are_planned_or_refused(block: int) -> None:
    assert all(judged(number, most=LARGE) for number in range(block, block + BLOCK))
