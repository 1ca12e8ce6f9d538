"""`Plan`: rows, positions, widths, digests, what it says of itself and refuses; and how heads are shared."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpar import Layout, Mask, Plan, plan_batch
from seqpar.plan import TRANSPORTS, head_blocks, head_share, replicated
from tests.cases import cases, examples
from tests.plan.compared import CASE, compare, plain

# Of CASE.plan(); changes only when the digest's recipe does.
DIGEST = "1dfb0f893aaae4e34923478364937b06"


@given(cases())
def test_rows_are_tokens_in_local_order_then_pads(case) -> None:
    plan = case.plan()
    for side, layout, lengths in (("q", plan.layout, plan.mask.lengths), ("kv", plan.kv_layout, plan.mask.kv_lengths)):
        inside = np.concatenate([np.arange(n) for n in lengths])
        for rank in range(plan.ranks):
            at = plan.positions(rank, side)
            tokens = layout.tokens(rank)
            assert at.shape == (plan.rows(rank, side),)
            np.testing.assert_array_equal(at[:tokens], layout.positions(rank))
            assert (at[tokens:] == -1).all()
            if side == "q":
                rope = plan.rope_positions(rank)
                np.testing.assert_array_equal(rope[:tokens], inside[at[:tokens]])
                assert rope.shape == at.shape and not rope[tokens:].any()


@given(cases())
def test_degrees_count_the_ranks_of_each_document(case) -> None:
    plan = case.plan()
    edges = plan.mask.offsets
    held = [plan.layout.owner()[a:b] for a, b in itertools.pairwise(edges)]
    assert plan.degrees.tolist() == [len(np.unique(h)) for h in held]


@given(cases())
def test_documents_alone_have_all_queries_and_keys_on_one_rank(case) -> None:
    plan = case.plan()
    sides = ((plan.layout, plan.mask.offsets), (plan.kv_layout, plan.mask.kv_offsets))
    held = [[layout.owner()[a:b] for a, b in itertools.pairwise(edges)] for layout, edges in sides]
    expected = [len(np.unique(np.concatenate(pair))) == 1 for pair in zip(*held, strict=True)]
    assert plan.residence.alone.tolist() == expected


def test_widths_follow_documents_and_spare_whole_ones() -> None:
    lengths = [6, 6, 3, 9]
    plan = Plan(Mask(lengths), Layout.contiguous(24, 4), ulysses=[2, 4, 2, 4])
    assert plan.degrees.tolist() == [1, 1, 1, 2]
    assert plan.widths.tolist() == [1, 1, 1, 4]
    assert Plan(plan.mask, plan.layout, ulysses=2).widths.tolist() == [2] * 4
    assert Plan(plan.mask, plan.layout, ulysses=[2] * 4).widths.tolist() == [1, 1, 1, 2]
    # A document whose keys are elsewhere is not whole: all its ranks must meet.
    apart = Layout([range(12, 18), range(18, 24), range(0, 6), range(6, 12)])
    assert Plan(plan.mask, plan.layout, kv_layout=apart, ulysses=[2, 4, 2, 4]).widths.tolist() == [2, 4, 2, 4]


def test_with_mask_keeps_everything_else_and_is_made_once() -> None:
    plan = Plan(Mask([8, 16]), Layout.zigzag([8, 16], 4), ulysses=[2, 1], transport="gather", stage_bytes=77, rows=9)
    local = Mask([8, 16], window=(3, None))
    other = plan.with_mask(local)
    assert other is plan.with_mask(Mask([8, 16], window=(3, None))) and plan.with_mask(plan.mask) is plan
    assert other.mask == local and other != plan
    again = Plan(local, plan.layout, ulysses=[2, 1], transport="gather", stage_bytes=77, rows=9)
    assert other == again and other.digest() == again.digest()
    assert other.layout is plan.layout and [other.rows(r) for r in range(4)] == [9] * 4
    apart = Plan(Mask([8]), Layout.contiguous(8, 2), kv_layout=Layout.striped(8, 2), transport="double_ring", node=2)
    assert apart.with_mask(Mask([8], causal=False)) == Plan(
        Mask([8], causal=False), apart.layout, kv_layout=apart.kv_layout, transport="double_ring", node=2
    )


def variants() -> dict[str, Plan]:
    """A plan, and others that differ from it in one argument."""
    mask, layout = Mask([8, 16]), Layout.zigzag([8, 16], 4)
    base = {"ulysses": 2, "transport": "ring", "stage_bytes": 4096, "rows": [6, 6, 6, 6]}
    return {
        "base": Plan(mask, layout, **base),
        "mask": Plan(Mask([8, 16], window=(3, None)), layout, **base),
        "lengths": Plan(Mask([16, 8]), layout, **base),
        "layout": Plan(mask, Layout.contiguous(24, 4), **base),
        "order": Plan(mask, Layout([layout.positions(r)[:: 1 if r else -1] for r in range(4)]), **base),
        "kv_layout": Plan(mask, layout, kv_layout=Layout.contiguous(24, 4), **base),
        "ulysses": Plan(mask, layout, **base | {"ulysses": 4}),
        "widths": Plan(mask, layout, **base | {"ulysses": [2, 4]}),
        "transport": Plan(mask, layout, **base | {"transport": "gather"}),
        "node": Plan(mask, layout, **base, node=2),
        "stage_bytes": Plan(mask, layout, **base | {"stage_bytes": 8192}),
        "rows": Plan(mask, layout, **base | {"rows": [6, 6, 6, 7]}),
    }


def test_digest_differs_in_every_argument_and_only_then() -> None:
    plans, again = variants(), variants()
    assert len({p.digest() for p in plans.values()}) == len(plans) == len(set(plans.values()))
    for name, plan in plans.items():
        for same in (again[name], pickle.loads(pickle.dumps(plan))):
            assert same == plan and hash(same) == hash(plan) and same.digest() == plan.digest()
    assert plans["base"] != "a plan"


@pytest.mark.exhaustive
def test_digest_is_the_same_in_every_process() -> None:
    code = "from tests.plan.compared import CASE; print(CASE.plan().digest())"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == CASE.plan().digest() == DIGEST


def test_equal_layouts_of_queries_and_keys_are_one_layout() -> None:
    """Equal plans must give every rank the same rows of keys, pads too."""
    mask = Mask([6])
    one = Plan(mask, Layout.contiguous(6, 2), rows=4)
    other = Plan(mask, Layout.contiguous(6, 2), kv_layout=Layout([range(3), range(3, 6)]), rows=4)
    assert one == other and [p.rows(0, "kv") for p in (one, other)] == [4, 4]
    copy = pickle.loads(pickle.dumps(one))
    assert copy.rows(0, "kv") == 4


def test_a_forecast_comes_with_a_copy() -> None:
    """A plan may be shared, so that one reader's forecast must not appear under another."""
    plan = CASE.plan()
    steps = plan.steps(0)
    forecast = plan_batch([40, 2], 2, model="tiny", hardware="cpu").forecast
    assert forecast is not None
    predicted = plan.with_forecast(forecast)
    assert plan.forecast is None and predicted.forecast is forecast
    assert predicted == plan and predicted.digest() == plan.digest() and predicted.residence is plan.residence
    assert plan.steps(0) is steps and list(map(plain, predicted.steps(0))) == list(map(plain, steps))


@examples(50)
@given(cases())
def test_equal_plans_give_equal_steps(case) -> None:
    """Also where the facts were made in another way: ranks derive what they exchange without a message."""
    plan = case.plan()
    mask, layout = plan.mask, Layout([plan.layout.positions(r) for r in range(plan.ranks)])
    keys = Layout([plan.kv_layout.positions(r) for r in range(plan.ranks)])
    alike = mask.lengths.tolist() == mask.kv_lengths.tolist()
    if alike:
        mask = Mask.from_bounds(*mask.bounds(np.arange(mask.tokens)), lengths=mask.lengths)
    ulysses = plan.ulysses if mask.within_documents else plan.widths[0]
    rows = [plan.rows(r) for r in range(plan.ranks)]
    other = Plan(
        mask, layout, kv_layout=keys, ulysses=ulysses, transport=plan.transport, node=plan.node,
        stage_bytes=plan.stage_bytes, rows=rows,
    )  # fmt: skip
    if alike:
        assert other == plan
    for rank in reversed(range(plan.ranks)):  # whichever rank asks first
        steps = other.steps(rank)
        assert steps is other.steps(rank), "made once"
        for a, b in zip(plan.steps(rank), steps, strict=True):
            compare(a, b)


@pytest.mark.parametrize("window", [1, 5, 40])
def test_a_window_moves_only_the_halo(window) -> None:
    """Zigzag in two chunks of 32 a rank: what arrives is what the windows before both chunks hold of other ranks."""
    n, ranks = 256, 4
    plan = Plan(Mask([n], window=(window, None)), Layout.zigzag([n], ranks))
    for rank in range(ranks):
        mine = plan.layout.positions(rank)
        halo = {int(k) for i in mine for k in range(max(0, i - window), i)} - set(mine.tolist())
        got = [k for s in plan.steps(rank) if not s.local for k in s.pos.tolist()]
        assert sorted(got) == sorted(halo)
        assert len(got) <= 2 * window
    # The rank in the middle of the fold holds one stretch of 64.
    assert sum(s.pos.size for s in plan.steps(ranks - 1) if not s.local) == min(window, 96)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_documents_on_one_rank_each_move_nothing(transport) -> None:
    plan = Plan(Mask([5, 7, 3]), Layout([range(5), range(5, 12), range(12, 15)]), transport=transport)
    assert plan.degrees.tolist() == [1, 1, 1]
    for rank in range(3):
        assert plan.bytes(rank, heads=4, kv_heads=4, dim=8, backward=True) == 0
        assert not any(s.sends or s.recvs or s.grad_sends or s.grad_recvs for s in plan.steps(rank))


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_a_ring_makes_one_hop_less_than_ranks(ranks) -> None:
    plan = Plan(Mask([64], causal=False), Layout.contiguous(64, ranks), transport="ring")
    for rank in range(ranks):
        steps = plan.steps(rank)
        assert [bool(s.sends and s.recvs) for s in steps] == [False] + [True] * (ranks - 1)
        assert all(set(s.sends) == {(rank + 1) % ranks} for s in steps[1:])


@given(st.integers(1, 2000), st.integers(1, 6))
def test_stages_are_bounded(stage_rows, ranks) -> None:
    plan = Plan(Mask([300], causal=False), Layout.striped(300, ranks), stage_bytes=stage_rows * 64)
    for rank in range(ranks):
        sizes = [s.pos.size for s in plan.steps(rank, row_bytes=64) if not s.local]
        assert max(sizes, default=0) <= stage_rows
        assert sum(sizes) == 300 - plan.layout.tokens(rank)


@examples(40)
@given(cases())
def test_describe_tells_rows_areas_and_degrees(case) -> None:
    plan = case.plan()
    text = plan.describe()
    lines = text.splitlines()
    assert repr(plan.mask) in text and repr(plan.layout) in text and plan.digest()[:12] in text
    assert f"transport {plan.transport}" in text and f"area {plan.mask.area():,} pairs" in text
    for degree, n in zip(*np.unique(plan.degrees, return_counts=True), strict=True):
        assert f"{n} on {degree}" in text
    for rank, line in enumerate(lines[-plan.ranks :]):
        assert line.split()[:3] == [str(rank), f"{plan.rows(rank):,}", f"{plan.layout.tokens(rank):,}"]


def test_plans_do_not_change() -> None:
    plan = CASE.plan()
    with pytest.raises(AttributeError, match="immutable"):
        plan.transport = "fetch"
    for array in (plan.widths, pickle.loads(pickle.dumps(plan)).mask.lengths):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7


MASK, LAYOUT = Mask([8, 16]), Layout.contiguous(24, 4)


@pytest.mark.parametrize(
    ("error", "facts", "options", "message"),
    [
        (ValueError, (MASK, Layout.contiguous(23, 4)), {}, "the layout holds 23 tokens, the mask 24"),
        (ValueError, (Mask([4], kv_lengths=[6]), Layout.contiguous(4, 4)), {}, "6 keys; give a kv_layout"),
        (ValueError, (MASK, LAYOUT), {"kv_layout": Layout.contiguous(25, 4)}, "kv_layout holds 25 tokens"),
        (ValueError, (MASK, LAYOUT), {"kv_layout": Layout.contiguous(24, 3)}, "kv_layout has 3 ranks, the layout 4"),
        (ValueError, (MASK, LAYOUT), {"transport": "pigeon"}, "transport must be one of fetch, ring.*got 'pigeon'"),
        (ValueError, (MASK, LAYOUT), {"stage_bytes": 0}, "stage_bytes must be an integer of at least 1, got 0"),
        (ValueError, (MASK, LAYOUT), {"ulysses": 3}, "Ulysses width must divide the 4 ranks, got 3"),
        (ValueError, (MASK, LAYOUT), {"ulysses": 0}, "Ulysses width must be an integer of at least 1, got 0"),
        (ValueError, (MASK, LAYOUT), {"ulysses": [1, 1.5]}, "Ulysses width must be an integer of at least 1, got 1.5"),
        (ValueError, (MASK, LAYOUT), {"ulysses": [1, 3]}, "Ulysses width must divide the 4 ranks, got 3"),
        (ValueError, (MASK, LAYOUT), {"ulysses": [1, 2, 4]}, "ulysses has 3 widths for 2 documents"),
        (ValueError, (MASK, LAYOUT), {"node": 3, "transport": "ring"}, "node must divide the 4 ranks, got 3"),
        (ValueError, (MASK, LAYOUT), {"node": 2, "ulysses": 4, "transport": "ring"}, "must divide node=2, got 4"),
        (ValueError, (MASK, LAYOUT), {"rows": [6, 6, 5, 6]}, "rows gives rank 2 5 rows, it holds 6 tokens"),
        (ValueError, (MASK, LAYOUT), {"rows": [6, 6, 6]}, "rows has 3 entries for 4 ranks"),
        (ValueError, (MASK, LAYOUT), {"rows": 7.5}, "rows must be integers, got 7.5"),
        (ValueError, (MASK, LAYOUT), {"rows": [True, *[50] * (LAYOUT.ranks - 1)]}, "rows must be integers, got"),
        (ValueError, (MASK, LAYOUT), {"rows": 1 << 63}, f"rows must be integers below 2..63, got {1 << 63}"),
        (ValueError, (MASK, LAYOUT), {"rows": 1 << 31}, f"gives rank 0 {1 << 31} rows, kernels number fewer than"),
        (ValueError, (None, LAYOUT), {}, "mask must be a Mask, got None"),
        (ValueError, (MASK, [[0]]), {}, r"layout must be a Layout, got \[\[0\]\]; Layout.shards. makes one from lists"),
        (ValueError, (MASK, LAYOUT), {"kv_layout": [[0]]}, "kv_layout must be a Layout, got"),
        (NotImplementedError, (Mask([2**31]), Layout.contiguous(2**31, 2)), {}, "int32.*2147483648 tokens"),
        (
            NotImplementedError,
            (Mask.from_bounds([0] * 24, [24] * 24, lengths=[8, 16]), LAYOUT),
            {"ulysses": [1, 2]},
            "width per document needs bounds inside documents",
        ),
    ],
)
def test_facts_that_do_not_fit(error, facts, options, message) -> None:
    with pytest.raises(error, match=message):
        Plan(*facts, **options)


heads_and_width = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 17))


@given(heads_and_width)
def test_shares_of_heads_are_even_and_keep_the_grouping(numbers) -> None:
    kv_heads, group, width = numbers
    heads = kv_heads * group
    readers = np.zeros(kv_heads, int)
    sizes = []
    covered: list[int] = []
    for share in range(width):
        q, kv = head_share(heads, kv_heads, width, share)
        covered += range(heads)[q]
        sizes.append(q.stop - q.start)
        assert sorted({h // group for h in range(heads)[q]}) == list(range(kv_heads)[kv])
        readers[kv] += 1
        blocks = head_blocks(q, kv, group) if sizes[-1] else []
        rejoined: list[int] = []
        for own, keys in blocks:
            members = list(range(heads)[q][own])
            rejoined += members
            served = list(range(kv_heads)[kv][keys])
            assert len(members) % len(served) == 0
            each = len(members) // len(served)
            assert [h // group for h in members] == [k for k in served for _ in range(each)]
        assert rejoined == list(range(heads)[q]) and len(blocks) <= 3
    assert covered == list(range(heads)) and max(sizes) - min(sizes) <= 1
    assert (readers >= 1).all()
    assert replicated(heads, kv_heads, width) == bool((readers > 1).any())


def test_a_padded_plan_has_a_row_on_every_rank():
    plan = Plan(Mask([3, 2]), Layout([[0, 1], [], [2, 3, 4]]), transport="ring")
    padded = plan.padded()
    assert [padded.rows(rank) for rank in range(3)] == [2, 1, 3]
    assert padded.positions(1).tolist() == [-1] and padded.layout == plan.layout and padded.transport == "ring"
    assert padded.padded() is padded and plan.padded() is padded and padded != plan
    apart = Plan(Mask([3], kv_lengths=[2]), Layout([[0, 1, 2], []]), kv_layout=Layout([[0], [1]]))
    with pytest.raises(NotImplementedError, match="no pad rows"):
        apart.padded()


@pytest.mark.parametrize("rank", [4, 99, -1, 1.0, "1", None, True])
def test_ranks_that_a_plan_does_not_have(rank) -> None:
    plan = Plan(MASK, LAYOUT)
    sizes = {"heads": 2, "kv_heads": 2, "dim": 4}
    for ask in (plan.rows, plan.positions, plan.rope_positions, plan.steps, lambda r: plan.bytes(r, **sizes)):
        with pytest.raises(ValueError, match=f"rank '?{rank}'? is not one of the (plan|layout)'s 4 ranks"):
            ask(rank)
    for ask in (plan.rows, plan.positions):
        with pytest.raises(ValueError, match='side must be "q" or "kv"'):
            ask(0, "v")
    with pytest.raises(ValueError, match="row_bytes must be an integer of at least 1, got 0"):
        plan.steps(0, row_bytes=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": -8}, "dim must be an integer of at least 1, got -8"),
        ({"dim": 4.0}, "dim must be an integer of at least 1, got 4.0"),
        ({"heads": 0}, "heads must be an integer of at least 1, got 0"),
        ({"kv_heads": "2"}, "kv_heads must be an integer of at least 1, got '2'"),
        ({"dtype": 3}, "dtype must be one of float64, .*got '3'"),
    ],
)
def test_shapes_of_no_attention_have_no_bytes(change, message) -> None:
    plan = Plan(MASK, LAYOUT)
    for ask in (plan.bytes, plan.traffic):
        with pytest.raises(ValueError, match=message):
            ask(0, **{"heads": 4, "kv_heads": 2, "dim": 8} | change)
