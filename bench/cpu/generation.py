"""Generation with a cache that is split over ranks, compared with one process: the kernel, decode and prefill.

    python -m bench.cpu.generation --json bench/results/generation.json      # a few minutes on two cores
    python -m bench.cpu.generation --cached 2048 --prompt 512 --steps 4 --turns 1 --hidden 64 --mlp 128    # a rehearsal

A Llama of 4 layers of 32 query and 8 key heads of 128 in float32. --hidden and --mlp are the sizes around its
attention: every rank reads those weights for every token, so larger ones leave less to split.

    kernel     one query on --cached keys, one thread: processor time over that of torch's scaled_dot_product_attention
               with enable_gqa=True. Torch gets the keys of a head side by side, as a transformers cache has them. In
               float32; bf16 is shown too
    decode     tokens a second after --cached ones, over `ShmComm`: two processes of one thread over one of two threads.
               Also shown is the same model with transformers' own cache, in one process of two threads
    prefill    seconds to the first token after --prompt, over `ShmComm`: two processes over one, of one thread each

Sides take turns. Seconds of decode and prefill are the slowest rank's, by the clock; its processor time, of all its
threads, is in brackets. Ratios are of the medians over turns. The cached tokens of decode are drawn, not computed, and
lie as a prompt in contiguous shares leaves them. Exit code 1 if a ratio misses its bound: at most 0.6 (kernel), at
least 0.8 (decode), at most 0.7 (prefill).
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import seqpar
from bench.lib import records
from seqpar import Comm, Layout, Mask, Plan
from seqpar.facts.past import Past
from seqpar.integrations.hf.cache import CacheStep, ShardedCache
from seqpar.integrations.hf.recurrent.states import MixerStates
from seqpar.ops.attention.merging import part_of
from seqpar.testing import run_processes

LAYERS, HEADS, KV_HEADS, DIM, VOCABULARY = 4, 32, 8, 128, 512
BOUNDS = {"kernel": (0.0, 0.6), "decode": (0.8, math.inf), "prefill": (0.0, 0.7)}
Seconds = tuple[float, float]  # by the clock, and of the processor


def model_of(hidden: int, mlp: int) -> LlamaForCausalLM:
    """The model, with the same weights in every process."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=LAYERS, head_dim=DIM,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=1 << 20, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def timed(call: Callable[[], object]) -> Seconds:
    """Seconds of a call on this rank."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def kernel(cached: int, turns: int, dtype: torch.dtype) -> dict[str, float]:
    """Processor seconds of one query on cached keys, with our kernel and with torch's."""
    torch.set_num_threads(1)
    group = HEADS // KV_HEADS
    q = torch.randn(HEADS, DIM).to(dtype)
    k, v = (torch.randn(KV_HEADS, cached, DIM).to(dtype) for _ in range(2))
    mask = Mask.from_bounds([0] * group, [cached] * group, kv_tokens=cached)
    plan = Plan(mask, Layout.contiguous(group, 1), kv_layout=Layout.contiguous(cached, 1))
    rows = q.view(KV_HEADS, group, DIM).transpose(0, 1)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (k, v)]
    fused = torch.nn.functional.scaled_dot_product_attention

    def torchs(keys: Tensor, values: Tensor) -> Tensor:
        return fused(q[None, :, None], keys[None], values[None], enable_gqa=True)

    def ours() -> Tensor:
        return part_of(rows, k.transpose(0, 1), v.transpose(0, 1), plan)[0]

    sides = {"seqpar": ours, "torch": lambda: torchs(k, v), "torch, rows a page apart": lambda: torchs(*strided)}
    found, expected = ours().transpose(0, 1).reshape(HEADS, DIM), torchs(k, v)[0, :, 0].float()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 if dtype == torch.float32 else 1e-2)
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(4 * turns + 1):
        for name, call in sides.items():
            taken[name].append(timed(call)[1])
    return {name: statistics.median(seconds[1:]) for name, seconds in taken.items()}


def fill(cache: ShardedCache, tokens: int) -> None:
    """Keep drawn keys of so many tokens, as a prompt in contiguous shares would."""
    comm = cache.comm
    before = Past(1, comm.size)
    after = before.after([tokens], layout := Layout.contiguous(tokens, comm.size))
    own = layout.positions(comm.rank)
    rows = np.arange(own.size)
    states = MixerStates(cache.states, np.ones((1, tokens), bool), None, cache.alone)
    facts = comm.rank, own, rows, np.array([tokens]), None, torch.device("cpu")
    cache.begin(CacheStep.of(after, states, before, *facts))
    keys = torch.randn(1, KV_HEADS, own.size, DIM)
    for layer in range(LAYERS):
        cache.update(keys, keys, layer)
    cache.commit(tokens)
    cache.step = None


def decode(comm: Comm, threads: int, cached: int, steps: int, split: bool, sizes: tuple[int, int]) -> Seconds:
    """Seconds of a new token after cached ones, with a split cache or with transformers' own."""
    torch.set_num_threads(threads)
    model = model_of(*sizes)
    ids = torch.randint(1, VOCABULARY, (1, cached + 1), generator=torch.Generator().manual_seed(0))
    if split:
        cache: Any = seqpar.parallelize(model, comm).cache()
        fill(cache, cached)
    else:
        cache = DynamicCache()
        for layer in range(LAYERS):
            keys = torch.randn(1, KV_HEADS, cached, DIM)
            cache.update(keys, keys, layer)
    how: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "cache": cache}
    ids = model.generate(ids, max_new_tokens=2, **how)
    wall, cpu = timed(lambda: model.generate(ids, max_new_tokens=steps, min_new_tokens=steps, **how))
    return wall / steps, cpu / steps


def prefill(comm: Comm, threads: int, prompt: int, sizes: tuple[int, int]) -> Seconds:
    """Seconds of the first token after a prompt."""
    torch.set_num_threads(threads)
    model = model_of(*sizes)
    ids = torch.randint(1, VOCABULARY, (1, prompt), generator=torch.Generator().manual_seed(0))
    how: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 1}
    handle = seqpar.parallelize(model, comm)
    model.generate(ids[:, :64], cache=handle.cache(), **how)
    return timed(lambda: model.generate(ids, cache=handle.cache(), **how))


def slowest(found: list[Seconds]) -> Seconds:
    """The most of any rank."""
    wall, cpu = zip(*found, strict=True)
    return max(wall), max(cpu)


def measured(sides: dict[str, Callable[[], list[Seconds]]], turns: int, console: Console) -> dict[str, Seconds]:
    """The medians of each side's seconds over turns, printed as they come."""
    found: dict[str, list[Seconds]] = {name: [] for name in sides}
    for _ in range(turns):
        for name, run in sides.items():
            found[name].append(slowest(run()))
            wall, cpu = found[name][-1]
            console.print(f"  {name}: {wall:.3f} s ({cpu:.3f})")
    return {
        name: (statistics.median(wall for wall, _ in turn), statistics.median(cpu for _, cpu in turn))
        for name, turn in found.items()
    }


def main() -> int:
    """Measure the three ratios, print them and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cached", type=int, default=65_536, help="tokens before decode")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of prefill")
    parser.add_argument("--steps", type=int, default=16, help="new tokens of a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the model")
    parser.add_argument("--mlp", type=int, default=512, help="size inside its MLPs")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    console, sizes = Console(), (args.hidden, args.mlp)

    def run(ranks: int, call: Callable[..., Seconds], *given: Any) -> Callable[[], list[Seconds]]:
        return partial(run_processes, ranks, call, *given, sizes, comm="shm", timeout=600.0)

    console.print(environment := records.environment())
    seconds: dict[str, Any] = {"kernel": kernel(args.cached, args.turns, torch.float32)}
    seconds["kernel in bf16"] = kernel(args.cached, args.turns, torch.bfloat16)
    console.print(seconds)
    for name, sides in {
        "decode": {
            "1 process of 2 threads": run(1, decode, 2, args.cached, args.steps, True),
            "2 processes of 1 thread": run(2, decode, 1, args.cached, args.steps, True),
            "transformers' cache": run(1, decode, 2, args.cached, args.steps, False),
        },
        "prefill": {
            "1 process of 1 thread": run(1, prefill, 1, args.prompt),
            "2 processes of 1 thread": run(2, prefill, 1, args.prompt),
        },
    }.items():
        console.print(name)
        seconds[name] = measured(sides, args.turns, console)
    own, fused = seconds["kernel"]["seqpar"], seconds["kernel"]["torch"]
    one, two, _ = (wall for wall, _ in seconds["decode"].values())
    alone, shared = (wall for wall, _ in seconds["prefill"].values())
    ratios = {"kernel": own / fused, "decode": one / two, "prefill": shared / alone}
    wrong = False
    for name, ratio in ratios.items():
        low, high = BOUNDS[name]
        wrong |= not low <= ratio <= high
        console.print(f"{name}: {ratio:.2f}, " + (f"at least {low}" if low else f"at most {high}"))
    if args.json:
        given = {name: x for name, x in vars(args).items() if name != "json"}
        records.write(args.json, environment | given | {"seconds": seconds, "ratios": ratios})
        console.print(f"written to {args.json}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
