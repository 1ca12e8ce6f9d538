"""A trial of a transformers model on a few tokens, which shows whether rows meet only in attention and known mixers.

Each token is a document of its own. The model runs on all rows, and again on some of them in another order, with their
positions, where attention returns the first run's rows (`seqpar.trial`). If a row of a layer's queries, keys or values,
or of the output, changes, the model mixes rows elsewhere (a convolution, a recurrence, counted positions). Other runs
check that attention and mixers are what the model computes without seqpar, and the model's loss and its head, so that
neither is mistaken for something else. Meanwhile weights are random, in 32 bits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from inspect import signature
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from seqpar.comm import LocalComm
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.foreign import name_of
from seqpar.foreign.wrap import replaced
from seqpar.integrations.hf.config import ASKED, caching, hiding, takes_any, text_of
from seqpar.integrations.hf.experts import LOGITS, LOSS, balance, can_ask, weight_of, without_hooks
from seqpar.integrations.hf.forward import Forward, MaskPlaceholder, during, padding_of, planned
from seqpar.integrations.hf.heads import POOLER, LocalHead, pools
from seqpar.integrations.hf.indexed import chosen_by_order, few_chosen
from seqpar.integrations.hf.mask import Rule
from seqpar.integrations.hf.positions import counted_pad, counting_of, dropping_tokens, shares
from seqpar.integrations.hf.recurrent.mixers import as_written, exact_tables, mixers
from seqpar.integrations.hf.rewritten_attention import rewritten_attention
from seqpar.integrations.hf.trial.twin import check_shown
from seqpar.ops.core.collective_op import layer_calls
from seqpar.parallel import surround
from seqpar.plan import Plan
from seqpar.private import torch as torch_private
from seqpar.private.transformers import ForCausalLMLoss, ForMaskedLMLoss, ForTokenClassification
from seqpar.train import cross_entropy
from seqpar.trial.compare import close
from seqpar.trial.protect import eager
from seqpar.trial.randomness import Deterministic
from seqpar.trial.record import under_trial
from seqpar.trial.rows import Positions
from seqpar.trial.runs import try_model
from seqpar.trial.weights import drawn, quantised

TOKENS = 13  # of a trial
ROUNDING = 1e-6  # of sums of 32 bits
# Outputs with a row per token; other outputs do not return to their batch.
PER_TOKEN = ("logits", "last_hidden_state")
SHIFTS = {ForCausalLMLoss: "row", ForMaskedLMLoss: "none", ForTokenClassification: "none"}
TYPES = "mm_token_type_ids"
POOLED, NO_ROWS = "it also returns pooler_output", "none with a row for every token"
NO_MASK = "no layer asked transformers.masking_utils for a mask"


class ModelFit(NamedTuple):
    """The findings on a model that fits.

    rules: the masks it asks for. recurrent: whether it has mixers. counting: how it counts positions without
    position_ids, as in `positions`. result: the first output with a row per token. shift: the rows that labels belong
    to, as in `seqpar.data.share`. loss: why its loss cannot be computed here, or "". by_items: whether it divides its
    loss by num_items_in_batch if that is given; some classes ignore it. head: the layer that makes the logits. softcap:
    the logits' softcap. routers: why `output_router_logits` cannot be served, or "". pooled: whether the base model has
    a pooler. calls: of attention and recurrences in a forward; callers: the classes of the modules that make them.
    local_head: of a head that pools, which runs on each rank's own batch; other fields then describe the base model.
    of_tokens: whether the logits are of the tokens that the output embeddings have.
    """

    rules: frozenset[Rule]
    recurrent: bool
    counting: str
    result: str
    shift: str
    loss: str
    by_items: bool
    head: nn.Linear | None
    softcap: float
    routers: str
    pooled: bool = False
    calls: int = 0
    callers: frozenset[str] = frozenset()
    local_head: LocalHead | None = None
    of_tokens: bool = False

    @property
    def causal(self) -> bool:
        """Whether no layer looks ahead."""
        return all(rule.causal for rule in self.rules)


def plain(model: PreTrainedModel) -> dict[str, Any]:
    """The keywords with which a model makes no cache and returns no router logits."""
    return caching(model) | ({ASKED: False} if can_ask(model) else {})


def softcap_of(model: PreTrainedModel) -> float:
    """The softcap of the logits, by the config; 0 for none."""
    config = model.config.get_text_config()
    caps = (getattr(config, name, None) for name in ("final_logit_softcapping", "logits_soft_cap"))
    return float(next((cap for cap in caps if cap), 0.0))


def tokens_of(model: PreTrainedModel) -> int | None:
    """How many tokens the output embeddings have; None if that is unknown."""
    return getattr(model.get_output_embeddings(), "out_features", None)


def mean_of_rows(model: PreTrainedModel, rows: Tensor, labels: Tensor, shift: str) -> Tensor:
    """The mean of a model's own loss_function over rows of logits [T, n] with a label [T] that counts.

    Where it shifts labels itself, each row is followed by a row of which nothing is predicted, and has its label there.
    """
    if shift == "row":
        rows, labels = torch.stack([rows, rows], 1), torch.stack([torch.full_like(labels, -100), labels], 1)
    else:
        rows, labels = rows[None], labels[None]
    config = model.config.get_text_config()
    return model.loss_function(logits=rows, labels=labels, vocab_size=config.vocab_size)  # type: ignore[no-any-return]


@contextmanager
def precise(model: nn.Module) -> Iterator[None]:
    """A context without dropout and autocast, uncompiled, in which rounding and weights of nearly 0 hide nothing."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with eager(model), exact_tables(model), few_chosen(model), drawn(model):
            yield
    finally:
        for module in training:
            module.training = True


class TrialRuns:
    """Runs of a model on its own.

    rules: the masks that layers asked for. hidden: the base model's last output. calls: the fewest of attention and
    recurrences in a run; callers: modules that called attention. rough: whether its products round more than fp32's, as
    those of quantised weights. reasons: against the model, as far as runs have shown.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.rules, self.reasons = model, set[Rule](), list[str]()
        drops = dropping_tokens(model)  # as in one row of all tokens
        masks = shares(drops[0], {"input_ids": self.ids[None]})[:, :1] if drops else None
        self.callers: set[nn.Module] = set()
        self.state = Forward(self._note, padded=True, masks=masks, callers=self.callers)
        self.hidden: Tensor | None = None
        self.calls = sys.maxsize
        self.rough = quantised(model)

    @cached_property
    def at(self) -> Tensor:
        """Positions, [T]."""
        return torch.arange(TOKENS, device=self.model.get_input_embeddings().weight.device)

    @cached_property
    def ids(self) -> Tensor:
        """Tokens, [T]."""
        return (self.at * 7 + 5) % len(self.model.get_input_embeddings().weight)

    def on_all(self, **options: Any) -> Any:
        """The output for all tokens."""
        return self(self.ids, position_ids=self.at[None], **options)

    def mixing(self, names: Sequence[str], **options: Any) -> str:
        """How rows of the outputs of these names depend on other rows outside of attention, or ""."""

        def run(ids: Tensor, position_ids: Tensor) -> list[Any]:
            out = self(ids[0], position_ids=position_ids, **options)
            return [out.get(name) for name in names]

        positions = [Positions(np.arange(TOKENS), TOKENS - 1)]
        verdict = try_model(self.model, run, (self.ids[None], self.at[None]), {}, positions, nullcontext)
        return verdict.reason or verdict.error

    def by_transformers(self, **options: Any) -> Any:
        """The output of transformers' own code for all tokens, in one document."""
        given = {"position_ids": self.at[None], "return_dict": True} | plain(self.model) | hiding(self.model) | options
        with as_written(self.model):
            return self.model.forward(input_ids=self.ids[None], **given)

    def __call__(self, ids: Tensor, documents: Sequence[int] = (), **options: Any) -> Any:
        """The output for tokens in documents of these lengths, by default one token each."""
        plan = Plan(Mask(documents or [1] * len(ids)), Layout.contiguous(len(ids), 1))
        text = text_of(self.model)
        base = self.model.base_model if text is self.model else text
        hook = None if base is self.model else base.register_forward_hook(self._keep)
        inner = {} if text is self.model else {"forward": partial(self._on_rows, text.forward)}
        state = Forward(note=lambda _, padding, config: MaskPlaceholder(padding)) if inner else self.state
        first = layer_calls.run
        try:
            with surround(plan, LocalComm()), replaced(text, inner), during(state):
                given = plain(self.model) | hiding(self.model) | options
                if self.model.training and TYPES in signature(type(self.model).forward).parameters:
                    given.setdefault(TYPES, torch.zeros_like(ids)[None])  # text: Molmo 2 does not train without types
                out = self.model.forward(input_ids=ids[None], return_dict=True, **given)
            if under_trial() is None:
                self.calls = min(self.calls, layer_calls.run - first)
            return out
        finally:
            if hook is not None:
                hook.remove()

    def close(self, a: Tensor, b: Tensor) -> bool:
        """Whether rows are equal up to rounding; parts of models in double precision compute in single precision."""
        return close(a.float(), b.float(), self.rough)

    def _on_rows(self, before: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """A call of a text model inside the model: it makes its masks itself, and some hand on the model's labels."""
        named.pop("labels", None)
        with during(self.state):
            return before(*args, **named | {"attention_mask": padding_of(named.get("attention_mask"))})

    def _note(self, plan: Plan, rule: Rule, ids: Tensor | None) -> Plan:
        self.rules.add(rule)
        return planned(plan, rule)

    def _keep(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        self.hidden = out[0] if isinstance(out[0], Tensor) else None


def findings(runs: TrialRuns) -> ModelFit | None:
    """The findings on a model; None if there are reasons against it."""
    model, reasons = runs.model, runs.reasons
    whole = runs.on_all()
    hidden = runs.hidden
    results, pooled = _results(runs, whole)
    recurrent = bool(mixers(model))
    if not runs.rules and not recurrent:
        reasons.append(NO_MASK)
    if reasons:
        return None
    result = results[0]

    with chosen_by_order(model) as by_order:
        one = runs.on_all(documents=[TOKENS])
    check_shown(model, whole[result], one[result])
    if by_order:
        reasons.append(f"its {by_order[0]} gives several keys the same score, and chooses by how many keys there are")
    if how := runs.mixing(results):
        reasons.append(
            "tokens meet outside its attention, or their positions are not their position_ids (convolution, "
            f"recurrence, n-grams of tokens, positions that are counted): {how}"
        )
    else:
        with _as_in_training(runs):
            how = runs.mixing(results)
        if how:
            reasons.append(f"in training mode, tokens meet outside its attention: {how}")
    written = runs.by_transformers()
    if not all(runs.close(one[name], written[name]) for name in results):
        names = " or ".join(sorted({type(mixer).__name__ for mixer in mixers(model)}))
        reasons.append(
            "its attention is not the function of q, k, v and mask that it hands over (a bias, for example)"
            + (f", or its {names} is not the one that seqpar knows" if names else "")
        )
    if reasons:
        return None
    vocabulary = len(model.get_input_embeddings().weight)
    labels = (runs.ids * 3 + 1) % min(vocabulary, whole["logits"].shape[-1] if "logits" in whole else vocabulary)
    shift, loss = _loss(runs, whole, labels)
    by_items = not loss and _by_items(runs, labels)
    head, softcap = _head(runs, whole, hidden) if model.loss_function in SHIFTS else (None, 0.0)
    counting = counting_of(
        lambda tokens, **given: runs(tokens, **given)[result], runs.close, runs.ids, counted_pad(model)
    )
    routers = ""
    if can_ask(model):
        with without_hooks(model):
            routers = _routers(runs, labels)
    callers = frozenset(map(name_of, (*runs.callers, *mixers(model), *(m for m, _ in rewritten_attention(model)))))
    return ModelFit(
        frozenset(runs.rules), recurrent, counting, result, shift, loss, by_items, head, softcap, routers, pooled,
        runs.calls, callers, of_tokens="logits" in whole and tokens_of(model) == whole["logits"].shape[-1],
    )  # fmt: skip


def _results(runs: TrialRuns, out: Any) -> tuple[list[str], bool]:
    """The outputs with a row per token, and whether one of them is a pooler's; other outputs are left out later.

    An output of such a name without a row per token is a reason against the model.
    """
    reasons = runs.reasons
    fields = {name: value for name, value in out.items() if value is not None}
    pooled = fields.pop(POOLER, None)
    given = [name for name in PER_TOKEN if name in fields]
    results = [name for name in given if fields[name].dim() == 3 and fields[name].shape[:2] == (1, TOKENS)]
    if not results or results[0] != given[0]:
        reasons.append(f"it returns {sorted(fields)}, {NO_ROWS}")
    elif other := [name for name in given if name not in results]:
        reasons.append(f"it also returns {', '.join(other)}, which is not a row per token")
    elif pooled is not None and not pools(runs.model, fields[results[0]], pooled):
        reasons.append(f"{POOLED}, which is not its pooler's of the first row")
    return results, pooled is not None


def _loss(runs: TrialRuns, whole: Any, labels: Tensor) -> tuple[str, str]:
    """The rows that labels belong to, and why the loss cannot be computed here, or ""."""
    function = runs.model.loss_function
    if "logits" not in whole:
        return "row", "it returns no logits"
    if function not in SHIFTS:
        if shift := _own_shift(runs, whole["logits"][0].cpu(), labels):
            return shift, ""
        name, known = getattr(function, "__name__", repr(function)), ", ".join(each.__name__ for each in SHIFTS)
        return "row", f"its loss_function {name} is not among {known}, nor a mean over rows of logits and labels"
    shift = SHIFTS[function]

    def is_mean(out: Any) -> bool:
        logits = whole["logits"] if out.get("logits") is None else out.logits
        rows, wanted = (logits[0, :-1], labels[1:]) if shift == "row" else (logits[0], labels)
        expected = cross_entropy(rows, wanted, valid=len(wanted))
        return out.get("loss") is not None and _same(out.loss, expected, rows.abs().max() + expected.abs())

    if not is_mean(runs.on_all(labels=labels[None])):
        return shift, "its loss is not the cross-entropy of its logits alone"
    with _as_in_training(runs):
        out = runs.on_all(labels=labels[None])
    if out.get("logits") is not None and not is_mean(out):
        return shift, "its loss in training is not the cross-entropy of its logits alone"
    return shift, ""


def _own_shift(runs: TrialRuns, logits: Tensor, labels: Tensor) -> str:
    """The rows that labels of an own loss_function belong to, if it is a mean over rows; else ""."""
    own, some = partial(mean_of_rows, runs.model), torch.arange(TOKENS, device="cpu") % 3 > 0
    try:
        losses = [runs.on_all(labels=labels[None]).loss]
        with _as_in_training(runs):
            losses.append(runs.on_all(labels=labels[None]).loss)
        labels = labels.cpu()  # where a function that knows no -100 raises
        for shift, rows, wanted in (("row", logits[:-1], labels[1:]), ("none", logits, labels)):
            counts, each = some[: len(rows)], [own(*pair, shift) for pair in zip(rows.split(1), wanted.split(1))]
            fewer, expected = own(rows, wanted.where(counts, -100), shift), torch.stack(each)
            pairs = [(fewer, expected[counts].mean()), *((loss.cpu(), expected.mean()) for loss in losses)]
            if all(_same(a, b, rows.abs().max() + expected.abs().max()) for a, b in pairs):
                return shift
    except Exception:  # it takes other arguments
        return ""
    return ""


def _same(a: Tensor, b: Tensor, size: Tensor) -> bool:
    """Whether two results of the same numbers, of about this size, are equal but for rounding of 32 bits."""
    return bool((a.double() - b.double()).abs().max() <= ROUNDING * size.double())


def _by_items(runs: TrialRuns, labels: Tensor) -> bool:
    """Whether a model as written divides its loss by ``num_items_in_batch``: twice as many halve it."""
    if not takes_any(type(runs.model)):
        return True  # callers give it to models that take any keyword

    def loss(items: int) -> float:
        return float(runs.by_transformers(labels=labels[None], num_items_in_batch=labels.new_tensor(items)).loss)

    try:
        return loss(2 * TOKENS) < 0.75 * loss(TOKENS)
    except Exception:  # it takes no such keyword after all, and a call that gives it raises as on one device
        return True


@contextmanager
def _as_in_training(runs: TrialRuns) -> Iterator[None]:
    """A context in which a model in eval mode is in training mode, but drops nothing and draws equal numbers.

    Neither checkpoints nor statistics of batches: the first warn without gradients, the second would change.
    """
    model, state = runs.model, runs.state
    device = next(model.parameters()).device
    runs.state = state._replace(drops=False)
    try:
        for module in model.modules():
            still = isinstance(module, torch_private.BatchNorm)
            module.training = not (still or getattr(module, "gradient_checkpointing", False))
        # other generators draw numbers, and continue afterwards as before
        with torch.random.fork_rng([device] if device.type == "cuda" else []), Deterministic():
            yield
    finally:
        runs.state = state
        model.eval()


def _head(runs: TrialRuns, whole: Any, hidden: Tensor | None) -> tuple[nn.Linear | None, float]:
    """The layer that makes logits of hidden states, if only it and a softcap are between them."""
    head, softcap = runs.model.get_output_embeddings(), softcap_of(runs.model)
    if hidden is None or type(head) is not nn.Linear or "logits" not in whole or hidden.shape[-1] != head.in_features:
        return None, 0.0
    logits = head(hidden.to(head.weight.dtype))  # a residual in fp32 leaves them wider
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    return (head, softcap) if _same(logits, whole["logits"], logits.abs().max()) else (None, 0.0)


def _routers(runs: TrialRuns, labels: Tensor) -> str:
    """Why `output_router_logits` cannot be served of a mixture of experts, or ""."""
    model, at, asked = runs.model, runs.at, {ASKED: True}
    try:
        out = runs.on_all(**asked)
        if out.get(LOGITS) is None:
            return ""
        if how := runs.mixing([LOGITS], **asked):
            return f"its router logits are not those of each token: {how}"
        if out.get(LOSS) is None:
            return ""
        late = runs(runs.ids, attention_mask=(at >= 3).long()[None], **asked)
        for found, rows in ((out, at), (late, at[3:])):
            plan = Plan(Mask([len(rows)]), Layout.contiguous(len(rows), 1))
            ours = balance([x.reshape(TOKENS, -1)[rows] for x in found[LOGITS]], model, plan, LocalComm()).whole
            if not runs.close(found[LOSS].reshape(1, 1), ours.reshape(1, 1)):
                return "its balance loss is not the one of Switch Transformers that seqpar knows"
        with_it, without = (runs.on_all(labels=labels[None], **{ASKED: ask})["loss"] for ask in (True, False))
        more, expected = float(with_it - without), weight_of(model) * float(out[LOSS])
        if abs(more - expected) > (0.05 if runs.rough else 1e-3) * abs(expected) + ROUNDING * abs(float(without)):
            return "it adds another multiple of its balance loss to its loss than its config says"
    except Exception as error:
        return f"trying it on a few tokens failed: {type(error).__name__}: {error}"
    return ""
