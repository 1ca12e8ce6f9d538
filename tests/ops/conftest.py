"""The points of the pairwise cover, for the tests of a file that ask for one."""

from __future__ import annotations

import pytest

from tests.ops.cases import named, pairwise, product


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Points of the masks in `COVERED` of the file; not when processes import it, as to find them takes a second."""
    if "point" in metafunc.fixturenames:
        metafunc.parametrize("point", pairwise(product(metafunc.module.COVERED)), ids=named)
