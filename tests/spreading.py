"""Documents of tests are short, and would all stay on the rank that brings them: here they are spread nevertheless."""

from __future__ import annotations

import math

import pytest


@pytest.fixture(autouse=True)
def spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spread every batch of a transformers model, whatever that gains."""
    planning = pytest.importorskip("seqpar.integrations.hf.planning")
    monkeypatch.setattr(planning, "SPREADING", -math.inf)
