"""Several candidates counted together are each of them counted alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.plan.counts import tally
from seqpar.planner.count import tallies
from seqpar.planner.place import Pieces, Placement


@given(st.data())
def test_candidates_counted_together_are_those_counted_alone(data: st.DataObject) -> None:
    ranks, node = data.draw(st.sampled_from([(4, 4), (8, 4), (6, 2), (6, 6)]))
    lengths = np.array(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=8)))
    mask = data.draw(
        st.sampled_from(
            [
                Mask(lengths),
                Mask(lengths, window=(3, None)),
                Mask(lengths, window=(3, None), sink_tokens=2),
                Mask.shared_prefix([(int(n - n // 2), [int(n // 2 - n // 4), int(n // 4)]) for n in lengths]),
            ]
        )
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    candidates, layouts = [], []
    for _ in range(data.draw(st.integers(1, 4))):
        at = np.unique(np.concatenate([mask.offsets, rng.integers(0, mask.tokens, 6)]))
        count, rank = np.diff(at), rng.integers(0, ranks, at.size - 1)
        widths = rng.choice([w for w in (1, 2, 4) if node % w == 0], len(lengths))
        document = mask.documents(at[:-1])
        candidates.append(Placement(Pieces(document, at[:-1] - mask.offsets[document], count, rank), widths, 0))
        layouts.append(Layout.from_pieces(at[:-1], count, rank, ranks))
    for one, layout, counts in zip(candidates, layouts, tallies(mask, candidates, ranks=ranks, node=node), strict=True):
        assert list(counts) == sorted(set(one.widths.tolist()))
        for width, found in counts.items():
            alone = tally(mask, layout, width=width, node=node // width, documents=one.widths == width)
            for name, values in alone._asdict().items():
                np.testing.assert_array_equal(getattr(found, name), values, err_msg=name)
