"""The rows that fit 2 GB on each rung of the ladder: forward and backward of a small Llama in fp32, in one process.

    python -m bench.planner.ladder            # 8 layers, vocabulary 32,000: minutes, and an hour with --check

For each number of rows a child of the process builds the model and runs it once; its memory is the most that is
resident: weights, gradients and activations. Rows are packed documents of 512 tokens, so that time grows with the rows
and not with their square; memory is that of one document. Peaks at two numbers of rows give a line, which gives the
rows. With --check both ends are run under a limit that is enforced: 3 % more than the rows of the first rung must not
run in 2 GB, and 20 times as many must run on the last.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import seqpar
import seqpar.integrations.transformers
from bench.lib.records import environment
from bench.planner.limited import restarted, run
from seqpar.train import linear_cross_entropy, recompute, tile

SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8, "num_attention_heads": 8}
DOCUMENT = 512
TILE, CHUNK = 1024, 256  # rows
MOST = 32_768  # rows that are run
GROWTH = 20
RUNGS = ("plain", "own loss", "keep attention", "recomputed", "tiled")


def model_on(rung: str, vocabulary: int) -> LlamaForCausalLM:
    """A new model whose layers are on one rung."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, vocab_size=vocabulary, num_key_value_heads=4, use_cache=False)
    model = LlamaForCausalLM._from_config(config, attn_implementation="seqpar")
    layers = [] if rung in ("plain", "own loss") else model.model.layers
    for layer in layers:
        for module in (layer.mlp, layer.input_layernorm, layer.post_attention_layernorm) if rung == "tiled" else ():
            tile(module, TILE)
        recompute(layer, save_attention=rung == "keep attention")
    if rung == "tiled":
        tile(model.model.norm, TILE)
    return model


def step(rung: str, rows: int, vocabulary: int = 32_000) -> None:
    """Forward and backward of a new model."""
    model, lengths = model_on(rung, vocabulary), [DOCUMENT] * (rows // DOCUMENT)
    plan = seqpar.Plan(seqpar.Mask(lengths), seqpar.Layout.contiguous(rows, 1))
    ids, positions = torch.randint(vocabulary, (1, rows)), torch.arange(DOCUMENT).repeat(len(lengths))[None]
    with seqpar.parallel(plan, seqpar.LocalComm()):
        hidden = model.model(input_ids=ids, position_ids=positions).last_hidden_state[0]
        loss(rung, hidden, model.lm_head, ids[0].roll(-1)).backward()


def loss(rung: str, hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    """torch's loss of all logits at once, or seqpar's of some rows at a time."""
    if rung == "plain":
        return F.cross_entropy(head(hidden).float(), labels)
    return linear_cross_entropy(hidden, head.weight, labels, valid=len(labels), chunk=CHUNK)


def most_rows(rung: str, limit: int) -> int:
    """Rows of a rung whose peak is the limit."""
    rows, peaks = [DOCUMENT, 2 * DOCUMENT], [0, 0]
    for _ in range(2):  # at a few rows the loss is the peak
        for at, count in enumerate(rows):
            ((peaks[at], _),) = run(lambda _, count=count: step(rung, count)) or []
        most = int(rows[0] + (limit - peaks[0]) * (rows[1] - rows[0]) / (peaks[1] - peaks[0]))
        rows = [max(1, min(most // part, MOST // part) // DOCUMENT) * DOCUMENT for part in (4, 2)]
    return most


def main() -> int:
    """Print the rows of every rung; 1 if those of the last are less than 20 times those of the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=float, default=2.0, help="GB (default: 2)")
    parser.add_argument("--check", action="store_true", help="run both ends under the limit")
    args = parser.parse_args()
    restarted("bench.planner.ladder")
    step("tiled", DOCUMENT, 64)  # what is loaded once
    print(environment()["machine"], flush=True)
    limit, first = int(args.memory * 1e9), 0
    for rung in RUNGS:
        rows = most_rows(rung, limit)
        first = first or rows
        print(f"{rung:16s} {rows:9,d} rows in {args.memory:g} GB, {rows / first:5.1f} times", flush=True)
    enough = rows >= GROWTH * first
    if args.check:
        more = -(-int(first * 1.03) // DOCUMENT) * DOCUMENT
        for rung, count in ((RUNGS[0], more), (RUNGS[-1], GROWTH * more)):
            ran = run(lambda _, rung=rung, count=count: step(rung, count), limit=limit) is not None
            print(f"{rung:16s} {count:9,d} rows {'run' if ran else 'do not run'} in {args.memory:g} GB", flush=True)
            enough &= ran == (rung != RUNGS[0])
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main())
