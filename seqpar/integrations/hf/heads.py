"""Heads that pool: the base model runs on all ranks, and the head on each rank's own batch.

A classifier of sequences, a reward model or a pooler reads one row of every sequence, or a mean of them. That row is
with the rank that computes it, and its place in a batch is only known to the rank that supplied the batch. So `back`
returns the base model's rows to that rank, [B, S, hidden], and the rest is transformers' own code. Pads are zeros then,
where one process has what the model makes of pads; a batch is refused if its head would read them. A trial shows what a
head reads, and that its loss is a mean over rows, so that each rank's share is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from seqpar.comm import Comm
from seqpar.data import Share
from seqpar.integrations.hf.config import caching, hiding
from seqpar.private.transformers import tensor_parallel_size
from seqpar.train.sums import reported, sum_under
from seqpar.trial.compare import close

IGNORED = -100
POOLER = "pooler_output"
ROWS = 3  # of the trial
SINGLE, REGRESSION, SEVERAL = "single_label_classification", "regression", "multi_label_classification"


class LocalHead(NamedTuple):
    """Facts on a head that pools, and so runs on each rank's own batch.

    loss: why its loss cannot be shared, or "". left: whether it reads padding on the left. masked: whether it reads
    tokens that attention_mask leaves out if they are not the padding token. last: whether it reads padding on the right
    of inputs_embeds, where it sees no padding tokens. counted: whether its loss is the same with num_items_in_batch.
    """

    loss: str = ""
    left: bool = False
    masked: bool = False
    last: bool = False
    counted: bool = True


def tried(model: PreTrainedModel) -> LocalHead | str:
    """The findings on a model's head, with the attention that is written out; or why it cannot run on one rank."""
    vocabulary = len(model.get_input_embeddings().weight)
    pad = pad_of(model)
    ids = torch.arange(ROWS * 7, device=model.device).view(ROWS, 7) * 5 % (vocabulary - 1)
    ids = ids + (ids >= pad)  # no padding token among the tokens
    right, left = torch.ones_like(ids), torch.ones_like(ids)
    right[1:, 5:], left[1:, :2] = 0, 0
    out = _run(model, input_ids=ids, attention_mask=right)
    fields = sorted(name for name, value in out.items() if value is not None)
    if fields != ["logits"] or len(out.logits) != ROWS:
        return f"its head returns {fields}, expected logits of each row"
    if _run(model, input_ids=ids[:, :5]).logits.shape[1:] != out.logits.shape[1:]:
        return (
            f"its head returns logits {list(out.logits.shape)} of {list(ids.shape)} tokens, expected some of each row"
        )
    padded = ids.where(right.bool(), pad)
    every = _run(model, input_ids=padded, attention_mask=right).logits
    for row in range(ROWS):
        at = slice(row, row + 1)
        if not close(_run(model, input_ids=padded[at], attention_mask=right[at]).logits, every[at]):
            return "its head depends on other rows of the batch"
    if _reads(model, right, input_ids=padded):
        return "its head reads padding"
    return LocalHead(
        _loss(model, padded, right), left=_reads(model, left, input_ids=ids.where(left.bool(), pad)),
        masked=_reads(model, right, input_ids=ids), last=_reads_last(model, padded, right),
        counted=not _loss(model, padded, right, num_items_in_batch=1000),
    )  # fmt: skip


def pools(model: PreTrainedModel, hidden: Tensor, pooled: Tensor) -> bool:
    """Whether a base model's pooler_output is its ``pooler`` of the first row [1, T, hidden], and of nothing else."""
    pooler = getattr(model, "pooler", None)
    if not isinstance(pooler, nn.Module):
        return False
    try:
        return all(close(pooled_of(model, rows), pooled) for rows in (hidden[:, :1], hidden))
    except Exception:
        return False


def pooled_of(model: nn.Module, hidden: Tensor) -> Tensor:
    """What the ``pooler`` of a base model makes of rows [B, S, hidden]."""
    pooler: Any = model.pooler
    if activation := getattr(model, "pooler_activation", None):  # ALBERT's is a layer of its first row
        return activation(pooler(hidden[:, 0]))  # type: ignore[no-any-return]
    return pooler(hidden)  # type: ignore[no-any-return]


def has_pad(model: PreTrainedModel) -> bool:
    """Whether the config of a model has a padding token."""
    return getattr(model.config.get_text_config(), "pad_token_id", None) is not None


def pad_of(model: PreTrainedModel) -> int:
    """The padding token; 0 for a model without one."""
    return int(model.config.get_text_config().pad_token_id) if has_pad(model) else 0


class HeadCall:
    """A call of a model whose head pools, on this rank's own batch.

    comm: of the parallel model. error: why it is refused; ranks exchange it in the base model's call, and all raise
    it. averaged: whether the loss is for a wrapper that averages gradients. count: terms of the mean over rows that is
    the loss. share: of the base model's call, once it was made.
    """

    def __init__(
        self, fit: LocalHead, model: PreTrainedModel, comm: Comm, arguments: Mapping[str, Any], *, replaced: bool
    ) -> None:
        self.model, self.comm = model, comm
        self.share: Share | None = None
        self.labels, self.items = arguments.get("labels"), arguments.get("num_items_in_batch")
        self.averaged = self.labels is not None and self.items is None
        self.count = 0
        try:
            self.error = self._refused(fit, arguments, replaced)
            if self.labels is not None and self.error is None:
                single = _kind(model, self.labels) == SINGLE
                self.count = int((self.labels != IGNORED).sum()) if single else self.labels.numel()
        except Exception as unread:
            self.error = unread

    def _refused(self, fit: LocalHead, arguments: Mapping[str, Any], replaced: bool) -> Exception | None:
        who, mask = type(self.model).__name__, arguments.get("attention_mask")
        if self.labels is not None:
            if reason := "its loss_function was replaced" if replaced else fit.loss:
                return NotImplementedError(
                    f"labels for {who}: {reason}; leave them out and compute the loss from what it returns"
                )
            if self.items is not None and (others := ranks_outside(self.model, self.comm)):
                return NotImplementedError(f"num_items_in_batch for {who}, whose loss ignores it: {others}")
            if self.items is not None and not fit.counted:
                return NotImplementedError(
                    f"num_items_in_batch for {who}: its loss is not a mean over rows then; leave it out"
                )
        if fit.masked and not has_pad(self.model):
            return NotImplementedError(
                f"{who}, whose pad_token_id was removed after parallelize: its head reads the last place of a row; set "
                "pad_token_id in its config"
            )
        if reason := misread(fit, self.model, mask, arguments.get("input_ids")):
            return NotImplementedError(f"attention_mask for {who}: {reason}")
        if self.labels is not None and unfounded(self.model, self.labels, mask):
            return ValueError(
                f"labels for {who}: one belongs to a row whose attention_mask is 0 everywhere; leave such rows out"
            )
        return None

    def output(self, run: Callable[[], Any], average_over: int) -> tuple[Any, Tensor | None]:
        """The output of the call, with the union's loss, and the number of the loss's terms, None without a loss.

        run: calls the model's own forward, whose loss is the mean over this rank's rows. A collective.
        """
        out, count = run(), None
        if out.get("loss") is not None:
            if self.labels is None:
                raise NotImplementedError(
                    f"{type(self.model).__name__} returned a loss without labels, whose share is not known; leave "
                    "out what it was computed from, and compute the loss from what the model returns"
                )
            own = out.loss if self.count else 0 * out.logits.sum()  # a mean over nothing is NaN
            assert self.share is not None
            who, plan = f"{type(self.model).__name__}.forward: the loss", self.share.plan
            pair = torch.stack([own.detach().double() * self.count, own.new_tensor(self.count, dtype=torch.float64)])
            total, count = sum_under(pair, self.comm, who, {"plan": plan.digest()})
            part = own * (self.count / count).to(own) * (1 if self.items is not None else average_over)
            out.loss = part if self.items is not None else reported(part, total / count)
        return out, count


def ranks_outside(model: PreTrainedModel, comm: Comm) -> str:
    """Why a caller that scales losses for wrappers scales by other ranks than the comm's, or ""."""
    ranks = comm.size
    if dist.is_available() and dist.is_initialized():
        ranks = dist.get_world_size() // (tensor_parallel_size(model, None) or 1)
    if ranks == comm.size:
        return ""
    return (
        f"its caller multiplies the loss by the {ranks} ranks that hold data, and the comm has {comm.size}; give "
        "parallelize a comm of all ranks that hold data"
    )


def misread(fit: LocalHead, model: PreTrainedModel, mask: Tensor | None, ids: Tensor | None) -> str:
    """Why a head would read padding of a batch, or "". Waits for the device if there is a mask."""
    if mask is None or mask.dim() != 2 or not (fit.left or fit.masked or fit.last):
        return ""
    keep = mask.bool()
    keep = keep[keep.any(1)]  # a row without a token is of no sequence
    if fit.left and not keep[:, :1].all():
        return "its head reads the first token of a row, which is padding; pad on the right"
    if fit.last and ids is None and not keep[:, -1:].all():
        return (
            "its head reads the last place of a row of inputs_embeds, which is padding; pad on the left, or give "
            "input_ids"
        )
    if fit.masked and ids is not None and ((ids != pad_of(model)) & ~mask.bool())[mask.bool().any(1)].any():
        return (
            f"its head reads the last token that is not {pad_of(model)}, the padding token, and attention_mask leaves "
            "out others; set input_ids to the padding token where attention_mask is 0"
        )
    return ""


def unfounded(model: PreTrainedModel, labels: Tensor, mask: Tensor | None) -> bool:
    """Whether a row without tokens has a label that counts."""
    if mask is None or mask.dim() != 2 or len(labels) != len(mask):
        return False
    alone = labels[~mask.bool().any(1)]
    return bool((alone != IGNORED).any()) if _kind(model, labels) == SINGLE else bool(len(alone))


def _kind(model: PreTrainedModel, labels: Tensor) -> str:
    config = model.config
    if config.problem_type is not None:
        return str(config.problem_type)
    return REGRESSION if config.num_labels == 1 else SEVERAL if labels.is_floating_point() else SINGLE


def _loss(model: PreTrainedModel, ids: Tensor, mask: Tensor, **more: Any) -> str:
    """Why a head's loss is not a mean over rows, or "". more: given with the whole batch.

    Labels of a kind for which the model raises an error do not count, if it takes another kind.
    """
    own = model.config.problem_type
    count = model.config.num_labels
    numbers = torch.arange(ROWS, device=ids.device)
    grid = numbers[:, None] + torch.arange(count, device=ids.device)
    values = grid[:, 0] if count == 1 else grid
    some = {SINGLE: numbers % max(count, 1), REGRESSION: values * 0.5, SEVERAL: (grid % 2).double()}
    kinds = [own] if own is not None else [REGRESSION] if count == 1 else [SINGLE, SEVERAL]
    errors = []
    for kind in kinds:
        labels = some[kind] if kind == SINGLE else some[kind].to(model.dtype)
        cases = [labels, labels.index_fill(0, numbers[:1], IGNORED)] if kind == SINGLE else [labels]
        try:
            for given in cases:
                model.config.problem_type = own
                whole = _run(model, input_ids=ids, attention_mask=mask, labels=given, **more).loss
                rows = [r for r in range(ROWS) if kind != SINGLE or given[r] != IGNORED]
                each = [
                    _run(model, input_ids=ids[r : r + 1], attention_mask=mask[r : r + 1], labels=given[r : r + 1]).loss
                    for r in rows
                ]
                if not close(torch.stack(each).mean()[None], whole[None]):
                    return "its loss is not a mean over the rows of a batch"
        except Exception as error:
            errors.append(error)
        finally:
            model.config.problem_type = own
    if len(errors) < len(kinds):
        return ""
    return f"its loss is not one of {', '.join(some)}, which failed: {type(errors[0]).__name__}: {errors[0]}"


def _reads(model: PreTrainedModel, mask: Tensor, **given: Tensor) -> bool:
    """Whether logits change with the base model's rows that the mask leaves out. given: tokens or embeddings."""
    with _changed(model, mask):
        other = _run(model, attention_mask=mask, **given).logits
    return not close(other, _run(model, attention_mask=mask, **given).logits)


def _reads_last(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> bool:
    """Whether a head reads padding of embeddings, or that is not known as the model takes none."""
    try:
        return _reads(model, mask, inputs_embeds=model.get_input_embeddings()(ids))
    except Exception:
        return True


@contextmanager
def _changed(model: PreTrainedModel, mask: Tensor) -> Iterator[None]:
    """A block in which the base model returns other rows where the mask is 0."""

    def change(base: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        hidden = out["last_hidden_state"]
        out["last_hidden_state"] = hidden.where(mask.bool()[..., None], 3 - 2 * hidden)
        if out.get(POOLER) is not None:
            out[POOLER] = pooled_of(base, out["last_hidden_state"])
        return out

    hook = model.base_model.register_forward_hook(change)
    try:
        yield
    finally:
        hook.remove()


def _run(model: PreTrainedModel, **arguments: Any) -> Any:
    return model(**arguments, **caching(model), **hiding(model), return_dict=True)
