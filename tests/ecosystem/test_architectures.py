"""No architecture is silently wrong by any documented way in: it is exact, or an error says why not.

CI runs one architecture of each group by every way in, and the ways in that mix tokens of ranks where they should not:
recurrent layers, rotary embeddings of the longest position, attention that does not use transformers' interface.
`make exhaustive` runs the whole table and compares it with the committed one, which ``python bench/architectures.py``
writes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the table is of transformers' architectures: pip install '.[transformers]'")

from tests.ecosystem.architectures import TABLE  # noqa: E402
from tests.ecosystem.ways import verdict, ways  # noqa: E402

COMMITTED = Path(__file__).parents[2] / "bench/results/architectures.json"
FIT = ("exact", "refused: ", "unknown to transformers: ", "not called")

OF_EACH_GROUP = ("qwen3", "mixtral", "modernbert", "qwen3_next", "llava", "bart", "wav2vec2", "vit")
MIXING = tuple(name for name, row in TABLE.items() if row.group == "hybrid")
OUTSIDE = ("llama-dynamic", "phi3-longrope", "bloom", "mpt", "codegen", "deepseek_v32", "longformer")
SOME = {(name, way) for name in OF_EACH_GROUP for way in ways(TABLE[name])}
SOME |= {(name, way) for name in (*MIXING, *OUTSIDE) for way in ("sdpa", "registered")}
# attention by recurrence, or by code of its own, loaded under a name that nothing asks for
NOT_CALLED = {"deberta-v2", "mamba", "mamba2", "rwkv", "xlstm"}


@pytest.mark.parametrize(("name", "way"), sorted(SOME))
def test_an_architecture_is_exact_or_refused_by_name(name: str, way: str) -> None:
    said = verdict(TABLE[name], way)
    assert said.startswith(FIT), said
    assert (said == "not called") <= (name in NOT_CALLED), said


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", TABLE)
def test_the_table_is_the_committed_one(name: str) -> None:
    committed = json.loads(COMMITTED.read_text())["rows"][name]["ways"]
    for way in ways(TABLE[name]):
        said = verdict(TABLE[name], way)
        assert said.startswith(FIT), f"{way}: {said}"
        assert said.partition(":")[0] == committed[way].partition(":")[0], f"{way}: {said}"
