"""Reads a call of a parallel transformers model on the rank that makes it: its batch, and facts that ranks compare."""

from __future__ import annotations

import sys
from typing import Any

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
from seqpar.integrations.hf.logits import loss_alone, softcap_of, tokens_of
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
    BatchCall,
    SupportedCalls,
    count_of,
    on_host,
    parameters,
)
from seqpar.integrations.hf.rewritten_attention import sees_places
from seqpar.integrations.hf.rotary import lengthy
from seqpar.integrations.hf.trial.runs import ModelFit, plain
from seqpar.ops.core.device import autocast_dtype
from seqpar.private.torch import has_hooks


class Reader:
    """Reads the calls of a model.

    optional: entries that a rank may lack. replicated: whether all ranks have the same batch.
    """

    def __init__(self, supported: SupportedCalls, plans: Plans, *, optional: tuple[str, ...], replicated: bool) -> None:
        model, fit = supported.model, supported.fit
        self.model, self.fit, self.optional, self.replicated = model, fit, optional, replicated
        self._supported, self._plans, self._plain = supported, plans, plain(model)
        self._pad, self._tried = counted_pad(model), frozenset(acting(adapted(model)))
        self._at_zero, self._drops = begins_at_zero(model), dropping_tokens(model)
        by_rows = self._drops or lengthy(model) or fit.pooled or text_of(model) is not model
        self._counts = fit.counting in (BY_TOKENS, BY_WORDS)
        self._by_rows = bool(by_rows or self._counts)

    def read(
        self, module: PreTrainedModel, arguments: dict[str, Any], head: HeadCall | None, *, logits: bool | None,
        refused: Exception | None,
    ) -> BatchCall:  # fmt: skip
        """A call of the model or of its base model.

        head: the call of a head that pools, if that calls the base model. logits: whether they are asked for. refused:
        why the call is not served, if that is known.
        """
        training = torch.is_grad_enabled() and self.model.training
        labels = any([name in arguments for name in LABELS])
        layers = adapted(self.model) if "peft" in sys.modules else None
        hidden_states, items = arguments.get("output_hidden_states"), arguments.get("num_items_in_batch")
        labelled = labels or (head is not None and head.labels is not None)
        batch, count = dict[str, Any](), None
        try:
            batch, count = self._batch(module, arguments, head)
            if layers is not None and (
                unfit := unfit_wrapper() or unfit_adapters(self.model, layers, self._tried, loss=labelled)
            ):
                raise NotImplementedError(f"{type(module).__name__}: {unfit}")
        except Exception as error:  # all ranks raise it
            refused = refused or error
        routers = bool(arguments.get(ASKED))
        returned, chunked = output_of(self.model, self.fit, logits, labels=labels)
        state = self._plans.state
        facts: dict[str, object] = {
            "training": training, "labels": labelled, "logits": returned,
            "adapters": acting_adapters(layers) if layers else [], "output_hidden_states": bool(hidden_states),
            ASKED: routers, COUNT: count, "dtype": self.model.dtype, "autocast": autocast_dtype(state.device),
            "gradient checkpointing": state.recomputed,
        }  # fmt: skip
        vocabulary = tokens_of(self.model) if labels and self.fit.of_tokens else None
        return BatchCall(
            what=f"{type(module).__name__}.forward", arguments=arguments, batch=batch, error=refused,
            how=Reading(self.fit.shift, optional=self.optional, vocabulary=vocabulary), facts=facts, training=training,
            labels=labels, items=items, count=count,
            averaged=(labels and items is None) or (head is not None and head.averaged),
            return_dict=arguments.get("return_dict", getattr(module.config, "return_dict", True)),
            logits=returned, chunked=chunked, routers=routers, recomputed=state.recomputed,
        )  # fmt: skip

    def _batch(
        self, module: PreTrainedModel, arguments: dict[str, Any], head: HeadCall | None
    ) -> tuple[dict[str, Any], int | None]:
        """The batch among the arguments of a call, and its num_items_in_batch on the host.

        Raises: NotImplementedError or ValueError for a call that is not served.
        """
        self._supported.check(module, arguments, head)
        who = type(module).__name__
        batch = {name: arguments[name] for name in (*self._supported.entries, *DOCUMENTS) if name in arguments}
        items = arguments.get("num_items_in_batch") if head is None else head.items
        masked = (head or self._by_rows) and isinstance(batch.get(MASK), Tensor)
        if masked and bool((on_host(batch, items, replicated=self.replicated)[MASK] > 1).any()):
            raise NotImplementedError(
                f"attention_mask of {who} numbers the documents of a row, and a part of the model reads it as one; "
                "give each document a row of its own"
            )
        if self._counts and counts(self.fit.counting, batch):
            batch[COUNTED] = counted(self.fit.counting, batch, self._pad)
        if self._drops and "input_ids" in batch:
            batch[SHARES] = shares(self._drops[0], batch)
        if self._at_zero:
            from seqpar.integrations.hf.recurrent.rglru import misread

            if reason := misread({n: x for n, x in batch.items() if n not in OF_LOSS}):
                raise NotImplementedError(f"a batch for {who}: {reason}")
        return batch, count_of(items, batch, replicated=self.replicated)

    def rows(self, call: BatchCall, own: Share) -> dict[str, Any]:
        """The arguments with which a module computes this rank's rows.

        Raises: NotImplementedError if layers count the tokens that attention_mask leaves out between others.
        """
        if own.places is not None:
            self._check_holes()
        rows: dict[str, Any] = {name: x[None] for name, x in own.tensors.items() if name not in ("labels", SHARES)}
        rows |= {"position_ids": rows.pop(COUNTED, own.positions[None]), "return_dict": True} | self._plain
        hidden_states = call.arguments.get("output_hidden_states")
        if hidden_states is not None:  # else the configs of the model and its parts decide
            rows["output_hidden_states"] = bool(hidden_states)
        if call.routers:
            rows[ASKED] = True
        if call.chunked:
            rows["logits_to_keep"] = own.positions.new_zeros(0)
        return rows

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
