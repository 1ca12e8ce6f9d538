"""What the logger says of batches that need not be spread."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

import seqpar
from seqpar import Comm, Layout, LocalComm, Mask, plan_batch
from seqpar.integrations.hf.planning import forecast_apart
from seqpar.integrations.hf.worth import TRIED, Worth
from seqpar.planner import Forecast
from seqpar.testing import run_threads
from tests.integrations.hf.models import build


def test_ranks_apart_take_what_plans_of_their_documents_take() -> None:
    lengths = [3000, 100, 200, 2500]
    plan = plan_batch(lengths, 2, model="llama-8b")
    forecast = plan.forecast
    assert isinstance(forecast, Forecast)
    source = Layout.from_pieces([0, 3000, 3100, 3300], lengths, [0, 0, 1, 1], 2)
    alone = [plan_batch(own, 1, model=forecast.model).forecast for own in (lengths[:2], lengths[2:])]
    apart = forecast_apart(Mask(lengths), source, forecast.model, forecast.hardware)
    assert apart.seconds == pytest.approx(max(x.seconds for x in alone), rel=1e-6)


def test_plain_data_parallelism_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model = build("llama")

    def rank(comm: Comm) -> None:
        own = copy.deepcopy(model)
        with seqpar.parallelize(own, comm):
            for _ in range(TRIED + 3):
                ids = torch.full((1, 8), 1 + comm.rank)
                own(input_ids=ids, labels=ids)

    with caplog.at_level("INFO", logger="seqpar"):
        run_threads(2, rank)
    assert sum("plain data parallelism" in record.getMessage() for record in caplog.records) == 1


def test_nothing_is_said_where_one_batch_gains(caplog: pytest.LogCaptureFixture) -> None:
    worth = Worth("a model")
    with caplog.at_level("INFO", logger="seqpar"):
        for lengths in [[400, 400]] * 3 + [[60000, 400]] + [[400, 400]] * TRIED:
            plan, source = plan_batch(lengths, 2), Layout.from_pieces([0, lengths[0]], lengths, [0, 1], 2)
            worth.note(SimpleNamespace(plan=plan, source=source, comm=LocalComm()))  # type: ignore[arg-type]
    assert not caplog.records
