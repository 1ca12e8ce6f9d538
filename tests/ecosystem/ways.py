"""What becomes of an architecture on two ranks, by every documented way in: exact, or refused; anything else is a bug.

In fp64 models have islands of fp32 (norms, rotary tables, softmax, routers) that would hide an error of 1e-8; inside
`Wide` they are fp64 too, on one process and on the ranks. In fp32 a model may round more than 2e-6 by itself, which
another order of its rows shows; the ranks are then to be as near to fp64 as one process is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING

import seqpar
from seqpar import Layout, Mask, Plan
from seqpar.comm import Comm
from seqpar.testing import run_threads
from tests.ecosystem import images
from tests.ecosystem.architectures import VOCABULARY, Architecture, build

RANKS, TOKENS = 2, 24
CLASSES = "ForSequenceClassification"
TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-6}  # of the loss, and of gradients beside the model's largest
MOST = 1e-4  # that fp32 may round in a small model; tokens that meet where they must not make 1e-2 and more
FIT = ("exact", "refused", "unknown to transformers", "not in this release")  # what a verdict may begin with
ALIKE = 2.0  # what one seed makes of two RMS errors of one kind: 0.74 to 1.79 in the table, 1.01 in the median


class Wide(TorchFunctionMode):
    """A block in which whoever asks for fp32 gets fp64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if x is torch.float32 else x for x in args)
        kwargs = {name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()}
        return func(*args, **kwargs)


def islands(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """A block in which a model of a dtype has no islands of a narrower one."""
    return Wide() if dtype is torch.float64 else nullcontext()


class Outcome(NamedTuple):
    """The loss of one process or of a rank, and its gradients by name."""

    loss: float
    grads: dict[str, Tensor]


def outcome(model: nn.Module, loss: Tensor) -> Outcome:
    """The loss, and the gradients that its backward leaves; the model is left without."""
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return Outcome(float(loss), grads)


def batches(row: Architecture, kind: str) -> list[dict[str, Tensor]]:
    """What each rank's loader brings: padded on the right, or documents packed into one row."""
    g = torch.Generator().manual_seed(3)
    every = []
    for rank in range(RANKS):
        if kind == "padded":
            lengths = torch.tensor([9 + 2 * rank, 4])
            ids = torch.randint(1, VOCABULARY, (2, int(lengths.max())), generator=g)
            keep = torch.arange(ids.shape[1]) < lengths[:, None]
            batch = {"input_ids": ids * keep, "attention_mask": keep.long(), "labels": ids.masked_fill(~keep, -100)}
            at = torch.arange(ids.shape[1]).expand(2, -1)
        else:
            lengths = torch.tensor([5 + rank, 8])
            ids = torch.randint(1, VOCABULARY, (1, int(lengths.sum())), generator=g)
            at = torch.cat([torch.arange(n) for n in lengths])[None]
            batch = {"input_ids": ids, "labels": ids.masked_fill(at == 0, -100), "position_ids": at}
        if row.positions is not None:
            batch["position_ids"] = at + row.positions
        if "TokenClassification" in row.head:
            batch["labels"] = batch["labels"].where(batch["labels"] < 0, batch["labels"] % 2)
        if row.head == CLASSES:
            batch["labels"] = torch.tensor([rank % 2, 1])
        every.append(batch)
    return every


def of_one_process(row: Architecture, model: nn.Module, every: list[dict[str, Tensor]]) -> Outcome:
    """The loss of all ranks' batches on one process, each document by itself where they are packed."""
    if row.head == CLASSES or row.of_all:
        return outcome(model, model(**union(every), **_uncached(model)).loss)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for batch in every:
        for given in _documents(batch) if "attention_mask" not in batch else [dict(batch)]:
            labels = given.pop("labels")
            out = model(**given, **_uncached(model))
            rows = _rows(out)
            if row.head == "ForCausalLM" or row.head == "ForConditionalGeneration":
                rows, labels = rows[:, :-1], labels[:, 1:]
            if row.head == "Model":  # no loss: any function of the rows that are tokens
                total = total + _of_rows(rows)[given.get("attention_mask", torch.ones(rows.shape[:2])).bool()].sum()
                total, count = total + _pooled(out, batch), 1
            else:
                total = total + F.cross_entropy(rows.flatten(0, 1), labels.flatten(), reduction="sum")
                count += int((labels != -100).sum())
    return outcome(model, total / count)


def union(every: list[dict[str, Tensor]], pad: int = 0) -> dict[str, Tensor]:
    """The batches of all ranks as one: padded rows below each other, packed documents as rows.

    Some models of transformers let packed documents see each other.
    """
    rows = [batch if "attention_mask" in batch else unpacked(batch, pad) for batch in every]
    fill, width = {"labels": -100, "input_ids": pad}, max(batch["input_ids"].shape[1] for batch in rows)
    return {
        name: torch.cat([
            F.pad(x, (0, width - x.shape[1]), value=fill.get(name, 0)) if x.shape == batch["input_ids"].shape else x
            for batch in rows for x in [batch[name]]
        ])
        for name in rows[0]
    }  # fmt: skip


def unpacked(batch: dict[str, Tensor], pad: int = 0) -> dict[str, Tensor]:
    """The documents of a packed batch as rows, padded on the right, with positions of their own."""
    parts = _documents(batch)
    names = [name for name in ("input_ids", "labels") if name in batch]
    fill, width = {"labels": -100, "input_ids": pad}, max(part["input_ids"].shape[1] for part in parts)
    for part in parts:
        part["attention_mask"] = torch.ones_like(part["input_ids"])
    return {
        name: torch.cat([F.pad(x, (0, width - x.shape[1]), value=fill.get(name, 0)) for x in (p[name] for p in parts)])
        for name in (*names, "attention_mask")
    }


def _documents(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    if "cu_seq_lens_q" in batch:
        edges = batch["cu_seq_lens_q"].tolist()
    else:
        at = batch["position_ids"][0]
        edges = [*torch.where(at == at.min())[0].tolist(), len(at)]
    return [
        {name: x[:, a:b] for name, x in batch.items() if x.shape == batch["input_ids"].shape}
        for a, b in zip(edges, edges[1:])
    ]


def _rows(out: Any) -> Tensor:
    return out.logits if getattr(out, "logits", None) is not None else out.last_hidden_state


def _pooled(out: Any, batch: dict[str, Tensor]) -> Tensor | float:
    """A function of the pooled rows; of packed documents one process pools the first alone."""
    pooled = getattr(out, "pooler_output", None)
    return 0.0 if pooled is None or "attention_mask" not in batch else _of_rows(pooled).sum()


def _of_rows(rows: Tensor) -> Tensor:
    weight = torch.linspace(-1.0, 1.0, rows.shape[-1], dtype=rows.dtype)
    return (rows * weight).sum(-1)


def _uncached(model: nn.Module) -> dict[str, Any]:
    return {"use_cache": False} if hasattr(model.config.get_text_config(), "use_cache") else {}


def cut(lengths: Any, ranks: int) -> Plan:
    """Documents cut where ranks' shares end; the default plan would leave such short ones whole."""
    return Plan(Mask(lengths), Layout.contiguous(int(sum(lengths)), ranks))


def parallelized(comm: Comm, row: Architecture, model: nn.Module, every: list[Any], **options: Any) -> Outcome:
    """By `seqpar.parallelize`, as a trainer would, but for the plan."""
    own, batch = copy.deepcopy(model), dict(every[comm.rank])
    with seqpar.parallelize(own, comm, plan=cut, **options):
        if row.head != "Model":
            return outcome(own, own(**batch).loss)
        batch.pop("labels")
        out = own(**batch)
        rows = _of_rows(_rows(out))[batch.get("attention_mask", torch.ones(batch["input_ids"].shape)).bool()]
        return outcome(own, rows.sum() + _pooled(out, batch))


IDS = torch.randint(1, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(5))


def of_one_document(row: Architecture, model: nn.Module) -> Outcome:
    """The reference of the ways that share out rows themselves."""
    at = torch.arange(TOKENS)[None] + (row.positions or 0)
    return outcome(model, _loss(_rows(model(input_ids=IDS, position_ids=at, **_uncached(model)))[0], IDS[0]))


def _loss(rows: Tensor, ids: Tensor) -> Tensor:
    """A sum over rows that needs no neighbour."""
    return F.cross_entropy(rows, ids % rows.shape[-1], reduction="sum") / TOKENS


def by_rows(comm: Comm, row: Architecture, model: nn.Module, layout: str) -> Outcome:
    """By ``attn_implementation="seqpar"``: this rank's rows with their positions."""
    own = copy.deepcopy(model)
    causal = row.group != "encoder" or row.kind in ("llama", "qwen3")
    mask = Mask([TOKENS], causal=causal)
    plan = Plan(mask, Layout.zigzag([TOKENS], RANKS) if layout == "zigzag" else Layout.contiguous(TOKENS, RANKS))
    at = torch.from_numpy(plan.layout.positions(comm.rank))
    given = {"input_ids": IDS[:, at], "position_ids": at[None] + (row.positions or 0)} | _uncached(own)
    with seqpar.parallel(plan, comm):
        return outcome(own, _loss(_rows(own(**given))[0], IDS[0, at]))


BATCHES = ("padded", "packed")
ROWS = ("registered", "registered zigzag")
LOADED = {
    "padded": "eager",
    "packed": "eager",
    "registered": "seqpar",
    "registered zigzag": "seqpar",
}
# who takes no tokens, or returns no row for each, has no rows to share out
BATCHES_ONLY = {"audio", "vision", "encoder-decoder"}


def ways(row: Architecture) -> tuple[str, ...]:
    """The ways in that mean something for an architecture."""
    if row.head == CLASSES:  # a row has one label, and no documents
        return ("padded",)
    return BATCHES if row.group in BATCHES_ONLY else BATCHES + ROWS


def verdict(row: Architecture, way: str, dtype: torch.dtype = torch.float64) -> str:
    """What becomes of an architecture in fp64 or fp32 by one way in.

    "exact", with a word on it where fp32 rounds more than its tolerance; "refused: ...", by an error of the package;
    "unknown to transformers: ...", which does not load or run the model that way; "not in this release".
    Anything else is a bug: "WRONG ..." or "CRASHED ...".
    """
    if row.kind not in CONFIG_MAPPING:
        return "not in this release"
    try:
        with islands(dtype):
            model = build(row, LOADED.get(way, "sdpa"), dtype)
    except (ValueError, KeyError) as error:
        return f"unknown to transformers: {_short(error)}"
    except NotImplementedError as error:
        return _raised(error)
    documents: list[list[images.Tokens]] = []
    if way in BATCHES and row.group == "vision-language":
        documents = images.brought(row.kind, RANKS, dtype)
        every = [
            images.packed(row.kind, own, model) if way == "packed" else images.padded(row.kind, own)
            for own in documents
        ]
    else:
        every = batches(row, "packed" if way == "packed" else "padded")
    layout = "zigzag" if way.endswith("zigzag") else "contiguous"

    def call(comm: Comm) -> Outcome:
        with islands(dtype):
            if way in BATCHES:
                return parallelized(comm, row, model, every)
            return by_rows(comm, row, model, layout)

    def whole(dtype: torch.dtype) -> Outcome:
        with islands(dtype):
            one = build(row, dtype=dtype)
            one.load_state_dict(model.state_dict())  # in fp64 others may be drawn
            if documents:
                return outcome(one, images.one_process(row.kind, one, sum(documents, [])))
            return of_one_process(row, one, every) if way in BATCHES else of_one_document(row, one)

    try:
        outcomes = run_threads(RANKS, call)
    except Exception as error:
        return _raised(error)
    found, one = _together(outcomes, reported=way in BATCHES and row.head != "Model"), whole(dtype)
    if (apart := _apart(found, one)) <= TOLERANCE[dtype]:
        return "exact"
    if dtype is torch.float32 and apart <= MOST:
        truth = whole(torch.float64)
        errors = _error(found, truth), _error(one, truth)
        if errors[0] <= ALIKE * errors[1]:
            return "exact: {:.1e} apart, {:.1e} from fp64 (RMS), where one process is {:.1e}".format(apart, *errors)
    return f"WRONG by {apart:.1e}"


def assert_close(
    found: Tensor, one: Tensor, limit: float, most: float, name: str, truth: Callable[[], dict[str, Tensor]] | None
) -> None:
    """Assert that a gradient is that of one process up to `limit` times `most`, its or its model's largest element.

    truth: makes the gradients in fp64. With it, one that differs by more is right if `MOST` allows that in fp32 and it
    is as near to fp64 as one process is.
    """
    worst = float((found - one).abs().max())
    if worst <= limit * most:
        return
    assert truth is not None and worst <= MOST * most, f"{name}: {worst} of {most}"
    exact = truth()[name]
    errors = [float((x.double() - exact).norm()) for x in (found, one)]
    assert errors[0] <= ALIKE * errors[1], f"{name}: {worst} of {most}, from fp64 {errors}"


def _together(ranks: list[Outcome], *, reported: bool) -> Outcome:
    """Losses and gradients of ranks added up; reported: each rank's loss is that of all of them."""
    grads: dict[str, Tensor] = {}
    for name, grad in (item for each in ranks for item in each.grads.items()):
        grads[name] = grads[name] + grad if name in grads else grad
    return Outcome(ranks[0].loss if reported else sum(each.loss for each in ranks), grads)


def _apart(found: Outcome, expected: Outcome) -> float:
    """The larger difference, of losses or beside the model's largest gradient."""
    most = max(float(g.abs().max()) for g in expected.grads.values())
    return max([abs(found.loss - expected.loss) / abs(expected.loss), float(_off(found, expected).abs().max()) / most])


def _error(found: Outcome, truth: Outcome) -> float:
    """The RMS error of all gradients, beside the RMS of all gradients."""
    return float(_off(found, truth).norm() / torch.cat([g.flatten() for g in truth.grads.values()]).norm())


def _off(found: Outcome, expected: Outcome) -> Tensor:
    """What gradients differ by, all in one row; one that is not there is 0."""
    pairs = [(found.grads.get(n), expected.grads.get(n)) for n in {**found.grads, **expected.grads}]
    return torch.cat(
        [((0 if a is None else a.double()) - (0 if b is None else b.double())).flatten() for a, b in pairs]
    )


def _raised(error: Exception) -> str:
    """An error as a verdict, by who raised it: the package on purpose, transformers, or neither of them."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else trace.tb_frame.f_code.co_filename
    if "/seqpar/" in where and isinstance(error, (TypeError, ValueError, RuntimeError)):
        return f"refused: {_short(error)}"
    if "/transformers/" in where and not isinstance(error, AttributeError):  # which the package's own call may cause
        return f"unknown to transformers: {type(error).__name__}: {_short(error)}"
    return f"CRASHED: {type(error).__name__}: {_short(error)}"


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
