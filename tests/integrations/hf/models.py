"""Tiny random transformers models, batches of every kind, and what one process makes of them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import seqpar
from seqpar import Comm, Layout, Mask, Plan

VOCABULARY = 61
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
BOTH = ["sliding_attention", "full_attention"]


class Case(NamedTuple):
    """A model class and its config. causal: whether labels are those of the next token."""

    model: str
    config: dict[str, Any]
    causal: bool = True


CASES = {
    "llama": Case("Llama", {}),
    "qwen3": Case("Qwen3", {}),
    "mistral": Case("Mistral", {"sliding_window": 5}),
    "gemma3": Case("Gemma3", {"sliding_window": 4, "layer_types": BOTH, "query_pre_attn_scalar": 8}),
    "gpt-oss": Case(
        "GptOss",
        {"sliding_window": 4, "layer_types": BOTH, "num_local_experts": 4, "num_experts_per_tok": 2,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "bert": Case(
        "Bert",
        {"num_key_value_heads": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "head_dim": None},
        causal=False,
    ),
}  # fmt: skip


_building = threading.Lock()  # the generator is one for all threads, and ranks are to draw the same weights


def build(name: str, **more: Any) -> transformers.PreTrainedModel:
    """The model of a case, in training, with the attention that is written out. The same whenever it is called."""
    with _building:
        return _build(name, **more)


def _build(name: str, **more: Any) -> transformers.PreTrainedModel:
    case = CASES[name]
    kind = case.model + ("Text" if case.model == "Gemma3" else "")
    sizes = {key: value for key, value in (SIZES | case.config | more).items() if value is not None or key in SIZES}
    config = getattr(transformers, f"{kind}Config")(**{k: v for k, v in sizes.items() if k != "head_dim" or v})
    torch.manual_seed(7)
    model = getattr(transformers, case.model + ("ForCausalLM" if case.causal else "ForMaskedLM"))._from_config(
        config, attn_implementation="eager"
    )
    # what transformers draws is so small that attention hardly matters, sinks are not drawn and biases are zeros
    for parameter_name, parameter in model.named_parameters():
        norm = "norm" in parameter_name.lower() and parameter_name.endswith("weight")
        torch.nn.init.normal_(parameter, 1.0 if norm and case.model != "Gemma3" else 0.0, 0.2)
    return model.train()


def drawn(kind: Any, config: transformers.PreTrainedConfig) -> Any:
    """A model of a class in training, with weights at which everything matters."""
    torch.manual_seed(3)
    model = kind._from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model.train()


def _ids(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=generator)


def padded(generator: torch.Generator, lengths: list[int], *, left: bool) -> dict[str, Tensor]:
    """Rows of these lengths, padded on one side; pads, and the first label after pads on the left, do not count."""
    width = max(lengths)
    ids = _ids(generator, len(lengths), width)
    column, size = torch.arange(width), torch.tensor(lengths)[:, None]
    keep = column >= width - size if left else column < size
    labels = ids.masked_fill(~keep, -100)
    labels[~keep.roll(1, 1) & (column > 0)] = -100
    return {"input_ids": ids * keep, "attention_mask": keep.long(), "labels": labels}


def packed(generator: torch.Generator, lengths: list[int], *, cu: bool = False) -> dict[str, Tensor]:
    """One row of documents, whose first labels do not count."""
    ids = _ids(generator, 1, sum(lengths))
    at = torch.cat([torch.arange(n) for n in lengths])
    batch = {"input_ids": ids, "labels": ids.masked_fill(at == 0, -100)}
    if cu:
        starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
        return batch | {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
    return batch | {"position_ids": at[None]}


def holes(generator: torch.Generator, width: int) -> dict[str, Tensor]:
    """A row of which some tokens in the middle are masked out."""
    ids = _ids(generator, 1, width)
    keep = torch.ones_like(ids).bool()
    keep[:, 4:6] = keep[:, 9:10] = False
    labels = ids.masked_fill(~keep | ~keep.roll(1, 1), -100)
    return {"input_ids": ids, "attention_mask": keep.long(), "labels": labels}


def batches(kind: str, ranks: int) -> list[dict[str, Tensor]]:
    """What each rank's loader brings."""
    generators = [torch.Generator().manual_seed(100 + rank) for rank in range(ranks)]
    found = []
    for rank, g in enumerate(generators):
        if kind in ("left", "right"):
            found.append(padded(g, [9 + rank, 4, 12], left=kind == "left"))
        elif kind == "packed":
            found.append(packed(g, [7, 3 + rank, 11]))
        elif kind == "cu":
            found.append(packed(g, [5 + rank, 9], cu=True))
        elif kind == "long":
            found.append(padded(g, [37 if rank == 0 else 2], left=False))
        else:  # the first rank brings a row with holes, the last one nothing but pads
            found.append(
                holes(g, 17) if rank == 0 else padded(g, [8, 14] if rank < ranks - 1 else [0, 0, 1], left=rank % 2 == 0)
            )
    if kind == "mixed":
        found[-1]["labels"][:] = -100
    return found


Planner = Callable[[np.ndarray[Any, Any], int], Plan]


def _ring(lengths: Any, ranks: int) -> Plan:
    return Plan(Mask(lengths), Layout.zigzag(lengths, ranks), transport="ring")


def _ulysses(lengths: Any, ranks: int) -> Plan:
    return Plan(Mask(lengths), Layout.contiguous(sum(lengths), ranks), ulysses=ranks)


def _two(lengths: Any, ranks: int) -> Plan:
    width = 2 if ranks % 2 == 0 else ranks
    return Plan(Mask(lengths), Layout.striped(sum(lengths), ranks), ulysses=width, transport="ring")


def _empty(lengths: Any, ranks: int) -> Plan:
    """The last rank computes nothing: its only row is a pad."""
    tokens = int(sum(lengths))
    shards = np.array_split(np.arange(tokens), ranks - 1)
    return Plan(Mask(lengths), Layout([*shards, np.zeros(0, np.int64)]))


PLANS: dict[str, Planner | None] = {"planner": None, "ring": _ring, "ulysses": _ulysses, "2-D": _two, "empty": _empty}


class Whole(NamedTuple):
    """What one process makes of all ranks' batches: the loss, logits where tokens are, and gradients by name."""

    loss: Tensor
    logits: list[Tensor]
    grads: dict[str, Tensor]


def documents(batch: dict[str, Tensor]) -> list[tuple[int, slice]]:
    """Rows and columns of the documents of a packed batch."""
    if "cu_seq_lens_q" in batch:
        ends = batch["cu_seq_lens_q"].tolist()
    else:
        ends = [*torch.where(batch["position_ids"][0] == 0)[0].tolist(), batch["input_ids"].shape[1]]
    return [(0, slice(a, b)) for a, b in zip(ends, ends[1:])]


def logits_of(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Logits of one process: packed documents one by one, padded rows as transformers computes them."""
    ids = batch["input_ids"]
    if "attention_mask" in batch:
        return model(input_ids=ids, attention_mask=batch["attention_mask"]).logits
    parts = []
    for row, columns in documents(batch):
        at = torch.arange(columns.stop - columns.start)[None]
        parts.append(model(input_ids=ids[row : row + 1, columns], position_ids=at).logits)
    return torch.cat(parts, 1)


def one_process(model: torch.nn.Module, every: list[dict[str, Tensor]], causal: bool) -> Whole:
    """The reference, with gradients taken from the model, which is left without."""
    total, valid, logits = torch.zeros(()), 0, []
    for batch in every:
        out, labels = logits_of(model, batch), batch["labels"]
        logits.append(out.detach())
        if causal:
            out, labels = out[:, :-1], labels[:, 1:]
        wide = out if out.dtype == torch.float64 else out.float()
        total = total + F.cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="sum")
        valid += int((labels != -100).sum())
    loss = total / valid
    loss.backward()
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return Whole(loss.detach(), logits, grads)


def kept(batch: dict[str, Tensor]) -> Tensor:
    """Which places of a batch are tokens."""
    return batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()


def on_ranks(
    comm: Comm, model: torch.nn.Module, every: list[dict[str, Tensor]], options: dict[str, Any] | None = None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """What a rank gets with a copy of the model: the loss, logits of its own batch, and its part of the gradients."""
    own = copy.deepcopy(model)
    batch = every[comm.rank]
    with seqpar.parallelize(own, comm, **options or {}):
        loss = own(**batch).loss
        loss.backward()
        own.eval()
        with torch.no_grad():
            logits = own(**{name: x for name, x in batch.items() if name != "labels"}).logits
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in own.named_parameters()}
    return loss.detach(), logits, grads


def largest(grads: dict[str, Tensor]) -> float:
    """The largest element of all tensors."""
    return max(float(g.abs().max()) for g in grads.values())


def check(found: list[Any], expected: Whole, every: list[dict[str, Tensor]], tolerance: float = 1e-5) -> None:
    """Losses on every rank, logits at every token, and sums of gradients are those of one process.

    Relative to a tensor's largest element; a gradient below 1e-6 of the model's largest is a zero but for rounding, as
    that of a bias of keys, and is judged against that.
    """
    for (loss, logits, _), batch, whole in zip(found, every, expected.logits, strict=True):
        assert abs(float(loss) - float(expected.loss)) <= 1e-6 * abs(float(expected.loss))
        at = kept(batch)
        if at.any():
            worst = (logits[at] - whole[at]).abs().max()
            assert float(worst) <= tolerance * float(whole[at].abs().max())
        assert not logits[~at].any()
    total = {name: torch.stack([grads[name] for _, _, grads in found]).sum(0) for name in expected.grads}
    error, name = beyond(total, expected.grads)
    assert error <= tolerance, f"{name}: {error}"


def beyond(grads: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest error of a gradient, relative to its tensor's largest element, and that tensor's name.

    A gradient below 1e-6 of the model's largest is a zero but for rounding, as that of a bias of keys: its error must
    be below that, and counts for nothing else.
    """
    floor, worst = 1e-6 * largest(expected), (0.0, "")
    assert all(x.isfinite().all() for x in grads.values()), "a gradient is not finite"
    for name, whole in expected.items():
        error, most = float((grads[name] - whole).abs().max()), float(whole.abs().max())
        if most > floor:
            worst = max(worst, (error / most, name))
        else:
            assert error <= floor, f"{name}: {error} of {most}"
    return worst
