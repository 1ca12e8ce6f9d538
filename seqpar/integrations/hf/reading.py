"""Reads a call of a parallel transformers model on the rank that makes it: its batch, and facts that ranks compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from seqpar.data import Share
from seqpar.data.batch import Reading
from seqpar.data.rows import LABELS, MASK
from seqpar.integrations.adapters import acting, acting_adapters, adapted, unfit_adapters, unfit_wrapper
from seqpar.integrations.hf.config import ASKED, text_of
from seqpar.integrations.hf.heads import HeadCall
from seqpar.integrations.hf.logits import ask_trainer, loss_alone, softcap_of, tokens_of
from seqpar.integrations.hf.plans import Plans
from seqpar.integrations.hf.positions import (
    BY_TOKENS,
    BY_WORDS,
    COUNTED,
    SHARES,
    counted,
    counted_pad,
    counts,
    dropping_tokens,
    shares,
)
from seqpar.integrations.hf.recurrent.mixers import begins_at_zero
from seqpar.integrations.hf.request import (
    COUNT,
    DOCUMENTS,
    OF_LOSS,
    Request,
    arguments_of,
    count_of,
    misgiven,
    on_host,
    parameters,
)
from seqpar.integrations.hf.rewritten_attention import sees_places
from seqpar.integrations.hf.rotary import lengthy
from seqpar.integrations.hf.trial.runs import ModelFit, plain
from seqpar.ops.core.autocast import autocast_dtype
from seqpar.private.torch import has_hooks

Check = Callable[[PreTrainedModel, dict[str, Any]], None]


class BatchCall(NamedTuple):
    """A call of the forward on this rank.

    what: its name in messages. batch: the entries that move to other ranks. error: why it is refused, which all ranks
    raise. facts: what ranks compare. count: num_items_in_batch on the host. averaged: whether a wrapper averages its
    loss.
    """

    what: str
    arguments: dict[str, Any]
    batch: dict[str, Any]
    error: Exception | None
    how: Reading
    facts: dict[str, object]
    request: Request
    count: int | None
    training: bool
    averaged: bool


class Reader:
    """Reads the calls of a model.

    check: settles the arguments of a call, or raises. entries: of a batch, with a value per token; optional: of these,
    those that a rank may lack. replicated: whether all ranks have the same batch.
    """

    def __init__(
        self, model: PreTrainedModel, fit: ModelFit, plans: Plans, check: Check, *, entries: tuple[str, ...],
        optional: tuple[str, ...], replicated: bool,
    ) -> None:  # fmt: skip
        self.model, self.fit, self.entries, self.optional, self.replicated = model, fit, entries, optional, replicated
        self._plans, self._check = plans, check
        self._pad, self._tried = counted_pad(model), frozenset(acting(adapted(model)))
        self._at_zero, self._drops = begins_at_zero(model), dropping_tokens(model)
        by_rows = self._drops or lengthy(model) or fit.pooled or text_of(model) is not model
        self._by_rows = bool(by_rows or fit.counting in (BY_TOKENS, BY_WORDS))

    def read(
        self, module: PreTrainedModel, args: tuple[Any, ...], named: Mapping[str, Any], head: HeadCall | None,
        logits: bool | None,
    ) -> BatchCall:  # fmt: skip
        """A call of the model or of its base model with these arguments.

        head: the call of a head that pools, if that calls the base model. logits: whether they are asked for.
        """
        training, arguments = torch.is_grad_enabled() and self.model.training, arguments_of(module, args, named)
        labels, layers = any(name in arguments for name in LABELS), adapted(self.model)
        hidden_states, items = arguments.get("output_hidden_states"), arguments.get("num_items_in_batch")
        labelled = labels or (head is not None and head.labels is not None)
        batch, count, error = dict[str, Any](), None, None
        try:
            if wrong := misgiven(type(module), args, named):
                raise wrong
            batch, count = self._batch(module, arguments, head, layers, labelled=labelled)
        except Exception as refused:  # all ranks raise it
            error = refused
        routers = bool(arguments.get(ASKED))
        returned, chunked = output_of(self.model, self.fit, logits, labels=labels)
        state = self._plans.state
        facts: dict[str, object] = {
            "training": training, "labels": labelled, "logits": returned, "adapters": acting_adapters(layers),
            "output_hidden_states": bool(hidden_states), ASKED: routers,
            COUNT: count, "dtype": self.model.dtype, "autocast": autocast_dtype(state.device),
            "gradient checkpointing": state.recomputed,
        }  # fmt: skip
        vocabulary = tokens_of(self.model) if labels and self.fit.of_tokens else None
        return_dict = arguments.get("return_dict", getattr(module.config, "return_dict", True))
        return BatchCall(
            f"{type(module).__name__}.forward", arguments, batch, error,
            Reading(self.fit.shift, optional=self.optional, vocabulary=vocabulary), facts,
            Request(labels, items, return_dict, returned, chunked, routers, state.recomputed), count, training,
            (labels and items is None) or (head is not None and head.averaged),
        )  # fmt: skip

    def _batch(
        self, module: PreTrainedModel, arguments: dict[str, Any], head: HeadCall | None, layers: list[nn.Module], *,
        labelled: bool,
    ) -> tuple[dict[str, Any], int | None]:  # fmt: skip
        """The batch among the arguments of a call, and its num_items_in_batch on the host.

        layers: with adapters. labelled: whether the call, or that of a head around it, has labels.

        Raises: NotImplementedError or ValueError for a call that is not served.
        """
        self._check(module, arguments)
        who = type(module).__name__
        if unfit := unfit_wrapper() or unfit_adapters(self.model, layers, self._tried, loss=labelled):
            raise NotImplementedError(f"{who}: {unfit}")
        batch = {name: arguments[name] for name in (*self.entries, *DOCUMENTS) if name in arguments}
        items = arguments.get("num_items_in_batch") if head is None else head.items
        masked = (head or self._by_rows) and isinstance(batch.get(MASK), Tensor)
        if masked and bool((on_host(batch, items, replicated=self.replicated)[MASK] > 1).any()):
            raise NotImplementedError(
                f"attention_mask of {who} numbers the documents of a row, and a part of the model reads it as one; "
                "give each document a row of its own"
            )
        if counts(self.fit.counting, batch):
            batch[COUNTED] = counted(self.fit.counting, batch, self._pad)
        if self._drops and "input_ids" in batch:
            batch[SHARES] = shares(self._drops[0], batch)
        if self._at_zero:
            from seqpar.integrations.hf.recurrent.rglru import misread

            if reason := misread({n: x for n, x in batch.items() if n not in OF_LOSS}):
                raise NotImplementedError(f"a batch for {who}: {reason}")
        return batch, count_of(items, batch, replicated=self.replicated)

    def rows(self, call: BatchCall, own: Share) -> tuple[Request, dict[str, Any]]:
        """The request, and the arguments with which a module computes this rank's rows.

        Raises: NotImplementedError if layers count the tokens that attention_mask leaves out between others.
        """
        if own.places is not None:
            self._check_holes()
        asked = call.request
        rows: dict[str, Any] = {name: x[None] for name, x in own.tensors.items() if name not in ("labels", SHARES)}
        rows |= {"position_ids": rows.pop(COUNTED, own.positions[None]), "return_dict": True} | plain(self.model)
        hidden_states = call.arguments.get("output_hidden_states")
        if hidden_states is not None:  # else the configs of the model and its parts decide
            rows["output_hidden_states"] = bool(hidden_states)
        if asked.routers:
            rows[ASKED] = True
        if asked.chunked:
            rows["logits_to_keep"] = own.positions.new_zeros(0)
        return asked, rows

    def _check_holes(self) -> None:
        if any(rule.chunk for rule in self.fit.rules):
            raise NotImplementedError("attention_mask leaves out tokens between others, and a layer attends in chunks")
        if self.fit.recurrent or sees_places(self.model):
            why = "would decay the states of recurrent" if self.fit.recurrent else "count as places in some attention"
            raise NotImplementedError(
                f"attention_mask leaves out tokens between others, which {why} layers; leave them out of the batch"
            )


def output_of(model: PreTrainedModel, fit: ModelFit, logits: bool | None, *, labels: bool) -> tuple[bool, bool]:
    """Whether a forward returns logits, and whether its loss is computed without them.

    logits: as `seqpar.integrations.hf.model.ParallelTransformer` has it. labels: whether the forward has some.
    """
    ask_trainer()  # imported only now, perhaps
    unread = loss_alone() or (torch.is_grad_enabled() and model.training)
    returned = not labels or (not unread if logits is None else logits)
    return returned, not returned and _has_head(model, fit)


def _has_head(model: PreTrainedModel, fit: ModelFit) -> bool:
    """Whether the loss can be computed from hidden states: not if the head is sharded or wrapped."""
    head = fit.head
    return (
        head is not None
        and "logits_to_keep" in parameters(type(model))
        and model.get_output_embeddings() is head
        and type(head) is nn.Linear
        and not isinstance(head.weight, DTensor)
        and "forward" not in head.__dict__
        and fit.softcap == softcap_of(model)
        and not has_hooks(head)
    )
