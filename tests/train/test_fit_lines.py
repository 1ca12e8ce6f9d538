"""The lines that `seqpar.planner.fit` prints run, and train as one process does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.programs import Programs

PROGRAM = """
import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import seqpar
from seqpar.planner import Hardware, ModelShape, Training, fit
from seqpar.planner.ladder import Mix

dist.init_process_group("gloo")
comm, ranks = seqpar.GroupComm(), dist.get_world_size()
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
lengths = [2500, 300]
ids = torch.randint(1, 64, (2, 2500), generator=torch.Generator().manual_seed(1))
ids[1, 300:] = 0
batch = {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}
if ranks == 1:
    loss = model(**batch).loss
else:
    shards, mix = int(sys.argv[1]), Mix(int(sys.argv[2]), *sys.argv[3:5], False, sys.argv[5] == "host")
    training = Training(weights="float32", shards=shards, host_bytes=10**9)
    shape = ModelShape.from_config(model.config)
    ladder = fit(lengths, ranks, model=shape, hardware="cpu", training=training, tolerance=0)
    ladder = replace(ladder, choice=replace(ladder.choice, ranks=ranks, mix=mix))
    exec(ladder.lines)
    assert sorted(sum((part.documents.tolist() for part in parts), [])) == [0, 1]
    mine = {name: x[comm.rank : comm.rank + 1] for name, x in batch.items()}
    loss = model(**mine).loss
loss.backward()
full = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
print("loss", loss.item(), "norm", torch.cat([g.flatten() for g in full]).norm().item())
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "mix",
    [("2", "1", "keep-attention", "none", ""), ("1", "2", "offload", "tiled", ""), ("2", "3", "full", "full", "")],
)
def test_the_printed_lines_train_as_one_process(mix: tuple[str, ...], programs: Programs, tmp_path: Path) -> None:
    script = tmp_path / "lines.py"
    script.write_text(PROGRAM)
    alone, shared = (programs.ranks(n, script, tmp_path / str(n), *mix)[0] for n in (1, 2))
    numbers = [[float(x) for x in re.findall(r"(?:loss|norm) (\S+)", said)] for said in (alone, shared)]
    assert len(numbers[0]) == 2 and numbers[1] == pytest.approx(numbers[0], rel=1e-4)
