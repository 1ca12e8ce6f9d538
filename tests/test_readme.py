"""The README is true: its commands and code run, and so is the table of `docs/choose.md` of what works with what."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from seqpar import plan_batch
from seqpar.kernels import KERNELS, VENDORS
from seqpar.kernels.protocol import DTYPES
from seqpar.plan import TRANSPORTS
from seqpar.plan.counts import load_of
from tests.cases import LAYOUTS, MASKS
from tests.ops.cases import HEADS, Options, product
from tests.programs import Programs, lines, output

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CHOOSE = (ROOT / "docs" / "choose.md").read_text()
RESULTS = (ROOT / "docs" / "results.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS = [command for kind, text in BLOCKS if kind == "bash" for command in lines(text)]
PYTHON = [text for kind, text in BLOCKS if kind == "python"]


def test_it_is_short_and_begins_with_the_lines_that_people_come_for() -> None:
    lines = README.splitlines()
    assert len(lines) <= 120
    begins, ends = [at for at, line in enumerate(lines) if line.startswith("```")][:2]
    assert begins < 12 and ends - begins - 1 <= 12
    assert any("It has not yet been run on more than one GPU" in line for line in lines[:40])


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command: str, programs: Programs, tmp_path: Path) -> None:
    """Of make: what it would run. Another test runs the demo."""
    assert output(command, programs, tmp_path).strip()


def test_its_program_gives_the_loss_and_gradients_of_one_process(programs: Programs, tmp_path: Path) -> None:
    (program,) = PYTHON
    model = LlamaForCausalLM(LlamaConfig(vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                         num_attention_heads=4, num_key_value_heads=2))  # fmt: skip
    model.save_pretrained(tmp_path / "MODEL")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "MODEL")
    tokens = torch.arange(3000)[None] % 100
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    script = tmp_path / "train.py"
    show = "print(loss.item(), *(p.grad.norm().item() for p in model.parameters()))"
    script.write_text(f"{program}{show}\ntorch.distributed.destroy_process_group()\n")
    expected = [loss.item(), *(p.grad.norm().item() for p in model.parameters())]
    for printed in programs.ranks(2, script, tmp_path):
        assert [float(x) for x in printed.split()] == pytest.approx(expected, rel=1e-4)


def test_its_picture_is_of_the_plan_that_it_describes() -> None:
    lengths = [40_000, 12_000, 9_000, 6_000] + [500 + 137 * n % 3000 for n in range(20)]
    plan = plan_batch(lengths, 4)
    said = " ".join(README.split())
    assert f"{len(lengths)} documents, {sum(lengths):,} tokens, on 4 ranks" in said
    assert plan.degrees[:4].tolist() == [4, 2, 2, 2] and (plan.degrees == 1).sum() > 12
    load = load_of(plan)
    assert load.rows.max() - load.rows.min() <= 1
    assert f"the same work within {100 * (load.area.max() / load.area.mean() - 1):.1f} %" in said


def cells(row: str) -> str:
    """The values of a row of the table of what works with what."""
    found = re.search(rf"^\| {re.escape(row)} \| (.*) \|$", CHOOSE, re.MULTILINE)
    assert found, f"docs/choose.md has no row {row!r}"
    return found[1]


def test_table_says_what_the_product_of_tests_covers() -> None:
    points = product()
    assert cells("masks") == ", ".join(MASKS)
    assert cells("layouts") == ", ".join(LAYOUTS)
    assert cells("transports") == ", ".join(TRANSPORTS)
    assert cells("query / key heads tested") == ", ".join(f"{h}/{kv}" for h, kv in HEADS)
    assert cells("ranks tested") == ", ".join(str(r) for r in sorted({case.ranks for case, _ in points}))
    assert {(c.mask, c.layout, c.transport, h) for c, h in points} == {
        (m, la, t, h) for m in MASKS for la in LAYOUTS for t in TRANSPORTS for h in HEADS
    }
    assert cells("options") == ", ".join(f.name for f in fields(Options) if f.name != "kernel")
    assert cells("dtypes") == ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
    assert cells("kernels") == ", ".join(k.name for k in KERNELS)
    assert cells("kernels of other libraries") == ", ".join(k.name for k in VENDORS)


def test_every_result_has_a_command_that_exists(programs: Programs) -> None:
    rows = re.findall(r"^\| .* \| (.*) \| `(.*)` \|$", README.split("## Results")[1], re.MULTILINE)
    assert rows
    several = re.findall(r"^\| .* \| .* \| `(.*)` \| .* \| .* \| .* \|$", RESULTS, re.MULTILINE)
    assert len(several) > 20
    for command in [*several, *(command for _, command in rows)]:
        words = shlex.split(command)
        if words[0] == "make":
            assert output(command, programs, ROOT)
        else:
            files = [ROOT / word for word in words] + [
                (ROOT / word.replace(".", "/")).with_suffix(".py") for word in words
            ]
            assert any(path.is_file() for path in files), command


def test_every_figure_is_one_of_the_page_of_results() -> None:
    """Whose figures are those of records: see test_pages.py."""
    rows = re.findall(r"^\| .* \| (.*) \| `(.*)` \|$", README.split("## Results")[1], re.MULTILINE)
    for figure, command in rows:
        (row, *more) = [line for line in RESULTS.splitlines() if f"| `{command}` |" in line]
        for number in re.findall(r"[\d.,]*\d", figure):
            assert any(number in line for line in (row, *more)), (number, command)


def test_every_extra_is_named() -> None:
    section = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", section, re.MULTILINE)) - {"all", "dev", "docs", "test"}
    assert len(extras) > 5
    for extra in extras:
        assert re.search(rf"`{extra}`|\[[\w,]*\b{extra}\b[\w,]*\]'", README), extra


def test_every_picture_and_link_exists() -> None:
    targets = [t for t in re.findall(r"\]\(([^)]+)\)", README) if "://" not in t]
    assert targets
    for target in targets:
        assert (ROOT / target.partition("#")[0]).exists(), target
