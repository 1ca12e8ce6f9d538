"""What the error of a head that pools says to do, done: the loss is that of one process."""

from __future__ import annotations

import pytest
import torch

import seqpar
from seqpar import LocalComm
from tests.advice.advised import advised

pytest.importorskip("transformers")

from tests.ecosystem.architectures import Architecture  # noqa: E402
from tests.integrations.hf.models import padded  # noqa: E402
from tests.integrations.hf.unions import build  # noqa: E402

BATCH = padded(torch.Generator().manual_seed(1), [9, 5], left=False) | {"labels": torch.tensor([2, 0])}


def test_a_head_that_reads_the_last_token_gets_a_padding_token() -> None:
    config = {"num_labels": 3, "pad_token_id": None}
    model = build(Architecture("llama", "encoder", config, head="ForSequenceClassification"), torch.float32)
    with advised(NotImplementedError, "set pad_token_id in its config"):
        seqpar.parallelize(model, LocalComm())
    model.config.pad_token_id = 0
    expected = float(model(**BATCH).loss)
    with seqpar.parallelize(model, LocalComm()):
        assert float(model(**BATCH).loss) == pytest.approx(expected, rel=1e-5)
        model.config.pad_token_id = None
        with advised(NotImplementedError, "set pad_token_id in its config"):
            model(**BATCH)
        model.config.pad_token_id = 0
        assert float(model(**BATCH).loss) == pytest.approx(expected, rel=1e-5)
