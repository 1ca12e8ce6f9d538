"""Reads a call of a parallel transformers model: whether ranks support it, its batch, and what they compare."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Mapping
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from seqpar.comm import Comm
from seqpar.data import Share
from seqpar.data.batch import FACTS, Reading
from seqpar.data.host import read_entries
from seqpar.data.rows import LABELS, MASK
from seqpar.foreign.wrap import replaced
from seqpar.integrations.adapters import acting, acting_adapters, adapted, unfit_adapters, unfit_wrapper
from seqpar.integrations.hf import positions
from seqpar.integrations.hf.config import ASKED, takes_any, text_of
from seqpar.integrations.hf.experts import asks, can_ask, weight_of
from seqpar.integrations.hf.forward import current
from seqpar.integrations.hf.guard import ModelGuard
from seqpar.integrations.hf.heads import HeadCall, LocalHead, misread, ranks_outside
from seqpar.integrations.hf.plans import Plans
from seqpar.integrations.hf.recurrent import rglru
from seqpar.integrations.hf.recurrent.mixers import begins_at_zero
from seqpar.integrations.hf.rewritten_attention import sees_places
from seqpar.integrations.hf.trial.runs import ModelFit, plain, softcap_of, tokens_of
from seqpar.ops.core.device import autocast_dtype
from seqpar.private.torch import backward_pass, forward_hooks, has_hooks

# Entries of a batch with a value per token, and entries that mark documents.
ROWS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids", *LABELS)
DOCUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
OF_LOSS = (*LABELS, "num_items_in_batch")  # not taken by a base model
# A fact that ranks compare; its name tells how to count if they differ.
COUNT = "num_items_in_batch (of all ranks, as Trainer counts with average_tokens_across_devices=True)"
OPTIONS = ("num_items_in_batch", "output_hidden_states", ASKED, "return_dict")
# Of these, what a class takes by **kwargs, as its layers or its caller read it.
BY_KEYWORD = ("shift_labels", *DOCUMENTS, *OPTIONS)
# Keywords whose value may be without effect.
IDLE = {
    "use_cache": (False,), "output_attentions": (False,), "logits_to_keep": (0,),
    "fused_lm_head": (False,),
}  # fmt: skip
# Keywords of a model with towers that would make its output another one.
REFUSED = ("cache", "past_key_values", "use_cache", "output_attentions", ASKED, "logits_to_keep")
# Columns that callers hand on and no model reads: TRL's `RewardTrainer` has the margin of a pair.
UNREAD = ("margin",)
# The document of each token, for convolutions and recurrences: attention on one device ignores it.
UNSEEN = ("seq_idx",)


class BatchCall(NamedTuple):
    """A call of the forward on this rank.

    what: its name in messages. batch: the entries that move to other ranks. error: why it is refused, which all ranks
    raise. facts: what ranks compare. items: num_items_in_batch; count: as a number. averaged: whether a wrapper
    averages its loss. chunked: whether the loss is computed without logits. routers: output_router_logits. recomputed:
    whether layers are activation checkpoints.
    """

    what: str
    arguments: dict[str, Any]
    batch: dict[str, Any]
    error: Exception | None
    how: Reading
    facts: dict[str, object]
    training: bool
    labels: bool
    items: Tensor | float | None
    count: int | None
    averaged: bool
    return_dict: bool
    logits: bool
    chunked: bool
    routers: bool
    recomputed: bool


@cache
def parameters(kind: type[PreTrainedModel]) -> tuple[str, ...]:
    """The names of a forward's parameters after ``self``, but for that of other keywords."""
    every = inspect.signature(kind.forward).parameters.values()
    return tuple(each.name for each in every if each.kind is not each.VAR_KEYWORD)[1:]


def named_arguments(
    kind: type[PreTrainedModel], args: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[dict[str, Any], TypeError | None]:
    """The arguments of a call by name; and Python's error for more of them than it takes by place, or for one twice."""
    names, error = parameters(kind), None
    if len(args) > len(names):
        error = TypeError(
            f"{kind.__name__}.forward() takes {len(names)} positional arguments but {len(args)} were given"
        )
    elif twice := [name for name in names[: len(args)] if name in named]:
        error = TypeError(f"{kind.__name__}.forward() got multiple values for argument {twice[0]!r}")
    return dict(zip(names, args)) | dict(named), error


def with_effect(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the arguments of a call that have an effect."""
    return {
        name: x for name, x in given.items()
        if x is not None and (isinstance(x, Tensor) or name not in IDLE or x not in IDLE[name])
    }  # fmt: skip


def check_count(items: Any, labels: int) -> None:
    """Raise ValueError for a num_items_in_batch that is smaller than the labels of one forward."""
    if int(items) < labels:
        raise ValueError(
            f"num_items_in_batch is {int(items)}, but the batches of all ranks have {labels} labels that count; count "
            "those of all ranks, as Trainer does with average_tokens_across_devices=True"
        )


_step = threading.local()  # of Trainer


def loss_alone() -> bool:
    """Whether this thread is in a step of `Trainer` that reads the loss alone.

    The first call after Trainer was imported has its `prediction_step` tell it; that is as before in all else.
    """
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if trainer is None or hasattr(method := trainer.prediction_step, "_seqpar_former"):
        return getattr(_step, "loss_alone", False)

    @wraps(method)
    def step(trainer: Any, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **named: Any) -> Any:
        with replaced(_step, {"loss_alone": prediction_loss_only}):
            return method(trainer, model, inputs, prediction_loss_only, *args, **named)

    step._seqpar_former = method  # type: ignore[attr-defined]
    trainer.prediction_step = step
    return False


class Reader:
    """Reads the calls of a parallel model.

    guard: what the model was like when it was tried. entries: of a batch, with a value per token; optional: of these,
    those that a rank may lack. replicated: whether all ranks have the same batch.
    """

    def __init__(
        self, model: PreTrainedModel, comm: Comm, fit: ModelFit, plans: Plans, guard: ModelGuard, *,
        entries: tuple[str, ...], optional: tuple[str, ...], average_over: int, replicated: bool,
    ) -> None:  # fmt: skip
        self.model, self.comm, self.fit, self.guard = model, comm, fit, guard
        self.entries, self.optional, self.average_over, self.replicated = entries, optional, average_over, replicated
        self.routers = can_ask(model)
        self._plans, self._plain = plans, plain(model)
        self._pad, self._tried = positions.counted_pad(model), frozenset(acting(adapted(model)))
        self._at_zero, self._drops = begins_at_zero(model), positions.dropping_tokens(model)
        by_rows = self._drops or positions.lengthy(model) or fit.pooled or text_of(model) is not model
        self._counts = fit.counting in (positions.BY_TOKENS, positions.BY_WORDS)
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
        returned, chunked = self.output_of(logits, labels=labels)
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
        self._check(module, arguments, head)
        who = type(module).__name__
        batch = {name: arguments[name] for name in (*self.entries, *DOCUMENTS) if name in arguments}
        items = arguments.get("num_items_in_batch") if head is None else head.items
        masked = (head or self._by_rows) and isinstance(batch.get(MASK), Tensor)
        if masked and bool((self._on_host(batch, items)[MASK] > 1).any()):
            raise NotImplementedError(
                f"attention_mask of {who} numbers the documents of a row, and a part of the model reads it as one; "
                "give each document a row of its own"
            )
        if self._counts and positions.counts(self.fit.counting, batch):
            batch[positions.COUNTED] = positions.counted(self.fit.counting, batch, self._pad)
        if self._drops and "input_ids" in batch:
            batch[positions.SHARES] = positions.shares(self._drops[0], batch)
        if self._at_zero and (reason := rglru.misread({n: x for n, x in batch.items() if n not in OF_LOSS})):
            raise NotImplementedError(f"a batch for {who}: {reason}")
        return batch, self._count(items, batch)

    def _on_host(self, batch: Mapping[str, Any], items: Any) -> Mapping[str, Any]:
        """The batch and its num_items_in_batch, of which all that is read of them comes to the host in one copy."""
        names = [*(batch if self.replicated else FACTS), "num_items_in_batch"]
        return read_entries({**batch, "num_items_in_batch": items}, names)

    def _count(self, items: Any, batch: Mapping[str, Any]) -> int | None:
        if items is None:
            return None
        if isinstance(items, Tensor):
            if items.numel() != 1:
                raise ValueError(f"num_items_in_batch has the shape {list(items.shape)}, expected one number of labels")
            items = self._on_host(batch, items)["num_items_in_batch"].item()
        if not isinstance(items, (int, float)) or not float(items).is_integer():
            raise ValueError(f"num_items_in_batch is {items!r:.200}, expected a number of labels")
        return int(items)

    def rows(self, call: BatchCall, own: Share) -> dict[str, Any]:
        """The arguments with which a module computes this rank's rows.

        Raises: NotImplementedError if layers count the tokens that attention_mask leaves out between others.
        """
        if own.places is not None:
            self._check_holes()
        unread = "labels", positions.SHARES
        rows: dict[str, Any] = {name: x[None] for name, x in own.tensors.items() if name not in unread}
        rows |= {"position_ids": rows.pop(positions.COUNTED, own.positions[None]), "return_dict": True} | self._plain
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

    def output_of(self, logits: bool | None, *, labels: bool) -> tuple[bool, bool]:
        """Whether a forward returns logits, and whether its loss is computed without them.

        logits: as `seqpar.integrations.hf.model.ParallelTransformer` has it. labels: whether the forward has some.
        """
        unread = loss_alone() or (torch.is_grad_enabled() and self.model.training)
        returned = not labels or (not unread if logits is None else logits)
        return returned, not returned and _has_head(self.model, self.fit)

    def _check(self, module: PreTrainedModel, arguments: dict[str, Any], head: HeadCall | None) -> None:
        """Settle what a call of the model or of its base asks for; arguments without effect leave.

        head: the call of a head that pools, if that calls the base model.

        Raises: NotImplementedError or ValueError naming the argument, or the change of the model, that is not served.
        """
        who = type(module).__name__
        numbered = any(arguments.pop(name, None) is not None for name in UNSEEN)
        self.guard.check(module, passed=module is self.model or head is not None)
        if self.comm.size > 1:
            self.guard.check_modules()
        if self.model.training and _adds_noise(self.model):
            raise NotImplementedError(
                f"{who} with NEFTune, whose noise is scaled by the length of a row and a rank's rows are of all "
                "documents; leave neftune_noise_alpha out"
            )
        if head is not None and head.error is not None:
            raise head.error
        if head is None and self.fit.pooled:
            given = (arguments.get(name) for name in ("attention_mask", "input_ids"))
            if reason := misread(LocalHead(left=True), self.model, *given):
                raise NotImplementedError(
                    f"attention_mask for {who}: {reason}. Made with add_pooling_layer=False it reads none"
                )
        self._check_routers(who, arguments)
        self._check_place(who, module)
        self._check_names(who, module, arguments)
        self._check_positions(who, arguments, numbered=numbered)
        self._check_loss(who, arguments)

    def _check_place(self, who: str, module: PreTrainedModel) -> None:
        """Raise NotImplementedError for a call inside another model's forward, or inside a backward."""
        if current() is not None:
            raise NotImplementedError(
                f"{who} is called inside the forward of another parallel model, whose rows are not a batch; call "
                "undo() of one of them"
            )
        if module is not self.model and backward_pass() >= 0:
            raise NotImplementedError(
                f"{who} is recomputed in backward as a whole, which is not supported; checkpoint its layers instead"
            )

    def _check_names(self, who: str, module: PreTrainedModel, arguments: Mapping[str, Any]) -> None:
        known = [n for n in (*self.entries, *DOCUMENTS, *OPTIONS) if module is self.model or n not in OF_LOSS]
        known = [n for n in known if n != ASKED or self.routers]
        if unknown := sorted(arguments.keys() - set(known)):
            raise NotImplementedError(
                f"{who} on several ranks got {', '.join(unknown)}, supported are "
                f"{', '.join(self._taken(module, known))}; leave it out, or run the model on one rank, inside "
                "parallelize(...).local()"
            )

    def _taken(self, module: PreTrainedModel, known: list[str]) -> list[str]:
        """Those of the known arguments that a module's class takes, and those that stay with a model's towers."""
        kind, text = type(module), text_of(self.model)
        if text is self.model or text is module:
            at_home, unserved = [], ()
        else:
            at_home, unserved = [n for n in parameters(kind) if n not in (*known, *OF_LOSS, *REFUSED)], REFUSED
        taken = {*parameters(kind), *(BY_KEYWORD if takes_any(kind) else ())}.difference(unserved)
        return [*(n for n in known if n in taken), *at_home]

    def _check_positions(self, who: str, arguments: Mapping[str, Any], *, numbered: bool) -> None:
        """Raise NotImplementedError for positions that ranks cannot count. numbered: whether `UNSEEN` was given."""
        elsewhere = self.fit.counting != positions.COLUMNS and not positions.counts(self.fit.counting, arguments)
        if elsewhere and "position_ids" not in arguments:
            raise NotImplementedError(
                f"{who} counts its positions itself (from attention_mask or input_ids), which ranks cannot; give "
                "position_ids"
            )
        if numbered and self.fit.recurrent and not {"position_ids", "cu_seq_lens_q"} & arguments.keys():
            raise NotImplementedError(
                f"{who} got {' and '.join(UNSEEN)} without the positions of the documents that it numbers, which its "
                "attention does not see; give position_ids that start anew with each document, or cu_seq_lens_q too"
            )

    def _check_routers(self, who: str, arguments: dict[str, Any]) -> None:
        if not arguments.setdefault(ASKED, self.routers and asks(self.model)):
            del arguments[ASKED]
        if arguments.get(ASKED) and self.fit.routers:
            raise NotImplementedError(
                f"{ASKED}=True for {who}: {self.fit.routers}; set it to False, and compute a balance loss from "
                "means over all ranks' tokens (seqpar.train.token_mean)"
            )

    def _check_loss(self, who: str, arguments: Mapping[str, Any]) -> None:
        labels = any(name in arguments for name in LABELS)
        if labels and self.guard.loss_replaced:
            raise NotImplementedError(
                f"labels for {who}, whose loss_function was replaced after parallelize: the loss is computed here; "
                "leave labels out and compute the loss from what it returns"
            )
        if labels and self.fit.loss:
            raise NotImplementedError(
                f"labels for {who}: {self.fit.loss}; leave them out and compute the loss from what it returns"
            )
        balanced = arguments.get(ASKED) and weight_of(self.model)
        ignored = labels and "num_items_in_batch" in arguments and (balanced or not self.fit.by_items)
        if ignored and (others := ranks_outside(self.model, self.comm)):
            term = "balance loss" if self.fit.by_items else "loss"
            raise NotImplementedError(f"num_items_in_batch for {who}, whose {term} ignores it: {others}")
        if self.average_over != 1 and "num_items_in_batch" in arguments:
            raise ValueError(
                f"num_items_in_batch and average_over={self.average_over}: a caller that counts items scales the loss "
                "for wrappers too, as Trainer does; give parallelize no average_over"
            )


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


def _adds_noise(model: PreTrainedModel) -> bool:
    """Whether NEFTune's hook is on the embedding."""
    try:
        hooks = forward_hooks(model.get_input_embeddings())
    except NotImplementedError:  # of a model without one
        return False
    return any(getattr(hook, "__name__", "") == "neftune_post_forward_hook" for hook in hooks.values())
