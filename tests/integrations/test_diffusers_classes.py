"""Every class of diffusers' transformers on several ranks: equal to one process, or refused by name.

CI runs a part of the settings, `make exhaustive` all of them, and ``python -m bench.cpu.diffusion`` makes the table.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from bench.cpu.diffusion import RESULTS, summary, table
from tests.integrations.diffusers_classes import TABLE, classes, made
from tests.integrations.diffusers_verdicts import FIT, SETTINGS, Setting, verdict

HERE = [name for name in TABLE if name in classes()]  # an older release has fewer


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("name", HERE)
@pytest.mark.sampled(24)
def test_a_class_is_exact_or_refused_by_name(name: str, setting: Setting) -> None:
    found = verdict(partial(made, name), setting)
    assert found.startswith(FIT), found


def test_the_table_has_all_classes_but_a_few() -> None:
    assert len(HERE) >= len(classes()) - 1


def test_the_page_has_the_table_of_the_record() -> None:
    recorded = json.loads(RESULTS.read_text())
    rows = recorded[max(recorded)]["rows"]
    assert rows.keys() == TABLE.keys()
    page = (Path(__file__).parents[2] / "docs/diffusers.md").read_text()
    assert summary(recorded) in page and table(rows) in page
