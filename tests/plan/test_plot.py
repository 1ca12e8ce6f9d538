"""The picture of a plan shows every token with its holder, and can be drawn of any plan."""

from __future__ import annotations

import builtins
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from seqpar import Layout, Mask, Plan, plan_batch
from tests.cases import Case, cases, examples

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure  # noqa: E402

from seqpar.plan.plot import _bytes, raster  # noqa: E402


@examples(40)
@given(cases())
def test_the_raster_shows_every_row_of_every_rank(case: Case) -> None:
    plan = case.plan()
    document, depth = raster(plan)
    for rank in range(plan.ranks):
        at = plan.layout.positions(rank)
        expected = plan.mask.documents(at)
        np.testing.assert_array_equal(document[rank], np.append(expected, [-1] * (document.shape[1] - at.size)))
        inside = at - plan.mask.offsets[expected]
        np.testing.assert_allclose(depth[rank, : at.size], inside / plan.mask.lengths[expected])


def test_the_raster_of_a_tree_shows_depths() -> None:
    mask = Mask.shared_prefix([(4, [2, 4]), (2, [3, 1])])
    document, depth = raster(Plan(mask, Layout.contiguous(16, 1)))
    np.testing.assert_array_equal(document, [[0] * 10 + [1] * 6])
    expected = [n / 8 for n in (0, 1, 2, 3, 4, 5, 4, 5, 6, 7)] + [n / 5 for n in (0, 1, 2, 3, 4, 2)]
    np.testing.assert_allclose(depth[0], expected)


def test_the_raster_of_thousands_of_ranks_is_a_sample() -> None:
    lengths = [7000] * 700
    document, _ = raster(Plan(Mask(lengths), Layout.contiguous(4_900_000, 1400)))
    assert document.shape == (512, 1600)
    assert (np.diff(document[:, 0]) >= 0).all() and document.max() == 699


def test_bytes_between_ranks_are_those_that_the_plan_predicts() -> None:
    plan = plan_batch([9000, 700, 50, 4000, 20], 4, model="tiny", hardware="cpu")
    call = plan.forecast.call
    moved = _bytes(plan, call)
    for rank in range(4):
        assert moved[:, rank].sum() == sum(plan.bytes(rank, **call, backward=b) for b in (False, True))
    assert moved.trace() == 0 < moved.sum()


@pytest.mark.parametrize(
    "plan",
    [
        plan_batch([900, 70, 5, 400, 20], 4, model="tiny", hardware="cpu"),
        plan_batch([5000, 70, 5, 4000] * 20, 96, model="tiny"),
        Plan(Mask([50, 9]), Layout.striped(59, 6), transport="ring", ulysses=2),
        Plan(Mask([500, 90]), Layout.contiguous(590, 70), transport="gather"),
        Plan(Mask([3]), Layout.contiguous(3, 5), rows=2),
        Plan(Mask.shared_prefix([(400, [20, 40]), (7, [3])]), Layout.zigzag([460, 10], 4)),
        Plan(Mask([40, 300], window=(9, None), sink_tokens=2), Layout.contiguous(340, 4), transport="ring"),
        Plan(Mask([40, 300], window=(3, None)), Layout.zigzag([40, 300], 68), node=2),
        Plan(Mask([2**31 - 1]), Layout.zigzag([2**31 - 1], 8)),
        Plan(Mask([2**31 - 1]), Layout.contiguous(2**31 - 1, 8), transport="ring"),
    ],
    ids=["planned", "planned-nodes", "ring", "gather", "empty-ranks", "trees", "bands", "nodes", "huge", "huge-ring"],
)
@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.sampled(15)
def test_every_plan_can_be_drawn(plan: Plan, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / f"plan.{suffix}"
    plan.plot(path)
    head = path.read_bytes()[:200]
    assert head.startswith(b"\x89PNG") if suffix == "png" else b"<?xml" in head


@pytest.mark.parametrize(
    ("mask", "bands"),
    [(Mask([90]), 0), (Mask.shared_prefix([(60, [20, 10])]), 1), (Mask([90], window=(9, None), sink_tokens=2), 2)],
)
def test_bands_and_trees_show_what_a_query_sees(mask: Mask, bands: int, tmp_path: Path, monkeypatch) -> None:
    figures = []

    def kept(self: Figure, *args: object, **options: object) -> None:
        figures.append(self)

    monkeypatch.setattr(Figure, "savefig", kept)
    Plan(mask, Layout.zigzag(mask.lengths, 2)).plot(tmp_path / "plan.png")
    panels = [axis for axis in figures[0].axes if axis.get_title(loc="left") == "Keys that a query sees"]
    assert len(panels) == (bands > 0)
    for panel in panels:
        assert [text.get_text().split(":")[0] for text in panel.get_legend().get_texts()] == [
            f"band {n}" for n in range(bands)
        ]


@pytest.mark.filterwarnings("error")
def test_a_mask_of_bands_and_documents_of_several_widths_fit_beside_each_other(tmp_path):
    """Else matplotlib says that its layout collapsed."""
    small, long = (Mask(n, window=(w, 0), sink_tokens=1) for n, w in (([5, 5], 2), ([60_000, 3_000], 1_000)))
    Plan(small, Layout.striped(10, 2), ulysses=[1, 2]).plot(tmp_path / "small.png")
    plan_batch(long, 2).plot(tmp_path / "long.png")


@pytest.mark.parametrize("dark", [False, True])
def test_one_panel_is_drawn_alone(dark: bool, tmp_path: Path) -> None:
    plan = plan_batch([900, 70, 5, 400, 20], 4, model="tiny", hardware="cpu")
    for panel in ("documents", "degrees", "load", "time", "bytes"):
        plan.plot(tmp_path / f"{panel}.png", panel=panel, dark=dark)
        assert (tmp_path / f"{panel}.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="panel=.mask.: this plan has the panels documents, degrees"):
        plan.plot(tmp_path / "mask.png", panel="mask")
    with pytest.raises(ValueError, match="panel='time'"):
        Plan(plan.mask, plan.layout).plot(tmp_path / "time.png", panel="time")


def test_what_cannot_be_written_or_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(Mask([3]), Layout.contiguous(3, 1))
    with pytest.raises(ValueError, match="nonsense"):
        plan.plot(tmp_path / "plan.nonsense")
    found = builtins.__import__

    def absent(name: str, *args: object, **options: object) -> object:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return found(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ImportError, match=r"pip install 'seqpar\[plot\]'"):
        plan.plot(tmp_path / "plan.png")
