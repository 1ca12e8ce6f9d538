"""What errors about models of images say to do, done."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import seqpar
from seqpar import Comm
from seqpar.testing import run_threads
from tests.advice.advised import advised
from tests.ecosystem.architectures import TABLE, class_of, config_of


@pytest.mark.parametrize("kind", ["prefix", "causal", "text alone"])
def test_layers_that_see_ahead_get_the_types_of_tokens_or_are_causal(kind: str) -> None:
    """Of PaliGemma; and of Gemma, which takes no types."""
    ids = torch.arange(1, 25).view(2, 12)
    batch = {"input_ids": ids, "labels": ids}
    row = TABLE["gemma" if kind == "text alone" else "paligemma"]
    config = config_of(row)
    config.get_text_config().use_bidirectional_attention = True
    causal = copy.deepcopy(config)
    causal.get_text_config().use_bidirectional_attention = False
    unsure, sure = (_drawn(class_of(row)(each)) for each in (config, config if kind == "prefix" else causal))
    given = batch | ({"token_type_ids": (torch.arange(12) > 4).long().expand(2, -1)} if kind == "prefix" else {})
    expected = float(sure(**given).loss)

    def rank(comm: Comm) -> float:
        own = copy.deepcopy(unsure)
        with (
            advised(
                NotImplementedError,
                "give token_type_ids, 0 for tokens that see each other and 1 for others, or load it with "
                "use_bidirectional_attention=False in the config of its text model",
            ),
            seqpar.parallelize(own, comm),
        ):
            own(**{name: x[comm.rank :: 2] for name, x in batch.items()})
        with seqpar.parallelize(own := copy.deepcopy(sure), comm):
            return float(own(**{name: x[comm.rank :: 2] for name, x in given.items()}).loss)

    assert run_threads(2, rank) == pytest.approx([expected] * 2, rel=1e-5)


def _drawn(model: Any) -> Any:
    """The model with weights at which attention matters, the same each time."""
    g = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=g)
    return model
