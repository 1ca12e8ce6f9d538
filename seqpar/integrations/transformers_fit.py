"""Whether a transformers model can be computed row by row: everything outside its attention must know no other rows.

What a class says of itself is asked first; then a probe runs the model on a few tokens, each of them a document of its
own: all rows, and some of them in another order with their positions. Rows that come out otherwise met another row
somewhere else than in the attention, as in a convolution, a recurrence or positions that are counted. The loss of the
model and its head are compared along the way, so that neither is taken for what it is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss, ForTokenClassification

from seqpar.comm import LocalComm
from seqpar.integrations.transformers import Forward, forward, planned
from seqpar.integrations.transformers_mask import Rule
from seqpar.layout import Layout
from seqpar.mask import Mask
from seqpar.parallel import parallel
from seqpar.plan import Plan
from seqpar.train import cross_entropy

LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
TOKENS = 13  # of the probe
ROWS = [9, 2, 3, 12, 4]  # of them in the second run
# Results that have a row per token; anything else a model returns is not brought home.
PER_TOKEN = ("logits", "last_hidden_state")
SHIFTS = {ForCausalLMLoss: "row", ForMaskedLMLoss: "none", ForTokenClassification: "none"}
# Modules that see other tokens, or the batch, by their nature.
MIXING = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase, nn.modules.batchnorm._NormBase)


class Fit(NamedTuple):
    """What was found of a model that fits.

    rules: the masks it asks for. columns: whether, without position_ids, a token's position is its place in the row.
    result: the field that has a row per token. shift: what labels belong to, as `seqpar.data.share` takes it. loss: why
    its loss is not computed here, or "". head: the layer whose products are the logits, softcap: what they go through.
    """

    rules: frozenset[Rule]
    columns: bool
    result: str
    shift: str
    loss: str
    head: nn.Linear | None
    softcap: float

    @property
    def causal(self) -> bool:
        """Whether no layer looks ahead."""
        return all(rule.causal for rule in self.rules)


def refusals(model: PreTrainedModel) -> list[str]:
    """What a model's class, config and modules say that speaks against computing it row by row."""
    found = []
    config = model.config.get_text_config()
    if not model._can_set_attn_implementation():
        found.append("its attention does not go through transformers' AttentionInterface")
    if model.config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        found.append("it has cross-attention (an encoder and a decoder)")
    if getattr(model, "_is_stateful", False):
        found.append("it carries a state from token to token (a recurrent or state space model)")
    if other := set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES:
        found.append(f"it has layers of types {sorted(other)}")
    for name, rope in _ropes(config):
        if name in ("dynamic", "longrope"):
            found.append(f"its rotary embedding {rope} depends on the longest position of a rank's rows ({name})")
    for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if getattr(config, name, 0):
            found.append(f"{name}={getattr(config, name)} leaves out layers on some ranks and not on others")
    if getattr(config, "output_router_logits", False):
        found.append("output_router_logits=True adds a balance loss of the tokens of one rank; set it to False")
    if getattr(config, "output_attentions", False):
        found.append("output_attentions=True asks for weights that nobody computes")
    mixing = sorted({type(m).__name__ for m in model.modules() if isinstance(m, MIXING)})
    if mixing:
        found.append(f"it has modules that see other tokens or the batch: {', '.join(mixing)}")
    dropping = (m for m in model.modules() if "DropPath" in type(m).__name__ and getattr(m, "drop_prob", 1))
    if any(True for _ in dropping):
        found.append("it drops whole paths of a sequence at random (DropPath)")
    return found


def _ropes(config: Any) -> Iterable[tuple[str, str]]:
    """Rotary types and where the config says them."""
    said = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for name, value in [("", said), *said.items()]:
        if isinstance(value, dict) and "rope_type" in value:
            yield value["rope_type"], name or "of all layers"


def fitting(model: PreTrainedModel) -> Fit:
    """What a model that already asks for seqpar's attention is like, by `refusals` and the probe.

    Raises: NotImplementedError naming everything that speaks against it.
    """
    found = refusals(model)
    if not found:
        try:
            return _probed(model, found)
        except NotImplementedError as error:
            found.append(str(error))
    raise NotImplementedError(
        f"{type(model).__name__} cannot be computed on several ranks: {'; '.join(found)}. For attention by PyTorch's "
        "scaled_dot_product_attention alone, see seqpar.parallelize(model, comm, sdpa=True)"
    )


def _probed(model: PreTrainedModel, found: list[str]) -> Fit:
    parameters = list(model.parameters())
    if any(p.is_meta or isinstance(p, DTensor) for p in parameters):
        raise NotImplementedError(
            "its parameters are on the meta device or sharded, so that it cannot be tried; call parallelize before "
            "fully_shard and after weights are there"
        )
    device = model.get_input_embeddings().weight.device
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = (torch.arange(TOKENS, device=device) * 7 + 5) % vocabulary
    at = torch.arange(TOKENS, device=device)
    few = torch.tensor(ROWS, device=device)
    labels = (ids * 3 + 1) % vocabulary
    rules: set[Rule] = set()
    with _quiet(model), torch.no_grad():
        whole, hidden = _run(model, rules, ids, position_ids=at[None])
        some, _ = _run(model, rules, ids[few], position_ids=few[None])
        padding = (at >= 3).long()[None]
        columns, _ = _run(model, rules, ids, attention_mask=padding)
        result = _result(whole, found)
        y = whole[result]
        if not found and not _close(y[:, few], some[result]):
            found.append(
                "tokens meet outside its attention, or their positions are not their position_ids (convolution, "
                "recurrence, n-grams of tokens, positions that are counted)"
            )
        if not rules:
            found.append("no layer asked transformers.masking_utils for a mask")
        if found:
            raise NotImplementedError("; ".join(found))
        shift, loss = _loss(model, whole, ids, labels, at[None])
        head, softcap = _head(model, whole, hidden)
    return Fit(frozenset(rules), _close(y[:, 3:], columns[result][:, 3:]), result, shift, loss, head, softcap)


@contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    """No dropout, and no hook of anybody's at the model itself."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _run(model: PreTrainedModel, rules: set[Rule], ids: Tensor, **given: Any) -> tuple[Any, Tensor | None]:
    """What the model returns for tokens that are documents of one token each, and the hidden states under its head."""

    def noted(plan: Plan, rule: Rule) -> Plan:
        rules.add(rule)
        return planned(plan, rule)

    kept: list[Tensor] = []
    base = model.base_model
    hook = None
    if base is not model:
        hook = base.register_forward_hook(lambda module, args, out: kept.append(out[0]))
    plan = Plan(Mask([1] * len(ids)), Layout.contiguous(len(ids), 1))
    try:
        with parallel(plan, LocalComm()), forward(Forward(0, noted, padded=True)):
            out = model.forward(input_ids=ids[None], return_dict=True, **caching(model), **given)
    finally:
        if hook is not None:
            hook.remove()
    return out, kept[-1] if kept and isinstance(kept[-1], Tensor) else None


def caching(model: PreTrainedModel) -> dict[str, Any]:
    """The keyword that keeps a model from making a cache, where it could make one."""
    return {"use_cache": False} if hasattr(model.config.get_text_config(), "use_cache") else {}


def _result(out: Any, found: list[str]) -> str:
    """The field with a row per token; others that are there speak against the model."""
    fields = {name: value for name, value in out.items() if value is not None}
    result = next((name for name in PER_TOKEN if name in fields), "")
    if not result or fields[result].dim() != 3 or tuple(fields[result].shape[:2]) != (1, TOKENS):
        found.append(f"it returns {sorted(fields)}, of which none has a row for every token")
    elif other := sorted(fields.keys() - {result}):
        found.append(f"it also returns {', '.join(other)}, which is not a row per token")
    return result


def _close(a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding: products of other shapes round otherwise, and mixtures of experts group rows otherwise."""
    scale = a.abs().max().double()
    worst = (a.double() - b.double()).abs().max()
    return bool(worst <= scale * torch.finfo(a.dtype).eps ** 0.6) and bool(torch.isfinite(scale))


def _loss(model: PreTrainedModel, whole: Any, ids: Tensor, labels: Tensor, at: Tensor) -> tuple[str, str]:
    """What labels belong to, and why the loss is not computed here, if it is not."""
    function = model.loss_function
    name = getattr(function, "__name__", repr(function))
    if "logits" not in whole or function not in SHIFTS:
        return "row", f"its loss {name} is not a mean over tokens"
    shift = SHIFTS[function]
    logits = whole["logits"][0]
    labels = labels % logits.shape[-1]
    with_labels, _ = _run(model, set(), ids, position_ids=at, labels=labels[None])
    moved = labels.roll(-1) if shift == "row" else labels.clone()
    if shift == "row":
        moved[-1] = -100
    expected = cross_entropy(logits, moved, valid=int((moved != -100).sum()))
    if with_labels.get("loss") is None or not _close(with_labels["loss"].float()[None], expected.float()[None]):
        return shift, "its loss is not the cross-entropy of its logits alone"
    return shift, ""


def _head(model: PreTrainedModel, whole: Any, hidden: Tensor | None) -> tuple[nn.Linear | None, float]:
    """The layer that makes logits of hidden states, where it and a softcap are all there is between them."""
    head = model.get_output_embeddings()
    softcap = float(getattr(model.config.get_text_config(), "final_logit_softcapping", None) or 0.0)
    if hidden is None or type(head) is not nn.Linear or "logits" not in whole or hidden.shape[-1] != head.in_features:
        return None, 0.0
    logits = head(hidden)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    return (head, softcap) if _close(logits, whole["logits"]) else (None, 0.0)
