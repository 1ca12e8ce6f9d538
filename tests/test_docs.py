"""The programs and commands of docs/ run as they stand; those that train do so on two ranks as on one."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from seqpar.cli import calibrate, main
from seqpar.planner import Hardware
from tests.programs import Programs, lines, output

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
GUIDES = {  # each has a program that trains
    "batches", "diffusers", "dsp", "first-steps", "grpo", "inference", "lightning", "own-kernels", "peft", "pytorch",
    "recurrent", "trainer", "transformers", "trees", "trl",
}  # fmt: skip
# `make exhaustive` runs their programs, which take half a minute and more in all
LONG = {"batches", "dsp", "grpo", "lightning", "own-kernels", "peft", "pytorch", "recurrent", "trees", "trl"}
NEEDS = {"lightning": "lightning", "peft": "peft", "trl": "trl"}  # libraries that a page is about, which may be missing
PROGRAM = re.compile(r"^```python program\n(.*?)^```", re.MULTILINE | re.DOTALL)
# in one process, and what it prints if the page shows that
SCRIPT = re.compile(r"^```python script\n(.*?)^```(?:\n+```text output\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
MESHED = re.compile(r"^```python program of 4 ranks\n(.*?)^```", re.MULTILINE | re.DOTALL)
INSTALLING = ("python3 -m venv", "pip install")  # which tests/test_install.py does, without a network
SHOWN = re.compile(r"^```text\n(step 0 loss .*?)^```", re.MULTILINE | re.DOTALL)  # what a program that trains prints
CLOSE, ROUNDED = 1e-5, 1e-3  # of a loss; the latter where a page shows it


def losses(printed: str) -> list[tuple[int, float]]:
    """(step, loss) of every line ``step N loss X``."""
    return [(int(n), float(x)) for n, x in re.findall(r"^step (\d+) loss (\S+)$", printed, re.MULTILINE)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_guide_has_a_program(page: Path) -> None:
    assert bool(PROGRAM.findall(page.read_text())) == (page.stem in GUIDES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_page_has_code_that_is_not_run(page: Path) -> None:
    fences = set(re.findall(r"^```(python.*|sh|console)$", page.read_text(), re.MULTILINE))
    assert fences <= {"python program", "python program of 4 ranks", "python script"}


@pytest.mark.parametrize(
    ("page", "number"),
    [
        pytest.param(p, n, id=f"{p.stem}-{n}", marks=[pytest.mark.exhaustive] if p.stem in LONG else [])
        for p in PAGES
        for n in range(len(PROGRAM.findall(p.read_text())))
    ],
)
def test_its_program_trains_on_two_ranks_as_on_one(page: Path, number: int, programs: Programs, tmp_path: Path) -> None:
    if page.stem in NEEDS:
        pytest.importorskip(NEEDS[page.stem])
    text = page.read_text()
    one = check_trains_alike(PROGRAM.findall(text)[number], 2, programs, tmp_path)
    for shown in map(losses, SHOWN.findall(text) if not number else ()):  # of the first program
        assert shown == [(step, pytest.approx(loss, rel=ROUNDED)) for step, loss in one]


@pytest.mark.parametrize(
    ("page", "number"), [(page.stem, n) for page in PAGES for n in range(len(MESHED.findall(page.read_text())))]
)
@pytest.mark.exhaustive
def test_the_program_of_a_mesh_trains_on_four_ranks_as_on_one(
    page: str, number: int, programs: Programs, tmp_path: Path
) -> None:
    program = MESHED.findall((ROOT / "docs" / f"{page}.md").read_text())[number]
    check_trains_alike(program, 4, programs, tmp_path)
    if "checkpoint" in program:
        assert len(list((tmp_path / "4" / "checkpoint").glob("*.distcp"))) == 4


def check_trains_alike(program: str, ranks: int, programs: Programs, folder: Path) -> list[tuple[int, float]]:
    """Check that a program trains on so many ranks as on one, and return the losses on one."""
    script = folder / "program.py"
    script.write_text(program)
    one, two = (losses(programs.ranks(count, script, folder / str(count))[0]) for count in (1, ranks))
    assert len(one) >= 3 and [step for step, _ in one] == list(range(len(one)))
    assert len({loss for _, loss in one}) == len(one), "it trains"
    for (step, expected), (same_step, loss) in zip(one, two, strict=True):
        assert step == same_step and abs(loss - expected) <= CLOSE * abs(expected), (step, loss, expected)
    return one


SCRIPTS = {(page.stem, n): found for page in PAGES for n, found in enumerate(SCRIPT.findall(page.read_text()))}
SLOW = {("first-steps", 2), ("memory", 0), ("recurrent", 1), ("trainer", 1)}  # a second to ten each
SHOWING = [at for at, (_, shown) in SCRIPTS.items() if shown and at not in SLOW]


@pytest.mark.parametrize("at", SHOWING, ids=lambda at: f"{at[0]}-{at[1]}")
def test_its_scripts_print_what_it_shows(at: tuple[str, int], programs: Programs, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    text, shown = SCRIPTS[at]
    script.write_text(text)
    printed = programs.alone(script, tmp_path)
    assert not shown or printed == shown


@pytest.mark.parametrize("at", [at for at in SCRIPTS if at not in SHOWING], ids=lambda at: f"{at[0]}-{at[1]}")
@pytest.mark.sampled(8)
def test_its_scripts_run(at: tuple[str, int], programs: Programs, tmp_path: Path) -> None:
    test_its_scripts_print_what_it_shows(at, programs, tmp_path)


def blocks() -> list[str]:
    """The blocks of commands of all pages, without what installs."""
    every = (lines(block) for page in PAGES for block in COMMANDS.findall(page.read_text()))
    return ["\n".join(c for c in block if not c.startswith(INSTALLING)) for block in every]


@pytest.mark.parametrize("block", blocks(), ids=lambda block: block.partition("\n")[0])
@pytest.mark.sampled(3)
def test_its_commands_run(block: str, programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one folder, one after the other. test_calibrate.py measures; here a preset stands for what was measured."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setattr(calibrate, "measured", lambda *args, **options: Hardware.preset("cpu").to_dict())
    monkeypatch.setattr(calibrate, "show", lambda data: None)
    for command in block.splitlines():
        if command.startswith("seqpar "):
            assert main(shlex.split(command)[1:]) == 0
        else:
            assert output(command, programs, tmp_path).strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_its_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target
