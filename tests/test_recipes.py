"""Every recipe at its small size trains on two ranks as on one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention

from seqpar.planner import fit
from tests.programs import Programs

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.py"))
NEEDS = {"latte_dsp": "diffusers", "wan": "diffusers", "llama_trainer": "accelerate"}


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", printed, re.MULTILINE)]


@pytest.mark.parametrize("script", RECIPES, ids=lambda path: path.stem)
def test_its_losses_are_those_of_one_rank(script: Path, programs: Programs, tmp_path: Path) -> None:
    if script.stem in NEEDS:
        pytest.importorskip(NEEDS[script.stem])
    printed = [programs.ranks(n, script, tmp_path / str(n), "--small")[0] for n in (1, 2)]
    alone, shared = map(losses, printed)
    if script.stem == "deepseek_v2" and hasattr(DeepseekV2Attention, "expand_kv"):
        assert "2 layers (DeepseekV2Attention) exchange latents" in printed[1]
    assert len(alone) == len(set(alone)) == 3
    assert shared == pytest.approx(alone, rel=1e-4)


def test_llama_recomputes_what_fit_says() -> None:
    source = (ROOT / "examples" / "recipes" / "llama_loop.py").read_text()
    lengths = re.search(r"else \[(131_072[\d_, ]*)\]", source)
    assert lengths is not None
    tokens = [int(each.replace("_", "")) for each in lengths[1].split(",")]
    ladder = fit(tokens, 8)
    choice, loop = ladder.choice, "    recompute(layer, save_attention=True)\n"
    assert choice.ranks == 8 and choice.micro_batches == 1 and choice.mix.rest == "none"
    assert f"RECOMPUTED = 1 if SMALL else {choice.mix.number}  #" in source and loop in source
    assert f"    seqpar.train.{loop.strip()}" in ladder.lines
    told = " ".join(source.split())
    assert f"seqpar fit --lengths {','.join(map(str, tokens))} --ranks 8" in told
    assert " ".join(ladder.reasons.splitlines()[0].split()) in told


def test_the_page_lists_every_recipe() -> None:
    listed = re.findall(r"^\| `(\w+\.py)` \|", (ROOT / "docs" / "recipes.md").read_text(), re.MULTILINE)
    assert sorted(listed) == [path.name for path in RECIPES]
    for path in RECIPES:
        assert re.search(rf"^    torchrun .*examples/recipes/{path.name} --small", path.read_text(), re.MULTILINE)
