"""What is counted for all ranks at once is what the ranks' own steps say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpar import Layout, Mask, Plan
from seqpar.plan.counts import tally
from seqpar.plan.steps import StepBand, count

MASKS = {
    "causal": lambda lengths: Mask(lengths),
    "full": lambda lengths: Mask(lengths, causal=False),
    "window": lambda lengths: Mask(lengths, window=(5, None)),
    "band": lambda lengths: Mask(lengths, causal=False, window=(3, 6)),
    "lambda": lambda lengths: Mask(lengths, window=(3, None), sink_tokens=2),
    "answers": lambda lengths: Mask.shared_prefix([(n - n // 3 - n // 4, [n // 3, n // 4]) for n in lengths]),
    "union": lambda lengths: (
        Mask(lengths, window=(2, None), sink_tokens=1) | Mask(lengths, causal=False, window=(0, 4))
    ),
}


@st.composite
def cases(draw: st.DrawFn) -> tuple[Mask, Layout, int, int]:
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    mask = MASKS[draw(st.sampled_from(sorted(MASKS)))](lengths)
    ranks, tokens = draw(st.sampled_from([1, 2, 4, 6, 8, 12])), sum(lengths)
    kind = draw(st.sampled_from(["zigzag", "contiguous", "striped", "arbitrary"]))
    if kind == "arbitrary":
        rng = np.random.default_rng(draw(st.integers(0, 1000)))
        at = np.sort(rng.integers(0, tokens + 1, ranks - 1))
        layout = Layout([np.sort(part) for part in np.split(rng.permutation(tokens), at)])
    else:
        layout = {
            "zigzag": lambda: Layout.zigzag(lengths, ranks),
            "contiguous": lambda: Layout.contiguous(tokens, ranks),
            "striped": lambda: Layout.striped(tokens, ranks),
        }[kind]()
    width = draw(st.sampled_from([w for w in (1, 2, 4) if ranks % w == 0]))
    node = draw(st.sampled_from([n for n in range(1, ranks // width + 1) if ranks // width % n == 0]))
    return mask, layout, width, node


def band_rows(band: StepBand) -> np.ndarray:
    """Whether each query row sees a key of this step in this band."""
    seen = (band.lo[:, None] <= band.pos) & (band.pos < band.hi[:, None])
    return (seen if band.until is None else seen & (band.at[:, None] < band.until)).any(1)


@given(cases())
def test_counts_are_those_of_the_steps(case: tuple[Mask, Layout, int, int]) -> None:
    mask, layout, width, node = case
    plan = Plan(mask, layout, ulysses=width)
    expected = {name: np.zeros(layout.ranks // width, np.int64) for name in (
        "again", "merging", "near", "far", "keys", "entering", "sent", "leaving"
    )}  # fmt: skip
    for rank in range(0, layout.ranks, width):
        group = rank // width
        # by band: whether each row sees keys of its own group, and of others
        own, others = np.zeros((2, len(mask.bands), len(plan.steps(rank)[0].part.pos)), bool)
        for step in plan.steps(rank):
            expected["near" if step.local else "far"][group] += step.area
            for seen, band in zip(own if step.local else others, step.bands, strict=True):
                seen |= band_rows(band)
            for peers, whole, crossing in ((step.recvs, "keys", "entering"), (step.sends, "sent", "leaving")):
                for peer, rows in peers.items():
                    expected[whole][group] += count(rows)
                    expected[crossing][group] += count(rows) * (peer // width // node != group // node)
        expected["again"][group] = np.maximum(own.sum(0) - 1, 0).sum()
        expected["merging"][group] = others.sum()
    found = tally(mask, layout, width=width, node=node)
    for name in ("again", "merging"):  # all rows of a stretch count that has one such row
        assert (getattr(found, name) >= expected.pop(name)).all(), name
    assert (found.again <= (len(mask.bands) - 1) * found.rows).all()
    assert (found.merging <= len(mask.bands) * found.rows).all()
    for name, values in expected.items():
        np.testing.assert_array_equal(getattr(found, name), values, err_msg=name)
    np.testing.assert_array_equal(layout.sizes(), [layout.tokens(r) for r in range(layout.ranks)])
    np.testing.assert_array_equal(found.rows, layout.sizes().reshape(-1, width).sum(1))
    np.testing.assert_array_equal(found.most, layout.sizes().reshape(-1, width).max(1))


@given(cases())
@pytest.mark.exhaustive
def test_forwarded_keys_enter_a_node_once(case: tuple[Mask, Layout, int, int]) -> None:
    mask, layout, width, node = case
    plan = Plan(mask, layout, ulysses=width)
    once, nodes = tally(mask, layout, width=width, node=node, forwarded=True), layout.ranks // width // node
    border = np.zeros(nodes, np.int64)
    for at in range(nodes):
        groups = range(at * node, (at + 1) * node)
        wanted = [np.zeros(0, np.int64)] + [s.pos for g in groups for s in plan.steps(g * width) if not s.local]
        held = [plan.steps(g * width)[0].part.keys for g in groups]
        border[at] = np.setdiff1d(np.concatenate(wanted), np.concatenate(held)).size
    assert once.leaving.sum() == border.sum()
    # shares of a node's groups are rounded up
    excess = once.entering.reshape(nodes, node).sum(1) - border
    assert (excess >= 0).all() and (excess < node).all()


@pytest.mark.parametrize("seed", range(3))
def test_documents_count_apart(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 60, 7)
    mask, layout = Mask(lengths), Layout.zigzag(lengths, 4)
    chosen = np.arange(7) % 2 == 0
    parts = [tally(mask, layout, node=2, documents=which) for which in (chosen, ~chosen)]
    for name, values in tally(mask, layout, node=2)._asdict().items():
        np.testing.assert_array_equal(sum(getattr(part, name) for part in parts), values, err_msg=name)


@given(cases())
def test_equal_layouts_count_alike_however_their_runs_are_stored(case: tuple[Mask, Layout, int, int]) -> None:
    mask, layout, width, node = case
    held = [layout.positions(rank) for rank in range(layout.ranks)]
    tokens = np.concatenate(held)
    rank = np.repeat(np.arange(layout.ranks), [len(x) for x in held])
    single = Layout.from_pieces(tokens, np.ones_like(tokens), rank, layout.ranks)
    one, other = (tally(mask, x, width=width, node=node) for x in (layout, single))
    for name, a, b in zip(one._fields, one, other, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)
