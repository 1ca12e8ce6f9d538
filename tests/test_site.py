"""The site of docs/: it builds without a warning, loads nothing from elsewhere, and shows every public name."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Modules whose `__all__` is public.
PUBLIC = [
    "seqpar", "seqpar.comm", "seqpar.data", "seqpar.dsp", "seqpar.facts", "seqpar.integrations.transformers",
    "seqpar.kernels", "seqpar.nn", "seqpar.plan", "seqpar.planner", "seqpar.testing", "seqpar.train",
]  # fmt: skip
# What is on a page of its own: a module among public names.
MODULES = {"seqpar.nn"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it."""
    for module in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(module, reason=f"{module}: pip install 'seqpar[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_built_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert len(pages) > 10
    for page in pages:
        text = (site / page).read_text(encoding="utf-8")
        tags = re.findall(r"<(?:script|img|iframe|link)\b[^>]*", text)
        assert tags and not [tag for tag in tags if re.search(r"(?:src|href)=.?(?:https?:)?//", tag)], page
        assert "```" not in text, f"{page} has a fence that was not read as one"


def exported(module: str) -> list[str]:
    """The `__all__` of a module, which is not imported: transformers would take seconds."""
    source = importlib.util.find_spec(module).origin
    for node in ast.parse(Path(source).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{module} has no __all__")


@pytest.mark.parametrize("module", PUBLIC)
def test_the_reference_has_every_public_name(module: str, site: Path) -> None:
    # mkdocstrings' inventory, as Sphinx writes it: four lines of text, then compressed lines "name role ..."
    lines = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode().splitlines()
    shown = {name for name, role in (line.split()[:2] for line in lines) if role != "py:module"}
    # anchors before functions that are called as their module is
    for page in (site / "api").glob("*.html"):
        shown |= set(re.findall(r'<a\b[^>]*\bid="([^"]+)"', page.read_text(encoding="utf-8")))
    missing = {f"{module}.{name}" for name in exported(module)} - MODULES - shown
    assert not missing, f"on no page of docs/api: {sorted(missing)}"
