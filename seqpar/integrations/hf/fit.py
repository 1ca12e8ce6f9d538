"""Whether a transformers model can be computed row by row: only its attention and known mixers look at other rows.

First the class, config and modules are checked. Then a probe runs the model on a few tokens, each a document of its
own: once on all rows, and once on some of them in another order, with their positions. If an output row changes, the
model mixes rows elsewhere (a convolution, a recurrence, counted positions). The same runs check that attention and
mixers are what the model computes without seqpar, and the model's loss and its head, so that neither is mistaken for
something else. Meanwhile gates and projections that begin at zero have other values, as they would hide what they
multiply, and products are exact, as rounding would hide small effects.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss, ForTokenClassification

from seqpar.comm import LocalComm
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.integrations.hf.config import ASKED, NO_INTERFACE, caching, config_refusals, hiding, mixing_layers
from seqpar.integrations.hf.experts import LOGITS, LOSS, balance, can_ask, weight_of, without_hooks
from seqpar.integrations.hf.forward import Forward, Noted, called_by, during, padding_of, planned
from seqpar.integrations.hf.heads import POOLER, AtHome, has_pad, pools, tried
from seqpar.integrations.hf.mask import Rule
from seqpar.integrations.hf.positions import counted_pad, counting_of
from seqpar.integrations.hf.recurrent.lightning import exact_tables
from seqpar.integrations.hf.recurrent.mixers import as_written, mixers
from seqpar.integrations.hf.rotary import forgotten, lengthy
from seqpar.integrations.hf.twin import elsewhere, twin_of, unlike
from seqpar.integrations.hf.unlisted import rewritten, unlisted
from seqpar.integrations.hf.weights import NoWeights, check_probed, check_weights
from seqpar.integrations.hf.wide import quantised, wide
from seqpar.integrations.probe.inspection import dropping
from seqpar.integrations.probe.stand_ins import Deterministic
from seqpar.integrations.sdpa.reroute import sdpa
from seqpar.nn.asleep import awake
from seqpar.nn.kinds import name_of
from seqpar.nn.saved_state import eager, saved
from seqpar.nn.wrap import replaced
from seqpar.ops.core.collective_op import layer_calls
from seqpar.parallel import parallel
from seqpar.plan import Plan
from seqpar.train import cross_entropy

TOKENS = 13  # of the probe
ROUNDING = 1e-6  # of sums of 32 bits
ROWS = [9, 2, 3, 12, 4]  # rows of the second run, by number
# Outputs with a row per token; other outputs do not return to their batch.
PER_TOKEN = ("logits", "last_hidden_state")
SHIFTS = {ForCausalLMLoss: "row", ForMaskedLMLoss: "none", ForTokenClassification: "none"}
POOLED, NO_ROWS = "it also returns pooler_output", "none with a row for every token"
EMPTY = "it has no parameters"
ALONE = f"its forward of {TOKENS} input_ids fails on one process too"
NO_MASK = "no layer asked transformers.masking_utils for a mask"
# Modules that look at other tokens, or at the batch, by design.
BATCHES = (nn.modules.batchnorm._BatchNorm,)
MIXING = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase, nn.modules.batchnorm._NormBase)


class ModelFit(NamedTuple):
    """The findings on a model that fits.

    rules: the masks it asks for. recurrent: whether it has mixers. counting: how it counts positions without
    position_ids, as in `positions`. result: the output with a row per token. shift: the rows that labels belong to, as
    in `seqpar.data.share`. loss: why its loss cannot be computed here, or "". by_items: whether it divides its loss by
    num_items_in_batch if that is given; some classes ignore it. head: the layer that makes the logits. softcap: the
    logits' softcap. routers: why `output_router_logits` cannot be served, or "". pooled: whether the base model has a
    pooler. calls: of attention and recurrences in a forward; callers: the classes of the modules that make them.
    at_home: of a head that pools; the rest is then the base model's. of_tokens: whether the logits are of the tokens
    that the output embeddings have.
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
    at_home: AtHome | None = None
    of_tokens: bool = False

    @property
    def causal(self) -> bool:
        """Whether no layer looks ahead."""
        return all(rule.causal for rule in self.rules)


def text_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model of tokens inside a model of images or sound; any other model itself."""
    kinds = model.input_modalities
    if isinstance(kinds, str) or "text" not in kinds or model.config.get_text_config() is model.config:
        return model
    text = model
    while isinstance(inner := text.get_decoder(), PreTrainedModel) and inner is not text:
        text = inner
    return text


def refusals(model: PreTrainedModel) -> list[str]:
    """Reasons in a model's class, config and modules against computing it row by row."""
    reasons = [] if next(model.parameters(), None) is not None else [EMPTY]
    if model.main_input_name != "input_ids":
        reasons.append(f"it computes {model.main_input_name}, not input_ids")
    if type(model).__name__.endswith("ForMultipleChoice"):
        reasons.append("it computes input_ids of several choices, [B, choices, S]")
    if not model._can_set_attn_implementation() and not unlisted(model):
        reasons.append(NO_INTERFACE)
    known = mixers(model)
    served = bool(lengthy(model) or unlisted(model))
    shared = served or not mixing_layers(model.config.get_text_config(), recurrent=True)
    reasons += config_refusals(model, recurrent=bool(known), shared=shared)
    inside = {part for mixer in known for part in mixer.modules()}
    text = text_of(model)
    rows = set(text.modules())  # what lies outside of the text model sees the rank's own images
    mixing = sorted({type(m).__name__ for m in rows if isinstance(m, MIXING) and m not in inside})
    mixing += sorted({type(m).__name__ for m in model.modules() if isinstance(m, BATCHES) and m not in rows})
    if text is not model and any("CrossAttention" in type(m).__name__ for m in rows):
        reasons.append("it has cross-attention to images")
    if mixing:
        reasons.append(f"it has modules that see other tokens or the batch: {', '.join(mixing)}")
    return reasons + dropping(model)


def fitting(model: PreTrainedModel, *, part: bool = False) -> ModelFit:
    """The findings of `refusals` and of the probe on a model that already uses seqpar's attention and mixers.

    part: whether it is the base model of the user's one, which makes it.

    Raises: NotImplementedError naming every reason against it, or that its weights are not loaded yet.
    """
    reasons = refusals(model)
    if not reasons and (where := elsewhere(model)):
        with twin_of(model, where) as twin:
            try:
                fit = fitting(twin)
            except NotImplementedError as error:
                raise unlike(model, where, f"it is refused: {error}") from error
        return fit._replace(head=None if fit.head is None else model.get_output_embeddings())
    if not reasons:
        check_weights(model)
        with _precise(model), torch.no_grad(), ExitStack() as stack:
            for rotary in lengthy(model):  # which remembers the longest position
                stack.enter_context(saved(rotary))
            try:
                fit = _probed(model, reasons)
            except NoWeights:
                raise
            except Exception as error:
                reasons.append(f"trying it on a few tokens failed: {type(error).__name__}: {error}")
                if isinstance(error, IndexError) and "tensor of dimension 0" in str(error):
                    reasons[:] = ["its attention edits its mask, which is the handle of a plan here"]
                if alone := _fails_alone(model):
                    reasons[:] = [alone]
        if not reasons:
            return fit
        if len(reasons) == 1 and NO_ROWS in reasons[0] and model.base_model is not model:
            base, reasons = fitting(model.base_model, part=True), []
            head = _head_tried(model)
            if isinstance(head, AtHome):
                return base._replace(at_home=head, result="logits", shift="none")
            reasons.append(head)
    why = f"{type(model).__name__} cannot be computed on several ranks: {', and '.join(reasons)}"
    raise NotImplementedError(why + _remedy(model, reasons, part=part))


def _head_tried(model: PreTrainedModel) -> AtHome | str:
    """The findings on a head that pools; or why it cannot run at home."""
    with _precise(model), torch.no_grad(), as_written(model), forgotten(lengthy(model)):
        try:
            return tried(model)
        except Exception as error:
            return f"trying its head on several rows failed: {type(error).__name__}: {str(error).rstrip('.')}"


def _remedy(model: PreTrainedModel, reasons: list[str], *, part: bool) -> str:
    """A way to compute a refused model, or "". Ways by seqpar are tried before they are suggested."""
    if reasons in ([NO_INTERFACE], [NO_MASK]) and _by_sdpa(model):
        return "; give sdpa=True and this rank's rows, as its attention is PyTorch's"
    if getattr(model.config, "sparse_prediction", False):
        return "; set sparse_prediction=False in its config"
    pooling = not part and "add_pooling_layer" in inspect.signature(type(model)).parameters
    if pooling and len(reasons) == 1 and POOLED in reasons[0]:
        return "; make it with add_pooling_layer=False"
    if reasons[0].startswith(ALONE) or EMPTY in reasons:
        return ""
    if "padding token" in reasons[0] and not has_pad(model):
        return "; set pad_token_id in its config"
    if any(isinstance(module, BATCHES) for module in model.modules()):
        return ""  # whose result depends on the sequences that a rank has
    return "; train it with data parallelism, whole sequences on each rank"


def _fails_alone(model: PreTrainedModel) -> str:
    """How a model fails on a few tokens by transformers' own code, or ""."""
    at = torch.arange(TOKENS, device=model.device)[None]
    with as_written(model):
        try:
            model.forward(input_ids=at, **caching(model))
        except Exception as error:
            return f"{ALONE}: {type(error).__name__}: {error}"
    return ""


def _by_sdpa(model: PreTrainedModel) -> bool:
    """Whether `seqpar.sdpa` can compute it."""
    at = torch.arange(TOKENS, device=model.device)[None]
    for causal in (True, False):
        plan = Plan(Mask([TOKENS], causal=causal), Layout.contiguous(TOKENS, 1))
        try:
            with _quiet(model), torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("error")
                with sdpa(plan, LocalComm()):
                    model(input_ids=at, position_ids=at, **caching(model))
        except Exception:
            continue
        return True
    return False


def _probed(model: PreTrainedModel, reasons: list[str]) -> ModelFit:
    embedding = model.get_input_embeddings().weight
    vocabulary = len(embedding)
    at = torch.arange(TOKENS, device=embedding.device)
    ids, few = (at * 7 + 5) % vocabulary, torch.tensor(ROWS, device=at.device)
    order = torch.cat([few, at[~torch.isin(at, few)]])
    probe = _Probe(model)
    whole = probe(ids, position_ids=at[None])
    hidden = probe.hidden
    result, pooled = _result(model, whole, reasons)
    recurrent = bool(mixers(model))
    if not probe.rules and not recurrent:
        reasons.append(NO_MASK)
    if reasons:
        return None  # type: ignore[return-value]
    rows = whole[result]
    one = probe(ids, documents=[TOKENS], position_ids=at[None])[result]
    check_probed(model, rows, one)
    if not probe.close(rows[:, few], probe(ids[few], position_ids=few[None])[result]):
        reasons.append(
            "tokens meet outside its attention, or their positions are not their position_ids (convolution, "
            "recurrence, n-grams of tokens, positions that are counted)"
        )
    elif not _by_rows_in_training(probe, result, ids, at, few):
        reasons.append("in training mode, tokens meet outside its attention")
    if not probe.close(one[:, order], probe(ids[order], [TOKENS], order.tolist(), position_ids=order[None])[result]):
        reasons.append("its attention depends on the order in which a rank holds its rows")
    with as_written(model):
        given = {"position_ids": at[None], "return_dict": True} | plain(model) | hiding(model)
        written_out = model.forward(input_ids=ids[None], **given)[result]
    if not probe.close(one, written_out):
        names = " or ".join(sorted({type(mixer).__name__ for mixer in mixers(model)}))
        reasons.append(
            "its attention is not the function of q, k, v and mask that it hands over (a bias, for example)"
            + (f", or its {names} is not the one that seqpar knows" if names else "")
        )
    if reasons:
        return None  # type: ignore[return-value]
    labels = (ids * 3 + 1) % min(vocabulary, whole["logits"].shape[-1] if "logits" in whole else vocabulary)
    shift, loss = _loss(probe, whole, ids, labels, at)
    by_items = not loss and _by_items(model, ids, labels, at)
    head, softcap = _head(probe, whole, hidden)
    counting = counting_of(lambda tokens, **given: probe(tokens, **given)[result], probe.close, ids, counted_pad(model))
    routers = ""
    if can_ask(model):
        with without_hooks(model):
            routers = _routers(probe, ids, labels, at)
    callers = frozenset(map(name_of, (*probe.callers, *(module for module, _ in rewritten(model)))))
    return ModelFit(
        frozenset(probe.rules), recurrent, counting, result, shift, loss, by_items, head, softcap, routers, pooled,
        probe.calls, callers, of_tokens="logits" in whole and tokens_of(model) == whole["logits"].shape[-1],
    )  # fmt: skip


@contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    """A context without dropout and autocast, uncompiled, for a probe."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with eager(model), torch.autocast(model.device.type, enabled=False):
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _precise(model: nn.Module) -> Iterator[None]:
    """A quiet context in which rounding hides nothing, nor do weights that are nearly 0."""
    with _quiet(model), awake(model), exact_tables(model), wide(model):
        yield


class _Probe:
    """Runs of a model on its own.

    rules: the masks that layers asked for. hidden: the base model's last output. calls: the fewest of attention and
    recurrences in a run; callers: modules that called attention. rough: whether its products round more
    than fp32's, as those of quantised weights.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.rules = model, set[Rule]()
        self.state = Forward(self._note, padded=True)
        self.hidden: Tensor | None = None
        self.calls = sys.maxsize
        self.callers: set[nn.Module] = set()
        self.rough = quantised(model)

    def __call__(
        self, ids: Tensor, documents: Sequence[int] = (), order: Sequence[int] = (), **options: Any
    ) -> Any:  # fmt: skip
        """The output for tokens in documents of these lengths (by default one token each), held in this order."""
        mask = Mask(documents or [1] * len(ids))
        plan = Plan(mask, Layout([np.array(order or range(len(ids)))]))
        text = text_of(self.model)
        base = self.model.base_model if text is self.model else text
        hook = None if base is self.model else base.register_forward_hook(self._keep)
        inner = {} if text is self.model else {"forward": partial(self._on_rows, text.forward)}
        state = Forward(note=lambda _, padding: Noted(padding), text=text.config) if inner else self.state
        first = layer_calls.run
        try:
            with parallel(plan, LocalComm()), replaced(text, inner), during(state), called_by(self.callers):
                given = plain(self.model) | hiding(self.model) | options
                out = self.model.forward(input_ids=ids[None], return_dict=True, **given)
            self.calls = min(self.calls, layer_calls.run - first)
            return out
        finally:
            if hook is not None:
                hook.remove()

    def close(self, a: Tensor, b: Tensor) -> bool:
        """Equal up to rounding, row by row.

        Products of other shapes round differently, and rough products may send some row to other experts. Then most
        rows must agree: a model that mixes tokens changes most rows.
        """
        worst = (a.double() - b.double()).abs().reshape(-1, a.shape[-1]).amax(-1)
        worst = worst / a.abs().max().double().clamp(min=1e-30)
        return bool(worst.median() <= 0.1 if self.rough else worst.max() <= 1e-4)

    def _on_rows(self, before: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """A call of a text model inside the model: it makes its masks itself, and some hand on the model's labels."""
        named.pop("labels", None)
        with during(self.state):
            return before(*args, **named | {"attention_mask": padding_of(named.get("attention_mask"))})

    def _note(self, plan: Plan, rule: Rule) -> Plan:
        self.rules.add(rule)
        return planned(plan, rule)

    def _keep(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        self.hidden = out[0] if isinstance(out[0], Tensor) else None


def plain(model: PreTrainedModel) -> dict[str, Any]:
    """The keywords with which a model makes no cache and returns no router logits."""
    return caching(model) | ({ASKED: False} if can_ask(model) else {})


def _result(model: PreTrainedModel, out: Any, reasons: list[str]) -> tuple[str, bool]:
    """The output with a row per token, and whether a pooler's is beside it; others are a reason against the model."""
    fields = {name: value for name, value in out.items() if value is not None}
    result = next((name for name in PER_TOKEN if name in fields), "")
    pooled = fields.pop(POOLER, None)
    if not result or fields[result].dim() != 3 or tuple(fields[result].shape[:2]) != (1, TOKENS):
        reasons.append(f"it returns {sorted(fields)}, {NO_ROWS}")
    elif other := sorted(fields.keys() - {result}):
        reasons.append(f"it also returns {', '.join(other)}, which is not a row per token")
    elif pooled is not None and not pools(model, fields[result], pooled):
        reasons.append(f"{POOLED}, which is not its pooler's of the first row")
    return result, pooled is not None


def _loss(probe: _Probe, whole: Any, ids: Tensor, labels: Tensor, at: Tensor) -> tuple[str, str]:
    """The rows that labels belong to, and why the loss cannot be computed here, or ""."""
    function = probe.model.loss_function
    if "logits" not in whole:
        return "row", "it returns no logits"
    if function not in SHIFTS:
        name = getattr(function, "__name__", repr(function))
        return "row", f"its loss_function {name} is not among {', '.join(known.__name__ for known in SHIFTS)}"
    shift = SHIFTS[function]

    def is_mean(out: Any) -> bool:
        logits = whole["logits"] if out.get("logits") is None else out.logits
        rows, wanted = (logits[0, :-1], labels[1:]) if shift == "row" else (logits[0], labels)
        expected = cross_entropy(rows, wanted, valid=len(wanted))
        return out.get("loss") is not None and _same(out.loss, expected, rows.abs().max() + expected.abs())

    if not is_mean(probe(ids, position_ids=at[None], labels=labels[None])):
        return shift, "its loss is not the cross-entropy of its logits alone"
    with _as_in_training(probe):
        out = probe(ids, position_ids=at[None], labels=labels[None])
    if out.get("logits") is not None and not is_mean(out):
        return shift, "its loss in training is not the cross-entropy of its logits alone"
    return shift, ""


def _same(a: Tensor, b: Tensor, size: Tensor) -> bool:
    """Whether two results of the same numbers, of about this size, are equal but for rounding of 32 bits."""
    return bool((a.double() - b.double()).abs().max() <= ROUNDING * size.double())


def _by_items(model: PreTrainedModel, ids: Tensor, labels: Tensor, at: Tensor) -> bool:
    """Whether a model as written divides its loss by ``num_items_in_batch``: twice as many halve it."""
    if all(p.kind != p.VAR_KEYWORD for p in inspect.signature(type(model).forward).parameters.values()):
        return True  # callers give it to models that take any keyword

    def loss(items: int) -> float:
        given = {"position_ids": at[None], "labels": labels[None], "return_dict": True} | plain(model) | hiding(model)
        return float(model.forward(input_ids=ids[None], num_items_in_batch=at.new_tensor(items), **given).loss)

    with as_written(model):
        try:
            return loss(2 * TOKENS) < 0.75 * loss(TOKENS)
        except Exception:  # it takes no such keyword after all, and a call that gives it raises as on one device
            return True


def _by_rows_in_training(probe: _Probe, result: str, ids: Tensor, at: Tensor, few: Tensor) -> bool:
    """Whether rows follow their order in training mode too."""
    with _as_in_training(probe):
        whole, some = probe(ids, position_ids=at[None]), probe(ids[few], position_ids=few[None])
    given = whole.get(result), some.get(result)
    return any(rows is None for rows in given) or probe.close(given[0][:, few], given[1])


@contextmanager
def _as_in_training(probe: _Probe) -> Iterator[None]:
    """A context in which a model in eval mode is in training mode, but drops nothing and draws equal numbers.

    Neither checkpoints nor statistics of batches: the first warn without gradients, the second would change.
    """
    model, state = probe.model, probe.state
    device = next(model.parameters()).device
    probe.state = state._replace(drops=False)
    try:
        for module in model.modules():
            still = isinstance(module, nn.modules.batchnorm._BatchNorm)
            module.training = not (still or getattr(module, "gradient_checkpointing", False))
        # the numbers of other generators are drawn and go on afterwards as before
        with torch.random.fork_rng([device] if device.type == "cuda" else []), Deterministic({}):
            yield
    finally:
        probe.state = state
        model.eval()


def softcap_of(model: PreTrainedModel) -> float:
    """The softcap of the logits, by the config; 0 for none."""
    config = model.config.get_text_config()
    caps = (getattr(config, name, None) for name in ("final_logit_softcapping", "logits_soft_cap"))
    return float(next((cap for cap in caps if cap), 0.0))


def tokens_of(model: PreTrainedModel) -> int | None:
    """How many tokens the output embeddings have; None if that is unknown."""
    return getattr(model.get_output_embeddings(), "out_features", None)


def softcapped(logits: Tensor, softcap: float) -> Tensor:
    """Logits with their softcap; as they are if that is 0."""
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def _head(probe: _Probe, whole: Any, hidden: Tensor | None) -> tuple[nn.Linear | None, float]:
    """The layer that makes logits of hidden states, if only it and a softcap are between them."""
    head, softcap = probe.model.get_output_embeddings(), softcap_of(probe.model)
    if hidden is None or type(head) is not nn.Linear or "logits" not in whole or hidden.shape[-1] != head.in_features:
        return None, 0.0
    logits = softcapped(head(hidden.to(head.weight.dtype)), softcap)  # a residual in fp32 leaves them wider
    return (head, softcap) if _same(logits, whole["logits"], logits.abs().max()) else (None, 0.0)


def _routers(probe: _Probe, ids: Tensor, labels: Tensor, at: Tensor) -> str:
    """Why `output_router_logits` cannot be served of a mixture of experts, or ""."""
    model, given = probe.model, {"position_ids": at[None], ASKED: True}
    try:
        out, few = probe(ids, **given), torch.tensor(ROWS, device=at.device)
        some = probe(ids[few], position_ids=few[None], **{ASKED: True})
        logits = out.get(LOGITS)
        if logits is None:
            return ""
        for one, other in zip(logits, some[LOGITS], strict=True):
            if not probe.close(one.reshape(TOKENS, -1)[few], other.reshape(len(few), -1)):
                return "its router logits are not those of each token"
        if out.get(LOSS) is None:
            return ""
        late = probe(ids, attention_mask=(at >= 3).long()[None], **{ASKED: True})
        for found, rows in ((out, at), (late, at[3:])):
            plan = Plan(Mask([len(rows)]), Layout.contiguous(len(rows), 1))
            ours = balance([x.reshape(TOKENS, -1)[rows] for x in found[LOGITS]], model, plan, LocalComm()).whole
            if not probe.close(found[LOSS].reshape(1, 1), ours.reshape(1, 1)):
                return "its balance loss is not the one of Switch Transformers that seqpar knows"
        with_it, without = (
            probe(ids, labels=labels[None], **given | {ASKED: asked})["loss"] for asked in (True, False)
        )
        more, expected = float(with_it - without), weight_of(model) * float(out[LOSS])
        if abs(more - expected) > (0.05 if probe.rough else 1e-3) * abs(expected) + ROUNDING * abs(float(without)):
            return "it adds another multiple of its balance loss to its loss than its config says"
    except Exception as error:
        return f"trying it on a few tokens failed: {type(error).__name__}: {error}"
    return ""
