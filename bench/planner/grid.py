"""`fit` under a limit of memory that is enforced, compared with a grid of 24 configurations.

    python -m bench.planner.grid              # two processes, a Llama of 4 layers in fp32: minutes on two cores

Two ranks train under FSDP2 over gloo with AdamW. The grid has eight mixes of rungs, each with 1, 2 and 4 micro-batches.
A configuration runs under a limit if all steps of both ranks get the memory that they ask for (RLIMIT_DATA). Wherever
one of the grid runs, `fit` must find one that runs, and whose step takes at most 1.1 times that of the fastest of the
grid that runs: processor time of the slower rank, median of 5 steps. The machine's figures are those of `seqpar
calibrate`, or of the file that is given.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import seqpar
import seqpar.integrations.transformers
from bench.lib.records import environment
from bench.planner.limited import restarted, run
from seqpar.planner import Hardware, ModelShape, Training, fit, plan_step
from seqpar.planner.ladder import Mix
from seqpar.planner.shape import TILE
from seqpar.train import linear_cross_entropy, recompute, tile

RANKS, STEPS, SLOWER = 2, 5, 1.1
RESERVE = 5_000_000  # bytes of a rank that are no tensors: small blocks, code that runs for the first time
SHAPE = ModelShape("small", 128, 4, 4, 2, 32, 384, 1000, dtype="float32")
LENGTHS = [1024, 750, 1500, 512, 400, 1300, 1024, 950, 250, 482]
TRAINING = Training(weights="float32", shards=RANKS)
HALF = SHAPE.layers // 2
MIXES = [
    Mix(0, "none", "none", whole_logits=True),
    *(Mix(0, policy, policy) for policy in ("none", "keep-attention", "full", "tiled")),
    *(Mix(HALF, *pair) for pair in (("keep-attention", "none"), ("full", "keep-attention"), ("tiled", "full"))),
]
GRID = [(mix, parts) for mix in MIXES for parts in (1, 2, 4)]


class Ran(NamedTuple):
    """The peak of the rank that has most, and the median seconds of the slower rank."""

    peak: int
    seconds: float


def model_with(mix: Mix, shape: ModelShape = SHAPE) -> LlamaForCausalLM:
    """A new model under FSDP2, which takes ids, positions and the tokens of a step and returns its loss."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.ffn, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.dim, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM._from_config(config, attn_implementation="seqpar")
    for n, layer in enumerate(model.model.layers):
        policy = mix.first if n < mix.number else mix.rest
        if policy == "tiled":
            for module in (layer.mlp, layer.input_layernorm, layer.post_attention_layernorm):
                tile(module, TILE)
        if policy != "none":
            recompute(layer, save_attention=policy == "keep-attention")
        fully_shard(layer)
    if mix.rest == "tiled":
        tile(model.model.norm, TILE)

    def loss(ids: Tensor, positions: Tensor, tokens: int) -> Tensor:
        hidden, labels = model.model(input_ids=ids, position_ids=positions).last_hidden_state[0], ids[0].roll(-1)
        if mix.whole_logits:
            whole = torch.nn.functional.cross_entropy(model.lm_head(hidden), labels, reduction="sum")
            return whole * RANKS / tokens
        return linear_cross_entropy(hidden, model.lm_head.weight, labels, valid=tokens, average_over=RANKS)

    model.forward = loss
    return fully_shard(model)


def trained(
    mix: Mix, plans: list[seqpar.Plan], steps: int, comms: list[seqpar.Comm], rank: int, shape: ModelShape = SHAPE
) -> list[float]:
    """Processor seconds of steps on one rank."""
    model, comm = model_with(mix, shape), comms[0]
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tokens, seconds = sum(plan.mask.tokens for plan in plans), []
    for _ in range(steps):
        began = time.process_time()
        for plan in plans:
            ids = torch.randint(shape.vocab, (1, plan.layout.tokens(rank)))
            with seqpar.parallel(plan, comm):
                model(ids, torch.arange(ids.shape[1])[None], tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - began)
    return seconds


def outcome(mix: Mix, plans: list[seqpar.Plan], limit: int | None = None, *, steps: int = STEPS) -> Ran | None:
    """A configuration's peak and time; None if it does not run under the limit."""
    tiny = replace(SHAPE, layers=1, vocab=64)
    comms: list[seqpar.Comm] = []
    small = [seqpar.Plan(seqpar.Mask([64]), seqpar.Layout.zigzag([64], RANKS))]

    with tempfile.TemporaryDirectory() as folder:

        def ready(rank: int) -> None:
            dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
            comms.append(seqpar.GroupComm())  # its threads, and what is loaded once, are there before
            trained(MIXES[3], small, 1, comms, rank, tiny)

        rows = run(partial(trained, mix, plans, 1 + steps, comms), ready=ready, ranks=RANKS, limit=limit)
    if rows is None:
        return None
    return Ran(max(row.peak for row in rows), max(statistics.median(row.result[1:]) for row in rows))


def planned(machine: Hardware, **limits: int) -> list[seqpar.Plan]:
    """The plans of a step's micro-batches."""
    return [part.plan for part in plan_step(LENGTHS, RANKS, model=SHAPE, hardware=machine, **limits)]


def calibrated(folder: str) -> Hardware:
    """This machine."""
    path = Path(folder) / "hardware.json"
    words = ("-m", "seqpar", "calibrate", "--quick", "--device", "cpu", "--ranks", str(RANKS), "--out", str(path))
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    return Hardware.load(path)


def compared(machine: Hardware, limit: int, grid: list[tuple[Ran, Mix, int]]) -> bool:
    """Print the choice of `fit` under a limit beside the best of the grid, and say whether it is as good.

    grid: peaks and times without a limit.
    """
    best, name = None, "none of the grid runs"
    for rough, mix, parts in sorted(grid, key=lambda each: each[0].seconds):
        if rough.peak < limit * 1.1 and (best := outcome(mix, planned(machine, micro_batches=parts), limit)):
            name = f"{mix}, {parts} micro-batches: {best.seconds:.2f} s"
            break
    try:
        choice = fit(
            LENGTHS, RANKS, model=SHAPE, hardware=replace(machine, memory=limit, reserve=RESERVE), training=TRAINING
        ).choice
    except ValueError as error:
        print(f"{limit / 1e6:6.1f} MB: {error}; {name}", flush=True)
        return best is None
    shape = replace(SHAPE, recompute=choice.mix.planned)
    parts = plan_step(LENGTHS, RANKS, model=shape, hardware=machine, max_tokens_per_rank=choice.rows)
    ran = outcome(choice.mix, [part.plan for part in parts], limit)
    said = "does not run" if ran is None else f"{ran.seconds:.2f} s, {ran.peak / 1e6:.1f} MB"
    print(f"{limit / 1e6:6.1f} MB: fit: {choice.mix}, {len(parts)} micro-batches: {said}; grid: {name}", flush=True)
    return best is None or (ran is not None and ran.seconds <= SLOWER * best.seconds)


def main() -> int:
    """Compare under limits between the smallest and the largest peak of the grid; 1 if `fit` is worse under one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", type=Path, help="file of seqpar calibrate (default: measure)")
    parser.add_argument("--limits", type=int, default=5, help="how many (default: 5)")
    args = parser.parse_args()
    restarted("bench.planner.grid")
    print(environment()["machine"], flush=True)
    with tempfile.TemporaryDirectory() as folder:
        machine = Hardware.load(args.hardware) if args.hardware else calibrated(folder)
    grid = []
    for mix, parts in GRID:
        if (ran := outcome(mix, planned(machine, micro_batches=parts), steps=1)) is not None:
            grid.append((ran, mix, parts))
            logits = ", torch's loss" * mix.whole_logits
            print(f"{ran.peak / 1e6:6.1f} MB, {ran.seconds:5.2f} s: {mix}{logits}, {parts} micro-batches", flush=True)
    least, most = (1.02 * chosen(ran.peak for ran, _, _ in grid) for chosen in (min, max))
    limits = [int(least * (most / least) ** (n / max(1, args.limits - 1))) for n in range(args.limits)]
    return 0 if all([compared(machine, limit, grid) for limit in limits]) else 1


if __name__ == "__main__":
    sys.exit(main())
