"""The acceptance suite of trials: of these models none that several ranks cannot compute is accepted, whatever the way.

Each is refused by the name of what mixes, counts or numbers rows, on every rank, and is left as it was. Of the others
none is refused, and several ranks compute them exactly.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import seqpar
from seqpar import Comm, LocalComm
from seqpar.testing import run_threads
from tests.dsp.cases import rand
from tests.dsp.stages import ALONG_T, BY_PLACE, FAR, Clip, refused
from tests.integrations.hf.refused_models import MODELS
from tests.trial.models import ALONE, IDS, MIXING, TOKENS, logits, made


def rows_of_pytorch(name: str, way: str) -> None:
    case, said = MIXING[name]
    model = made(case)

    def rank(comm: Comm) -> str:
        with pytest.raises((NotImplementedError, ValueError)) as raised:
            logits(comm, model, way)
        return str(raised.value)

    for message in run_threads(2, rank):
        assert said in message or "rank 1" in message, message


def rows_of_stages(name: str, way: str) -> None:
    table, size, said = STAGES[way]
    for message in refused(Clip(table[name]), x=rand(1, size, 6, 3)):
        assert message.startswith(f"NotImplementedError: second {said} t, along which ranks share its rows"), message
        assert message.endswith("list t in the whole of its block")


def rows_of_transformers(name: str, way: str) -> None:
    make, message = MODELS[name]
    model = make()
    config, before = model.config, model.config._attn_implementation
    with pytest.raises(NotImplementedError, match=message):
        seqpar.parallelize(model, LocalComm())
    assert model.config is config and config._attn_implementation == before
    assert "forward" not in model.__dict__ and not hasattr(model, "_seqpar")


STAGES = {
    "stages that mix": (ALONG_T, 4, "mixes"),
    "stages that count": (BY_PLACE, 4, "counts the rows of"),
    "stages that look far": (FAR, 8, "counts the rows of"),
}
BAD: dict[str, tuple[Callable[[str, str], None], str, str]] = {
    f"{way}, {name}": (run, name, way)
    for run, way, names in (
        (rows_of_pytorch, "block", MIXING), (rows_of_pytorch, "parallelize", MIXING),
        *((rows_of_stages, way, table) for way, (table, _, _) in STAGES.items()),
        (rows_of_transformers, "transformers", MODELS),
    )
    for name in names
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
@pytest.mark.sampled(3)
def test_a_bad_model_is_refused_by_name(name: str) -> None:
    run, model, way = BAD[name]
    run(model, way)


@pytest.mark.parametrize("way", ["block", "parallelize"])
@pytest.mark.parametrize("name", ALONE)
@pytest.mark.sampled(3)
def test_what_computes_every_row_alone_is_exact(name: str, way: str) -> None:
    model = made(ALONE[name])
    found = torch.cat(run_threads(2, logits, model, way), 1)
    if name not in ("dropout", "random numbers"):
        torch.testing.assert_close(found, model(IDS[None], torch.arange(TOKENS)[None]), rtol=0, atol=1e-10)
