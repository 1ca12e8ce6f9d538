"""The site of docs/: it builds without a warning, shows every public name, and is true to the code."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from tests.test_package import LAYERS

ROOT = Path(__file__).parent.parent
# Modules whose `__all__` is public.
PUBLIC = [
    "seqpar", "seqpar.comm", "seqpar.data", "seqpar.dsp", "seqpar.facts", "seqpar.integrations.transformers",
    "seqpar.kernels", "seqpar.nn", "seqpar.plan", "seqpar.planner", "seqpar.recurrent", "seqpar.testing",
    "seqpar.train",
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


@pytest.mark.exhaustive
def test_every_page_is_built_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert len(pages) > 10
    for page in pages:
        text = (site / page).read_text(encoding="utf-8")
        tags = re.findall(r"<(?:script|img|iframe|link)\b[^>]*", text)
        assert tags and not [tag for tag in tags if re.search(r"(?:src|href)=.?(?:https?:)?//", tag)], page
        assert "```" not in text, f"{page} has a fence that was not read as one"
        assert "::</p>" not in text, f"{page} shows a docstring's '::', which Markdown does not know"


def exported(module: str) -> list[str]:
    """The `__all__` of a module, which is not imported: transformers would take seconds."""
    source = importlib.util.find_spec(module).origin
    for node in ast.parse(Path(source).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{module} has no __all__")


@pytest.mark.parametrize("module", PUBLIC)
@pytest.mark.exhaustive
def test_the_reference_has_every_public_name(module: str, site: Path) -> None:
    # mkdocstrings' inventory, as Sphinx writes it: four lines of text, then compressed lines "name role ..."
    lines = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode().splitlines()
    shown = {name for name, role in (line.split()[:2] for line in lines) if role != "py:module"}
    # anchors before functions that are called as their module is
    for page in (site / "api").glob("*.html"):
        shown |= set(re.findall(r'<a\b[^>]*\bid="([^"]+)"', page.read_text(encoding="utf-8")))
    # what classes inherit is shown as well
    assert shown >= {"seqpar.Plan.bytes", "seqpar.Plan.rope_positions", "seqpar.Plan.steps", "seqpar.GroupComm.sub"}
    missing = {f"{module}.{name}" for name in exported(module)} - MODULES - shown
    assert not missing, f"on no page of docs/api: {sorted(missing)}"


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
NAMESPACES = {"__main__", "__init__"}  # of the package itself: no packages


def test_the_layers_of_the_page_are_those_that_are_enforced() -> None:
    cells = re.findall(r"^\| (\d) \| `(\w+)` \| (.*) \| (.*) \|$", ARCHITECTURE, re.MULTILINE)
    layer = {package: int(number) for number, package, _, _ in cells}
    assert set(layer) == set(LAYERS) - NAMESPACES
    for _, package, units, others in cells:
        up_to = re.search(r"layers 0 to (\d)", units)
        below = {unit for unit in layer if up_to and layer[unit] <= int(up_to[1])}
        namespace = {""} if "own namespace" in units else set()
        may_import = below | namespace | set(re.findall(r"`(\w+)`", units))
        allowed, third_parties = LAYERS[package]
        assert may_import - {package} == allowed - {package}, package
        assert (None if others == "any" else set(others.split(", "))) == third_parties, package


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_the_files_that_a_page_names_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:seqpar|csrc|tests|bench|examples|docs)/[\w./-]*)", text))
    assert named and not [path for path in named if not (ROOT / path).exists()]


def test_the_examples_of_the_glossary_are_true() -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"^```pycon\n(.*?)^```", glossary, re.MULTILINE | re.DOTALL))
    examples = doctest.DocTestParser().get_doctest(blocks, {}, "glossary", "docs/glossary.md", 0)
    told: list[str] = []
    result = doctest.DocTestRunner().run(examples, out=told.append)
    assert result.attempted and not result.failed, "".join(told)
