"""Triton's kernels where keys end before the last query, as in trees: walks along stretches, and what launches read.

The suite of all kernels has such masks too; here are the variants and shapes that only these kernels have.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.kernels import Grads, Operands, Score, StepFacts, Sums
from seqpar.kernels.reference import Reference
from seqpar.ops.attention.call import uploaded
from seqpar.plan import Plan
from seqpar.testing import run_processes
from tests.cases import ENDING, LAYOUTS, examples, make_layout, make_mask
from tests.kernels import cases as suite
from tests.kernels.cases import Case
from tests.ops.cases import EACH, Options, check

pytest.importorskip("triton", reason="triton has wheels for Linux only")
from seqpar.kernels import triton as package  # noqa: E402
from seqpar.kernels.triton import Triton  # noqa: E402
from seqpar.kernels.triton.config import LaunchConfig  # noqa: E402
from seqpar.kernels.triton.tables import query_table  # noqa: E402

SMALL = Triton(configure=lambda d: LaunchConfig(16, 16, 4, 1))
BASE = Case(queries=50, keys=50, heads=2, kv_heads=1, dtype=torch.float32)
KINDS = ("tree", "ends", *suite.BANDS)
CALLS = [
    replace(BASE, mask=mask, splits=splits, **options)
    for options in (
        {"dtype": torch.float16, "heads": 4, "dim": 64, "v_dim": 64},
        {"dim": 192, "v_dim": 128, "heads": 1},
        {"dim": 128, "v_dim": 128},
        {"dim": 40, "v_dim": 72, "kv_heads": 2},
        *suite.OPTIONS,
    )
    for mask in KINDS
    for splits in (1, 3)
]


@pytest.mark.parametrize("case", [pytest.param(case, id=suite.named(case)) for case in CALLS])
@pytest.mark.sampled(72)
def test_every_option_and_head_dim(case: Case) -> None:
    suite.equals_oracle(SMALL, case)


@pytest.mark.parametrize("mask", KINDS)
@pytest.mark.sampled(12)
def test_bf16_with_operands_cast_for_the_interpreter(mask, monkeypatch) -> None:
    monkeypatch.setitem(suite.LIMIT, torch.bfloat16, 6e-3)  # the interpreter truncates
    suite.equals_oracle(SMALL, replace(BASE, mask=mask, dtype=torch.bfloat16, splits=2, **suite.OPTIONS[-1]))


@pytest.mark.parametrize("mask", KINDS)
@pytest.mark.sampled(6)
def test_split_gradients_of_keys_are_joined(mask, monkeypatch) -> None:
    monkeypatch.setattr(package, "_processors", lambda device: 1000)
    suite.equals_oracle(SMALL, replace(BASE, mask=mask, heads=4, kv_heads=2))


@pytest.mark.parametrize("mask", KINDS)
@pytest.mark.sampled(6)
def test_descriptors_load_what_pointers_do(mask, monkeypatch) -> None:
    case, results = replace(BASE, mask=mask, dim=48, v_dim=32, splits=2), []
    monkeypatch.setattr(suite, "viewed", lambda x, fill=torch.nan: x.clone())  # aligned, as descriptors need
    for tma in (False, True):
        kernel = Triton(configure=lambda d, tma=tma: LaunchConfig(32, 16, 4, 1, tma))
        out, lse = suite.run_forward(kernel, case)
        results.append([out, lse, *suite.run_backward(kernel, case, out, lse)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@st.composite
def steps(draw: st.DrawFn) -> StepFacts:
    """A step of a rank under a mask whose keys end, with query tiles of any number of rows."""
    tokens, ranks = draw(st.integers(1, 60)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    mask = make_mask(draw(st.sampled_from(ENDING)), [tokens], rng)
    kind = draw(st.sampled_from(LAYOUTS))
    layout, keys = (make_layout(kind, [total], ranks, rng) for total in (tokens, mask.kv_tokens))
    own = None if mask.kv_tokens == tokens else keys
    plan = Plan(mask, layout, kv_layout=own, transport=draw(st.sampled_from(["fetch", "ring"])))
    rank = draw(st.sampled_from([rank for rank in range(ranks) if any(len(step.pos) for step in plan.steps(rank))]))
    facts = uploaded(plan, plan.steps(rank), torch.device("cpu")).facts
    return draw(st.sampled_from([facts[step.number][0] for step in plan.steps(rank) if len(step.pos)]))


@examples(10)
@given(steps(), st.sampled_from([(16, 16), (16, 32), (32, 16)]), st.booleans())
def test_any_step_equals_the_reference(facts, tile, first) -> None:
    rows, keys = len(facts.pos), len(facts.key_pos)
    g = torch.Generator().manual_seed(rows)
    q, k, v, dout = (torch.randn(n, h, 16, generator=g) for n, h in ((rows, 2), (keys, 1), (keys, 1), (rows, 2)))
    before = torch.randn(rows, 2, 16, generator=g), torch.randn(2, rows, generator=g)
    x, results = Operands(q, k, v, facts, Score(0.25)), []
    for kernel in (Reference(), Triton(configure=lambda d: LaunchConfig(*tile, 4, 1))):
        out, lse = (y.clone() for y in before)
        kernel.forward(x, Sums(out, lse, None, first=first))
        grads = [torch.zeros_like(y) for y in (q, k, v)]
        kernel.backward(x, Grads(dout, lse, (dout * out).sum(-1).t().contiguous(), None, *grads))
        results.append([out, lse, *grads])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


@given(steps(), st.sampled_from([(16, 16), (16, 32), (32, 16)]))
def test_walks_visit_the_tiles_of_the_stretches_and_full_ones_without_a_mask(facts, tile) -> None:
    table, tiles = query_table(facts, LaunchConfig(*tile, 4, 1))
    words, t = table.reshape(-1).tolist(), facts.tiles(*tile)
    assert tiles == len(t.begin)
    short = len(facts.key_pos) // tile[1]  # the number of a last key tile that lacks rows
    for place, i in enumerate(t.order):
        row, stop, begin, full_begin, full_end, end, at, _ = words[8 * place : 8 * place + 8]
        assert (row, stop) == (t.rows[i], t.rows[i + 1])
        if t.stretches is None:
            spans = [(t.begin[i], t.end[i], False), (t.full_begin[i], t.full_end[i], True)]
            visited, unmasked = range(begin, end), range(full_begin, full_end)
            assert visited == range(t.begin[i], t.end[i])
        else:
            visited = []
            for visit in range(end):
                visited.append(visit + words[at + 1])
                at += 2 * (visit + 1 == words[at])
            unmasked = visited[:full_end]
            mine = slice(t.stretches.edge[i], t.stretches.edge[i + 1])
            spans = list(zip(t.stretches.begin[mine], t.stretches.end[mine], t.stretches.full[mine], strict=True))
            assert sorted(visited) == [n for a, b, _ in spans for n in range(a, b)]
        assert list(unmasked) == [n for a, b, full in spans if full for n in range(a, b) if n != short]


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
@pytest.mark.exhaustive
def test_trees_over_ranks_equal_one_device(layout) -> None:
    mask = Mask.tree([20, 9, 11, 1, 16, 5], [-1, 0, 1, 1, 0, -1])
    placed = Layout.zigzag(mask.lengths.tolist(), 2) if layout == "zigzag" else Layout.striped(62, 2, block=7)
    options = Options(kernel="triton", sinks=True)
    check(Plan(mask, placed), (4, 2), (16, 16), options, uses=EACH, dtype=torch.float32, run=run_processes)
