"""Whether a transformers model can be computed row by row: only its attention and known mixers look at other rows.

First the class, config and modules are checked, then a few tokens are tried (`runs`). For a model that is refused,
other ways to compute it are tried, and the error names one that works.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from seqpar.integrations.hf import indexed
from seqpar.integrations.hf.attention import OwnMask
from seqpar.integrations.hf.config import CROSS, EDITED, MEDIA, NO_INTERFACE, caching, mixing_layers, text_of
from seqpar.integrations.hf.heads import LocalHead, has_pad, tried
from seqpar.integrations.hf.positions import dropping_tokens, forgotten, lengthy
from seqpar.integrations.hf.recurrent.mixers import as_written, mixers
from seqpar.integrations.hf.rewritten_attention import rewritten_attention
from seqpar.integrations.hf.trial.runs import NO_ROWS, POOLED, TOKENS, ModelFit, TrialRuns, findings, precise
from seqpar.integrations.hf.trial.twin import NoWeights, check_weights, elsewhere, twin_of, unlike
from seqpar.private import torch as torch_private
from seqpar.private.transformers import can_set_attention
from seqpar.trial.modules import dropping
from seqpar.trial.protect import saved

EMPTY = "it has no parameters"
OWN_MASK = "it makes its attention mask itself"
ALONE = f"its forward of {TOKENS} input_ids fails on one process too"
OF_DECODERS = {"decoder_input_ids", "encoder_hidden_states"}  # arguments of models with cross-attention
# Modules that look at other tokens, or at the batch, by design.
BATCHES = (torch_private.BatchNorm,)
MIXING = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase, torch_private.NormBase)


def refusals(model: PreTrainedModel) -> list[str]:
    """Reasons in a model's class, config and modules against computing it row by row."""
    reasons = [] if next(model.parameters(), None) is not None else [EMPTY]
    if model.main_input_name != "input_ids":
        reasons.append(f"it computes {model.main_input_name}, not input_ids")
    if type(model).__name__.endswith("ForMultipleChoice"):
        reasons.append("it computes input_ids of several choices, [B, choices, S]")
    if not can_set_attention(model)() and not rewritten_attention(model):
        reasons.append(NO_INTERFACE)
    known, config = mixers(model), model.config.get_text_config()
    # an encoder alone may have the config of both
    takes = inspect.signature(type(model).forward).parameters.keys()
    if (model.config.is_encoder_decoder and OF_DECODERS & takes) or getattr(config, "add_cross_attention", False):
        reasons.append(CROSS)
    served = any(find(model) for find in (lengthy, rewritten_attention, dropping_tokens, indexed.layers))
    shared = served or not mixing_layers(config, recurrent=True)
    reasons += mixing_layers(config, recurrent=bool(known), shared=shared)
    for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if getattr(config, name, 0):
            reasons.append(f"{name}={getattr(config, name)} leaves out layers on some ranks and not on others")
    if getattr(config, "output_attentions", False):
        reasons.append("output_attentions=True asks for weights that no rank computes")
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
    """The findings of a trial of a model that already uses seqpar's attention and mixers.

    part: whether it is the base model of the user's one, which makes it.

    Raises: NotImplementedError naming every reason against it, or that its weights are not loaded yet.
    """
    reasons = refusals(model)
    if not reasons:
        if where := elsewhere(model):
            with twin_of(model, where) as twin:
                try:
                    fit = fitting(twin)
                except NotImplementedError as error:
                    raise unlike(model, where, f"it is refused: {error}") from None
            return fit._replace(head=None if fit.head is None else model.get_output_embeddings())
        found = _tried(model)
        if isinstance(found, ModelFit):
            return found
        reasons = found
        if len(reasons) == 1 and NO_ROWS in reasons[0] and model.base_model is not model:
            base, head = fitting(model.base_model, part=True), _head_tried(model)
            if isinstance(head, LocalHead):
                return base._replace(local_head=head, result="logits", shift="none")
            reasons = [head]
    why = f"{type(model).__name__} cannot be computed on several ranks: {', and '.join(reasons)}"
    raise NotImplementedError(why + _remedy(model, reasons, part=part))


def _tried(model: PreTrainedModel) -> ModelFit | list[str]:
    """The findings of a trial, or the reasons against the model."""
    check_weights(model)
    with precise(model), torch.no_grad(), ExitStack() as stack:
        for rotary in lengthy(model):  # which remembers the longest position
            stack.enter_context(saved(rotary))
        runs = TrialRuns(model)
        try:
            return findings(runs) or runs.reasons
        except NoWeights:
            raise
        except Exception as error:
            if alone := _fails_alone(model):
                return [alone]
            if isinstance(error, OwnMask):
                return [*runs.reasons, OWN_MASK]
            if isinstance(error, IndexError) and "tensor of dimension 0" in str(error):
                return [EDITED]
            return [*runs.reasons, f"trying it on a few tokens failed: {type(error).__name__}: {error}"]


def _head_tried(model: PreTrainedModel) -> LocalHead | str:
    """The findings on a head that pools; or why it cannot run on one rank."""
    with precise(model), torch.no_grad(), as_written(model), forgotten(lengthy(model)):
        try:
            return tried(model)
        except Exception as error:
            return f"trying its head on several rows failed: {type(error).__name__}: {str(error).rstrip('.')}"


def _remedy(model: PreTrainedModel, reasons: list[str], *, part: bool) -> str:
    """A way to compute a refused model, or ""."""
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
    """How a model fails on a few tokens by transformers' own code, or what it takes in their place, or ""."""
    at = torch.arange(TOKENS, device=model.device)
    with as_written(model):
        if not (error := _failure(model, at[None])):
            return ""
        books = getattr(model.config, "num_codebooks", None) or 1
        forms = {
            "[B * codebooks, S]": at.expand(books, -1),
            "[B, S, codebooks]": at[None, :, None].expand(1, -1, books),
        }
        for form, ids in forms.items() if books > 1 else ():
            if not _failure(model, ids):
                return f"it computes input_ids of several codebooks, {form}"
    media = [name for name in MEDIA.values() if name in inspect.signature(type(model).forward).parameters]
    if media and "NoneType" in error:
        return f"it needs {', '.join(media)} in addition to input_ids: without, its forward fails on one process too"
    return f"{ALONE}: {error}"


def _failure(model: PreTrainedModel, ids: Tensor) -> str:
    """The error of a model's forward, or ""."""
    try:
        model.forward(input_ids=ids, **caching(model))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
