"""What pages of docs/ say of the package and of its records is true."""

from __future__ import annotations

import json
from pathlib import Path

from bench.cpu import architectures_page

ROOT = Path(__file__).parent.parent
DOCS, RESULTS = ROOT / "docs", ROOT / "bench" / "results"


def test_the_page_of_architectures_is_that_of_the_record() -> None:
    record = json.loads((RESULTS / "architectures.json").read_text())
    assert (DOCS / "architectures.md").read_text() == architectures_page.page(record)
