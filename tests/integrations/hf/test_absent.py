"""What a model makes of an input that is not given is what it makes of it on one process, or an error."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import seqpar
from seqpar import Comm
from seqpar.testing import run_threads
from tests.ecosystem.architectures import IMAGES, MORE_IMAGES, TABLE, Architecture, class_of
from tests.ecosystem.images import brought, padded
from tests.ecosystem.ways import CLASSES, cut, islands
from tests.integrations.hf.unions import build

OPTIONAL = ("token_type_ids", "mm_token_type_ids", "attention_mask", "position_ids")
ROWS = {**TABLE, **MORE_IMAGES}


def reads_types(row: Architecture) -> bool:
    """Whether a model of tokens that ranks compute takes types of tokens, or images, and returns a loss."""
    try:
        taken = inspect.signature(class_of(row).forward).parameters
    except KeyError:
        return False
    refused = row.positions is not None or row.kind in ("deberta-v2", "longformer", "mllama")
    return "labels" in taken and not refused and row.group not in ("encoder-decoder", "audio") and (
        row.group == "vision-language" or bool({*OPTIONAL[:2]} & taken.keys())
    )  # fmt: skip


def batches_of(row: Architecture) -> dict[str, dict[str, Tensor]]:
    """Batches of two rows of one length, with as much as the model may be given."""
    ids = torch.randint(1, 45, (2, 12), generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1]) if row.head == CLASSES else ids % (2 if "TokenClassification" in row.head else 45)
    text = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
    text["position_ids"] = torch.arange(12).expand(2, -1)
    if row.group != "vision-language":
        return {"text": text | {"token_type_ids": ids % 2}}
    seen = brought(row.kind, 2, torch.float64)[1]
    return {"text": text, "images": padded(row.kind, [seen[0], seen[0]])}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if reads_types(row)])
def test_what_is_absent_means_what_it_means_on_one_process(name: str) -> None:
    """On one process by "sdpa", the default, which leaves masks out where it can."""
    row = ROWS[name]
    model = build(row)
    model.set_attn_implementation("sdpa")
    given, expected = [], []
    for whole in batches_of(row).values():
        optional = [each for each in OPTIONAL if each in whole]
        for absent in [[], *([each] for each in optional), optional]:
            batch = {n: x for n, x in whole.items() if n not in absent}
            try:
                expected.append(one_process(model, batch))
            except ValueError:  # it asks for what is absent
                continue
            given.append(batch)
    assert given
    for each in on_ranks(model, given):
        for batch, loss, found in zip(given, expected, each, strict=True):
            if isinstance(found, str):
                assert name == "paligemma", (sorted(batch), found)
            else:
                assert found == pytest.approx(loss, rel=1e-6), sorted(batch)


def one_process(model: Any, batch: dict[str, Tensor]) -> float:
    more = {"use_cache": False} if hasattr(model.config.get_text_config(), "use_cache") else {}
    with islands(torch.float64), torch.no_grad():
        return float(model(**batch, **more).loss)


def on_ranks(model: Any, batches: list[dict[str, Tensor]]) -> list[list[float | str]]:
    """The losses of batches on two ranks, whose plan cuts documents; or their errors."""

    def rank(comm: Comm) -> list[float | str]:
        own, found = copy.deepcopy(model), list[float | str]()
        with islands(torch.float64), seqpar.parallelize(own, comm, source="replicated", plan=cut):
            for batch in batches:
                try:
                    found.append(one_process(own, batch))
                except NotImplementedError as error:
                    found.append(str(error))
        return found

    return run_threads(2, rank)


def test_types_that_decide_what_is_seen_are_asked_for() -> None:
    model = build(IMAGES["paligemma"])
    whole = batches_of(IMAGES["paligemma"])["text"]
    types = {"token_type_ids": (torch.arange(12) > 4).long().expand(2, -1)}
    for refused, found in on_ranks(model, [whole, whole | types]):
        assert isinstance(refused, str) and "give token_type_ids" in refused
        assert found == pytest.approx(one_process(model, whole | types), rel=1e-6)
