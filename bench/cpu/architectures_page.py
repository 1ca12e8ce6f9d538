"""The page `docs/architectures.md`, made of the record of `bench.cpu.architectures`."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

HEAD = """\
# Architectures of transformers

{total} cases of transformers {transformers}, tiny and with random weights, were trained for one step on {ranks} ranks
by both documented methods, in fp64 and in fp32. They are {kinds} of its {model_types} model types and {variants}
variants of these: other heads, positions, rotary embeddings and losses. By `seqpar.parallelize(model, comm)` {parallel}
cases are exact, {packed}and {refused} are refused by name, before anything is sent. None is silently wrong.

*Exact* means that loss and gradients match a single-process run within {float64:g} in fp64 and {float32:g} in fp32,
relative to the loss and to the model's largest gradient. A model with larger rounding errors in fp32 on one process
must be as close to fp64 on {ranks} ranks as on one.

Two methods were tested:

- *parallelized*: `seqpar.parallelize(model, comm)`, with padded and with packed batches, documents split over ranks.
- *registered*: `attn_implementation="seqpar"` and [your own rows](transformers.md#your-own-rows). It does not apply to
  models for which transformers does not offer it, nor to encoder-decoders, vision, audio and classifiers of sequences,
  which do not have one row per token.

The lists below name the model types. *Refused* means by both methods, or by the first where the second does not apply.

Not tested:

- **Sound, and images by the other method.** Vision-language models got images on one of the ranks with `parallelize`,
  and text alone when registered, because that method takes rows of tokens.
- **Large models.** Each model has few layers, 32 features and fewer than 30 tokens, on {ranks} ranks on a CPU; other
  tests vary ranks, lengths and masks. Pretrained weights, bf16 and GPUs were not tested here.
- **The other model types.** `parallelize` checks them in the same way, by config, by modules and by a trial on a few
  tokens, and accepts them or refuses them by name; their gradients have not been compared with a single-process run.

The figures are in `bench/results/architectures.json`, made with torch {torch}. `python -m bench.cpu.architectures` runs
all cases again and rewrites this page; `python -m bench.cpu.architectures llama lfm2` runs some.
"""
NAMES = {
    "dense": "Dense decoders",
    "experts": "Mixtures of experts",
    "encoder": "Encoders, and heads for tokens or sequences",
    "hybrid": "Hybrids with recurrent, state space or convolutional layers",
    "vision-language": "Vision-language models",
    "encoder-decoder": "Encoder-decoders",
    "vision": "Vision",
    "audio": "Audio",
}
WORDS = {
    "exact": "exact",
    "packed": "exact for packed batches only",
    "whole runs": "exact for layouts of consecutive rows only",
    "refused": "refused",
    "-": "not offered",
}


def page(record: Mapping[str, Any]) -> str:
    """The text of the page for a record."""
    rows = record["rows"]
    said = [_parallel(row["float64"]) for row in rows.values()]
    kinds = len({row["kind"] for row in rows.values()})
    packed = f"{said.count('packed')} more are exact with packed batches, " if "packed" in said else ""
    text = HEAD.format(
        total=len(rows), kinds=kinds, variants=len(rows) - kinds, model_types=record["model_types"],
        parallel=said.count("exact"), packed=packed, refused=said.count("refused"),
        ranks=record["ranks"], **record["versions"], **record["tolerance"],
    )  # fmt: skip
    for group in dict.fromkeys(row["group"] for row in rows.values()):
        text += f"\n## {NAMES[group]}\n"
        by_outcome: dict[str, list[str]] = {}
        for name, row in rows.items():
            if row["group"] == group:
                by_outcome.setdefault(_outcome(row["float64"]), []).append(name)
        for outcome, names in sorted(by_outcome.items(), key=lambda each: each[0].startswith("Refused")):
            text += "\n" + textwrap.fill(f"**{outcome}:** {', '.join(names)}.", 120, break_on_hyphens=False) + "\n"
    return text


def _outcome(said: Mapping[str, str]) -> str:
    """The result of both methods for a model, in words."""
    parallel, registered = _parallel(said), _laid_out(said, "registered")
    if parallel == "refused":
        also = "" if registered in ("refused", "-") else f"; {WORDS[registered]} when registered"
        return f"Refused ({_why(said['padded'])}{also})"
    if parallel == registered:
        return f"{WORDS[parallel].capitalize()} by both methods"
    return f"{WORDS[parallel].capitalize()} when parallelized, {WORDS[registered]} when registered"


def _parallel(said: Mapping[str, str]) -> str:
    both = _kind(said["padded"]), _kind(said.get("packed", said["padded"]))
    return both[0] if both[0] == both[1] else "packed"


def _laid_out(said: Mapping[str, str], way: str) -> str:
    whole, jumping = _kind(said.get(way)), _kind(said.get(f"{way} zigzag"))
    return whole if whole == jumping else "whole runs"


def _kind(said: str | None) -> str:
    return "-" if said is None or said.startswith("unknown") else said.partition(":")[0]


def _why(said: str) -> str:
    """The reason of a refusal, without the model's class before it and the remedy after it."""
    if not said.startswith("refused: "):
        return ""
    reason = said.removeprefix("refused: ").split("several ranks: ")[-1].partition("; ")[0]
    model, counts, rest = reason.partition(" counts ")
    return f"it counts {rest}" if counts else model
