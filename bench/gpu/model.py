"""Slice `model`: a training step of a transformers model on one rank, beside the same model before `parallelize`.

Layers are those of a small Qwen3, in bf16, with torch's attention before and `auto` after. ``ms`` counts the host too.
The ratio is the time of the model as it was over the time of the parallel one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import seqpar
from bench.gpu.calls import verdict
from bench.gpu.machine import Machine
from bench.gpu.rows import Case, Row
from bench.gpu.speed import rate
from bench.gpu.verb import STEP
from seqpar.testing import relative_rms

TOKENS, DOCUMENTS = 16384, 16
WITHOUT: Row = {"kernel": "auto", "mode": STEP, "skipped": "needs transformers"}
TOLERANCE = {"loss": 1e-3, "gradients": 5e-2}  # of two kernels' bf16, through all layers


def model(tiny: bool) -> list[Case]:
    """One document, and documents packed into one row, which `position_ids` tell apart."""
    tokens, documents = (32, 2) if tiny else (TOKENS, DOCUMENTS)
    return [
        Case("model", f"Qwen3, {tokens} tokens, {name}", partial(_timed, tiny, tokens, count))
        for name, count in (("one document", 1), (f"{documents} documents", documents))
    ]


class Turn:
    """A model's training step on one batch."""

    def __init__(self, module: nn.Module, batch: dict[str, Tensor]) -> None:
        self.module, self.batch = module, batch

    def __call__(self) -> Tensor:
        """The loss, after forward and backward."""
        self.module.zero_grad()
        loss = self.module(**self.batch, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def results(self) -> dict[str, Tensor]:
        """The loss and all gradients."""
        loss = self()
        return {"loss": loss, "gradients": torch.cat([p.grad.flatten() for p in self.module.parameters()])}


def turns(tiny: bool, tokens: int, documents: int, machine: Machine) -> dict[str, Turn]:
    """A step of the model as it was, and of the parallel one; none without transformers."""
    if find_spec("transformers") is None:
        return {}
    plain = _built(tiny).to(machine.device, torch.bfloat16)
    parallel = copy.deepcopy(plain)
    seqpar.parallelize(parallel, seqpar.LocalComm())
    ids = torch.randint(plain.config.vocab_size, (1, tokens), device=machine.device)
    positions = torch.arange(tokens // documents, device=machine.device).repeat(documents)[None]
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions}
    return {"plain": Turn(plain, batch), "parallel": Turn(parallel, batch)}


def _built(tiny: bool) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16}
    shape |= {"num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 8, "vocab_size": 32768}
    if tiny:
        shape |= {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
        shape |= {"head_dim": 8, "num_hidden_layers": 2, "vocab_size": 64}
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**shape, max_position_embeddings=TOKENS))


def _timed(tiny: bool, tokens: int, documents: int, machine: Machine) -> Iterator[Row]:
    runs = turns(tiny, tokens, documents, machine)
    if not runs:
        yield WITHOUT
        return
    found = {name: run.results() for name, run in runs.items()}
    errors = {name: relative_rms(found["parallel"][name], want) for name, want in found["plain"].items()}
    off = [said for name, error in errors.items() if (said := verdict({name: error}, TOLERANCE[name]))]
    if off:
        yield {"kernel": "auto", "mode": STEP, "ok": False, "refused": "; ".join(off), "errors": errors}
        return
    times, missing = machine.times(runs, ahead=False, seconds=3.0)
    yield from ({"kernel": name, "mode": STEP, **why} for name, why in missing.items())
    if not missing:
        row = rate(times["parallel"]) | {"gbps": None, "errors": errors, "baseline": "the model as it was"}
        yield {"kernel": "auto", "mode": STEP, **row, "plain_ms": times["plain"].ms,
               "ratio": times["plain"].ms / times["parallel"].ms}  # fmt: skip
