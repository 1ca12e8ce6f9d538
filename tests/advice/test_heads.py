"""What errors say to do for heads that pool, routers and rotary embeddings of the longest position, done."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import seqpar
from seqpar import LocalComm
from tests.advice.advised import advised

transformers = pytest.importorskip("transformers")

from tests.ecosystem.architectures import Architecture  # noqa: E402
from tests.integrations.hf.models import padded  # noqa: E402
from tests.integrations.hf.unions import build  # noqa: E402

BATCH = padded(torch.Generator().manual_seed(1), [9, 5], left=True) | {"labels": torch.tensor([2, 0])}
FLIPPED = {name: x.flip(1) if x.dim() > 1 else x for name, x in BATCH.items()}  # padding on the right


def head(kind: str, **config: Any) -> transformers.PreTrainedModel:
    """A classifier of sequences, in three classes."""
    row = Architecture(kind, "encoder", {"num_labels": 3} | config, head="ForSequenceClassification")
    return build(row, torch.float32)


def is_right(model: torch.nn.Module, batch: dict[str, Tensor]) -> bool:
    """Whether the loss is that of one process; inside the model's block."""
    own = copy.deepcopy(KEPT[id(model)])
    return float(model(**batch).loss) == pytest.approx(float(own(**batch).loss), rel=1e-5)


KEPT: dict[int, torch.nn.Module] = {}


def made(kind: str, **config: Any) -> transformers.PreTrainedModel:
    """A classifier, of which a copy is kept as it was."""
    model = head(kind, **config)
    KEPT[id(model)] = copy.deepcopy(model)
    return model


def test_a_head_that_reads_the_last_token_gets_a_padding_token() -> None:
    model = made("llama", pad_token_id=None)
    with advised(NotImplementedError, "set pad_token_id in its config"):
        seqpar.parallelize(model, LocalComm())
    model.config.pad_token_id = KEPT[id(model)].config.pad_token_id = 0
    with seqpar.parallelize(model, LocalComm()):
        assert is_right(model, FLIPPED)
        model.config.pad_token_id = None
        with advised(NotImplementedError, "set pad_token_id in its config"):
            model(**FLIPPED)
        model.config.pad_token_id = 0
        assert is_right(model, FLIPPED)
