"""CPU time of a training step on short batches: a parallel model beside the same model under DDP, in turns.

    python -m bench.cpu.short_batches
    python -m bench.cpu.short_batches --documents 4 --tokens 128 --ranks 2 --json bench/results/short_batches.json

Every rank brings so many documents of so many tokens, padded and of other lengths at every step unless --same. A pair
is a step of DDP and one of `seqpar.parallelize` with `sync_gradients`, in turn; of each the CPU time of all ranks.

With --same nothing is padded, and both compute the same rows. Without it a quarter of the rows are pads on average,
which DDP's model computes too and a parallel one leaves out: its step is cheaper then, and DDP's is not.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import seqpar
from bench.lib import records
from seqpar.train import sync_gradients


def build(hidden: int, layers: int) -> LlamaForCausalLM:
    """A small Llama with random weights."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1024, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
            num_attention_heads=hidden // 32, num_key_value_heads=max(1, hidden // 64),
        )
    )  # fmt: skip


def batch_of(step: int, rank: int, documents: int, tokens: int, same: bool) -> dict[str, Tensor]:
    """The batch that a rank brings to a step."""
    generator = torch.Generator().manual_seed(rank if same else 1000 * step + rank)
    ids = torch.randint(1, 1024, (documents, tokens), generator=generator)
    if same:
        return {"input_ids": ids, "labels": ids}
    kept = torch.arange(tokens) < torch.randint(tokens // 2, tokens + 1, (documents, 1), generator=generator)
    return {"input_ids": ids, "attention_mask": kept.long(), "labels": ids.masked_fill(~kept, -100)}


def spent(step: Any, ranks: int) -> float:
    """The processor time of a step in milliseconds, summed over all ranks."""
    dist.barrier()
    start = time.process_time()
    step()
    total = torch.tensor([time.process_time() - start])
    dist.all_reduce(total)
    return float(total) * 1e3


def run(rank: int, args: argparse.Namespace, port: int, results: Any) -> None:
    """Run the pairs of steps on one rank."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=args.ranks)
    model = build(args.hidden, args.layers)
    plain, parallel = DistributedDataParallel(copy.deepcopy(model)), copy.deepcopy(model)
    comm = seqpar.ShmComm() if args.comm == "shm" else seqpar.GroupComm()
    handle = seqpar.parallelize(parallel, comm)
    optimizers = [torch.optim.SGD(x.parameters(), lr=1e-3) for x in (plain, parallel)]

    def stepped(which: int, batch: dict[str, Tensor]) -> None:
        module: nn.Module = (plain, parallel)[which]
        optimizers[which].zero_grad()
        module(**batch).loss.backward()
        if which:
            sync_gradients(parallel.parameters(), comm)
        optimizers[which].step()

    pairs = []
    for step in range(args.steps + 3):
        batch = batch_of(step, rank, args.documents, args.tokens, args.same)
        pair = [spent(lambda which=which, batch=batch: stepped(which, batch), args.ranks) for which in (0, 1)]
        if step >= 3:  # first steps also pay for set-up
            pairs.append(pair)
    if args.profile and rank == 0:
        import cProfile
        import pstats

        profile = cProfile.Profile()
    for step in range(20 if args.profile else 0):
        batch = batch_of(100 + step, rank, args.documents, args.tokens, args.same)
        if rank == 0:
            profile.runcall(stepped, 1, batch)
        else:
            stepped(1, batch)
    if args.profile and rank == 0:
        pstats.Stats(profile).sort_stats("cumulative").print_stats(70)
    handle.undo()
    if rank == 0:
        results.put(pairs)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--documents", type=int, default=4, help="of a rank's batch")
    parser.add_argument("--tokens", type=int, default=128, help="of a document")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--comm", choices=("gloo", "shm"), default="gloo", help="of the parallel model; DDP has gloo")
    parser.add_argument("--same", action="store_true", help="documents of the same lengths at every step")
    parser.add_argument("--profile", action="store_true", help="then 20 steps of the parallel model on rank 0")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    context = mp.get_context("spawn")
    results = context.Queue()
    ranks = mp.spawn(run, (args, 29500 + os.getpid() % 2000, results), nprocs=args.ranks, join=False)
    while not ranks.join():  # raises the error of a rank
        pass
    pairs = results.get(timeout=60)
    ddp, parallel = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    part = statistics.median(pair[1] / pair[0] for pair in pairs)
    Console().print(
        f"{args.ranks} ranks, {args.documents} documents of {args.tokens} tokens each, {len(pairs)} pairs: "
        f"DDP {ddp:.1f} ms, parallelize {parallel:.1f} ms of processor time, median quotient {part:.2f}"
    )
    if args.json:
        given = ("ranks", "comm", "documents", "tokens", "hidden", "layers", "same")
        row = {name: getattr(args, name) for name in given}
        row |= {"pairs": len(pairs), "ddp_ms": round(ddp, 2), "parallel_ms": round(parallel, 2), "part": round(part, 3)}
        rows = json.loads(args.json.read_text())["rows"] if args.json.exists() else []
        records.write(args.json, {"rows": [*rows, records.environment() | row]})


if __name__ == "__main__":
    main()
