"""The simulator under masks: the masks are DCP's, counts equal closed forms where documents are causal."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from seqpar import Mask
from seqpar.planner import Hardware, ModelShape

SHAPE = replace(ModelShape.preset("llama-8b"), layers=2)
LENGTHS = np.array([4400, 300, 1536, 256, 1])


def dense(name: str, length: int) -> np.ndarray:
    """Who sees whom in one document, written from the definitions of DCP's repository."""
    i, j = np.arange(length)[:, None], np.arange(length)
    if name == "lambda":
        seen = (j < 64) | (j > i - 4096)
    elif name == "shared question":
        question = int(0.2 * length)
        answer = np.minimum((j - question) // max(1, (length - question) // 4), 3)
        seen = (j < question) | (answer == answer[:, None])
    elif name == "causal blockwise":
        last = i // 256 == (length - 1) // 256
        seen = last | (j < 256) | (j >= i - 512)
    else:
        seen = j >= 0
    return seen & (j <= i)


@pytest.mark.parametrize("name", ["causal", "lambda", "shared question", "causal blockwise"])
@pytest.mark.sampled(2)
def test_masks_are_those_of_their_definitions(name: str) -> None:
    mask = import_module("bench.planner.masks").MASKS[name](LENGTHS)
    assert mask.lengths.tolist() == LENGTHS.tolist() and mask.within_documents
    at = np.arange(mask.tokens)
    for document, length in enumerate(LENGTHS.tolist()):
        rows = at[mask.offsets[document] :][:length]
        found = np.zeros((length, length), int)
        for n, band in enumerate(mask.bands):
            lo, hi = mask.bounds(rows, band=n)
            own = (lo[:, None] <= rows) & (rows < hi[:, None])
            found += own if band.until is None else own & (rows[:, None] < mask.until(band=n)[rows])
        np.testing.assert_array_equal(found, dense(name, length))


@pytest.mark.parametrize("node", [2, 8])
def test_counts_of_causal_documents_are_the_closed_forms(node: int) -> None:
    schedules = import_module("bench.planner.schedules")
    lengths = [4096, 64, 640]
    machine = replace(Hardware.preset("h100"), memory=1 << 50, node=node)
    shape = replace(SHAPE, kv_heads=1, heads=8)  # one key head, so that a ring has no head trade
    plain = schedules.Case.of(lengths, 8, shape, machine)
    masked = schedules.Case.of(lengths, 8, shape, machine, mask=Mask(lengths))
    micros = [schedules.Micro(0, 8, np.array([0])), schedules.Micro(0, 4, np.array([1, 2]))]
    for way in ("fetch", "ring"):
        forms, counts = (schedules.costs(case, micros, (way,)) for case in (plain, masked))
        np.testing.assert_array_equal(forms.total, counts.total)
        np.testing.assert_array_equal(forms.busy, counts.busy)
    with pytest.raises(NotImplementedError, match="priced alone"):
        masked.alone(2, ("fetch",))


@pytest.mark.exhaustive
def test_policies_place_masks_and_none_beats_the_bound(tmp_path: Path, capsys) -> None:
    masks, path = import_module("bench.planner.masks"), tmp_path / "masks.json"
    masks.main(["--batches", "1", "--masks", "lambda,shared question", "--json", str(path)])
    data = json.loads(path.read_text())
    rows = {(row["setting"], row["mask"], row["policy"]): row for row in data["rows"]}
    assert len(rows) == 2 * 2 * len(masks.POLICIES)
    for (setting, mask, policy), row in rows.items():
        assert row["over"] >= 1 and row["moved"] > 0
        # all keys go around, whatever a mask hides
        assert row["moved"] <= rows[setting, mask, "ring"]["moved"] or policy == "dynamic groups"
        assert row["over"] <= rows[setting, mask, "ring"]["over"] or policy == "dynamic groups"
    shown = capsys.readouterr().out
    assert "1.23, 1.46" in shown and "2.15 to 3.77" in shown


def test_published_ratios_are_of_policies_and_masks() -> None:
    masks = import_module("bench.planner.masks")
    for setting, policy, mask in masks.PUBLISHED:
        assert setting in masks.SETTINGS and policy in masks.POLICIES and mask in masks.MASKS
