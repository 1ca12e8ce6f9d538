"""The picture of a mask shows each pair once, in its band, and can be drawn of any mask."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpar.facts.mask import Mask
from seqpar.facts.picture import CELLS, MaskPicture, raster
from seqpar.testing import seen_pairs
from tests.cases import ENDING, MASKS, examples, make_mask

pytest.importorskip("matplotlib")

TREE = Mask.tree([5, 0, 7, 3, 1, 9, 4, 6], [-1, 0, 1, 2, 2, 0, -1, 6])
SINKS = Mask([40, 300], window=(9, None), sink_tokens=2)


def shown(mask: Mask) -> MaskPicture:
    return MaskPicture("", mask.bands, [0] * len(mask.bands), mask.offsets, mask.kv_offsets, mask.paths)


@examples(40)
@given(st.sampled_from((*MASKS, *ENDING)), st.integers(0, 2**16))
def test_small_masks_are_shown_pair_by_pair(kind, seed) -> None:
    mask = make_mask(kind, [9, 1, 17], np.random.default_rng(seed))
    np.testing.assert_array_equal(raster(shown(mask)).sum(0), seen_pairs(mask))


def test_bands_are_shown_apart_and_cells_by_their_share() -> None:
    share = raster(shown(SINKS))
    np.testing.assert_array_equal(share.sum(0), seen_pairs(SINKS))
    assert share.shape[0] == 2 and share.any((1, 2)).all()
    long = Mask([5 * CELLS], causal=False, window=(0, 0))
    share = raster(shown(long))[0]
    assert share.shape == (CELLS, CELLS) and (share.diagonal() > 0).all() and share.sum() == share.trace() < CELLS


@pytest.mark.parametrize(
    "mask",
    [TREE, TREE.windowed((3, None)), SINKS, Mask([3], kv_lengths=[70]), Mask([10**6] * 300), Mask.blocks([[True]], 5)],
    ids=["tree", "window", "bands", "cross", "large", "blocks"],
)
@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.sampled(3)
def test_every_mask_can_be_drawn(mask, suffix, tmp_path: Path) -> None:
    path = tmp_path / "new" / f"mask.{suffix}"
    mask.plot(path)
    head = path.read_bytes()[:200]
    assert head.startswith(b"\x89PNG") if suffix == "png" else b"<?xml" in head


def test_more_nodes_than_can_be_told_apart_are_not_drawn(tmp_path: Path) -> None:
    Mask.shared_prefix([(3, [2] * 5000)]).plot(tmp_path / "mask.svg")
    assert (tmp_path / "mask.svg").stat().st_size > 0


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not a picture format; end it in \."):
        TREE.plot(tmp_path / "mask.nonsense")
    with pytest.raises(IsADirectoryError):
        (tmp_path / "mask.png").mkdir()
        TREE.plot(tmp_path / "mask.png")
