"""No architecture is silently wrong by any documented way in: it is exact, or an error says why not.

CI runs one architecture of each group by every way in, in fp32 by two, and the ways in that mix tokens of ranks where
they should not: recurrent layers, rotary embeddings of the longest position, attention that does not use transformers'
interface. `make exhaustive` runs the whole table and compares it with the committed one, which ``python
bench/cpu/architectures.py`` writes.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the table is of transformers' architectures: pip install '.[transformers]'")

import transformers  # noqa: E402
from transformers import CONFIG_MAPPING  # noqa: E402

import seqpar  # noqa: E402
from seqpar.parallel import surround  # noqa: E402
from tests.ecosystem.architectures import TABLE, Architecture  # noqa: E402
from tests.ecosystem.ways import FIT, verdict, ways  # noqa: E402

COMMITTED = Path(__file__).parents[2] / "bench/results/architectures.json"
DTYPES = {"float64": torch.float64, "float32": torch.float32}

OF_EACH_GROUP = ("qwen3", "mixtral", "modernbert", "qwen3_next", "llava", "bart", "wav2vec2", "vit")
MIXING = tuple(name for name, row in TABLE.items() if row.group == "hybrid")
OUTSIDE = ("llama-dynamic", "phi3-longrope", "bloom", "mpt", "codegen", "deberta-v2", "deepseek_v32", "longformer")
SOME = {(name, way, "float64") for name in OF_EACH_GROUP for way in ways(TABLE[name])}
SOME |= {(name, way, "float64") for name in (*MIXING, *OUTSIDE) for way in ["registered"]}
SOME |= {
    (name, way, "float32") for name in OF_EACH_GROUP for way in ways(TABLE[name]) if way in ("packed", "registered")
}


@pytest.mark.parametrize(("name", "way", "dtype"), sorted(SOME))
@pytest.mark.sampled(5)
def test_an_architecture_is_exact_or_refused_by_name(name: str, way: str, dtype: str) -> None:
    said = verdict(TABLE[name], way, DTYPES[dtype])
    assert said.startswith(FIT), said


@pytest.mark.parametrize("name", ["mamba", "mamba2", "rwkv", "xlstm", "deberta-v2"])
def test_who_never_asks_for_the_registered_attention_is_told_so(name: str) -> None:
    """Recurrences, and attention by code of its own: transformers loads them by any name."""
    said = verdict(TABLE[name], "registered zigzag")
    assert said.startswith("refused: "), said


def test_a_registered_model_that_edits_its_mask_is_told_so() -> None:
    said = verdict(Architecture("doge", "dense"), "registered")
    assert said.startswith("refused: ") and "its attention edits its mask" in said, said


def test_a_registered_model_that_makes_a_mask_of_its_mask_is_told_so() -> None:
    said = verdict(TABLE["paligemma"], "registered")
    assert said.startswith("refused: layers that see ahead"), said


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_nobody_refuses_would_be_seen(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table's measure, on a model that nothing keeps from computing each rank's rows alone."""
    monkeypatch.setattr(seqpar, "parallel", surround)  # which needs nothing to use its plan
    assert verdict(TABLE["rwkv"], "registered zigzag", DTYPES[dtype]).startswith("WRONG by ")


def test_the_committed_table_has_these_cases() -> None:
    committed = json.loads(COMMITTED.read_text())["rows"]
    assert {name: (row["kind"], row["group"]) for name, row in committed.items()} == {
        name: (row.kind, row.group) for name, row in TABLE.items()
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TABLE)
def test_the_table_is_the_committed_one(name: str) -> None:
    """With the transformers of the table; another one may know fewer models, or take more of them."""
    record = json.loads(COMMITTED.read_text())
    committed, same = record["rows"][name], record["versions"]["transformers"] == transformers.__version__
    for way, (dtype, kind) in product(ways(TABLE[name]), DTYPES.items()):
        said = verdict(TABLE[name], way, kind)
        assert said.startswith(FIT), f"{way}, {dtype}: {said}"
        if same:
            assert said.partition(":")[0] == committed[dtype][way].partition(":")[0], f"{way}, {dtype}: {said}"


def test_a_model_that_a_release_does_not_have_is_named_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for content in (CONFIG_MAPPING._extra_content, CONFIG_MAPPING._mapping):
        monkeypatch.delitem(content, "llama", raising=False)
    assert verdict(TABLE["llama"], "registered zigzag") == "not in this release"
