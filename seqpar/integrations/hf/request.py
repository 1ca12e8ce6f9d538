"""A call of a parallel transformers model: its arguments by name, and which of them several ranks support."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from seqpar.comm import Comm
from seqpar.data.batch import FACTS, Reading
from seqpar.data.host import read_entries
from seqpar.data.rows import LABELS
from seqpar.integrations.hf.config import ASKED, takes_any, text_of
from seqpar.integrations.hf.experts import asks, weight_of
from seqpar.integrations.hf.forward import current
from seqpar.integrations.hf.guard import ModelGuard
from seqpar.integrations.hf.heads import HeadCall, LocalHead, misread, ranks_outside
from seqpar.integrations.hf.positions import COLUMNS, counts
from seqpar.integrations.hf.trial.runs import ModelFit
from seqpar.private.torch import backward_pass, forward_hooks

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


def arguments_of(module: PreTrainedModel, args: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, without those that have no effect."""
    arguments = {n: x for n, x in (dict(zip(parameters(type(module)), args)) | dict(named)).items() if x is not None}
    for name, idle in IDLE.items():
        if name in arguments and not isinstance(arguments[name], Tensor) and arguments[name] in idle:
            del arguments[name]
    return arguments


def misgiven(kind: type[PreTrainedModel], args: tuple[Any, ...], named: Mapping[str, Any]) -> TypeError | None:
    """Python's error for a call of a forward with more arguments than it takes by place, or with one twice."""
    names = parameters(kind)
    if len(args) > len(names):
        return TypeError(
            f"{kind.__name__}.forward() takes {len(names)} positional arguments but {len(args)} were given"
        )
    twice = [name for name in names[: len(args)] if name in named]
    return TypeError(f"{kind.__name__}.forward() got multiple values for argument {twice[0]!r}") if twice else None


def on_host(batch: Mapping[str, Any], items: Any, *, replicated: bool) -> Mapping[str, Any]:
    """The batch and its num_items_in_batch, of which all that is read of them comes to the host in one copy."""
    names = [*(batch if replicated else FACTS), "num_items_in_batch"]
    return read_entries({**batch, "num_items_in_batch": items}, names)


def count_of(items: Any, batch: Mapping[str, Any], *, replicated: bool) -> int | None:
    """num_items_in_batch as a number.

    Raises: ValueError if it is not a number of labels.
    """
    if items is None:
        return None
    if isinstance(items, Tensor):
        if items.numel() != 1:
            raise ValueError(f"num_items_in_batch has the shape {list(items.shape)}, expected one number of labels")
        items = on_host(batch, items, replicated=replicated)["num_items_in_batch"].item()
    if not isinstance(items, (int, float)) or not float(items).is_integer():
        raise ValueError(f"num_items_in_batch is {items!r:.200}, expected a number of labels")
    return int(items)


def check_count(items: Any, labels: int) -> None:
    """Raise ValueError for a num_items_in_batch that is smaller than the labels of one forward."""
    if int(items) < labels:
        raise ValueError(
            f"num_items_in_batch is {int(items)}, but the batches of all ranks have {labels} labels that count; count "
            "those of all ranks, as Trainer does with average_tokens_across_devices=True"
        )


class SupportedCalls(NamedTuple):
    """Which calls of a parallel model are served.

    entries: of a batch, with a value per token. guard: what the model was like when it was tried. routers: whether the
    model takes `output_router_logits`.
    """

    model: PreTrainedModel
    comm: Comm
    fit: ModelFit
    entries: tuple[str, ...]
    average_over: int
    guard: ModelGuard
    routers: bool

    def check(self, module: PreTrainedModel, arguments: dict[str, Any], head: HeadCall | None) -> None:
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
        """Raise NotImplementedError for unknown arguments."""
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
        counting = self.fit.counting
        if counting != COLUMNS and "position_ids" not in arguments and not counts(counting, arguments):
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


def _adds_noise(model: PreTrainedModel) -> bool:
    """Whether NEFTune's hook is on the embedding."""
    try:
        hooks = forward_hooks(model.get_input_embeddings())
    except NotImplementedError:  # of a model without one
        return False
    return any(getattr(hook, "__name__", "") == "neftune_post_forward_hook" for hook in hooks.values())
