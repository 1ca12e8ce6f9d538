"""Models of transformers that several ranks cannot compute, and what is said of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.integrations.hf.models import build

TINY = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


SMALL = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}


def made(model: str, config: str, **sizes: Any) -> Callable[[], PreTrainedModel]:
    """A tiny model of these classes, made when it is called."""
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**sizes))


def with_layer(model: PreTrainedModel, layer: nn.Module) -> PreTrainedModel:
    """A Llama with something else for its first activation."""
    model.model.layers[0].mlp.act_fn = layer
    return model


class Shifted(nn.Module):
    """Mixes a token with the one before."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * x.roll(1, 1)


class Gated(nn.Module):
    """Adds a multiple of the token before. Its last gate, which begins at this value, is the factor."""

    def __init__(self, *begin: float) -> None:
        super().__init__()
        self.gates = nn.Parameter(torch.tensor(begin))

    def forward(self, x: Tensor) -> Tensor:
        *own, before = self.gates
        return sum(own, x) + before * x.roll(1, 1)


class Silent(nn.Module):
    """Gives zeros, whatever it gets and whatever its weights are."""

    def forward(self, x: Tensor) -> Tensor:
        return 0 * x


class Biased(nn.Module):
    """Adds to scores what nobody but the eager function of a model sees."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, *args: Any, **named: Any) -> Any:
        return self.attention(*args, **named, position_bias=torch.ones(1))


def biased() -> PreTrainedModel:
    model = build("llama")
    model.model.layers[0].self_attn = Biased(model.model.layers[0].self_attn)
    return model


def silent() -> PreTrainedModel:
    model = build("llama")
    for layer in model.model.layers:
        layer.self_attn.o_proj = Silent()
    return model


class Mean(nn.Module):
    """A pooler of all tokens."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.mean(1)


def averaging(model: PreTrainedModel) -> PreTrainedModel:
    """A BERT whose pooler is another one."""
    model.base_model.pooler = Mean()
    return model


def scaled_loss() -> PreTrainedModel:
    model = build("llama")
    model.loss_function = lambda **named: named["logits"].square().mean()
    return model


def on_meta() -> PreTrainedModel:
    return with_layer(build("llama"), Shifted()).to("meta")


def filled(model: PreTrainedModel, value: float, part: str = "") -> PreTrainedModel:
    """A model whose weights, or some of them, come later."""
    for name, parameter in model.named_parameters():
        if part in name:
            nn.init.constant_(parameter, value)
    return model


def opt() -> PreTrainedModel:
    sizes = {"vocab_size": 61, "hidden_size": 32, "ffn_dim": 40, "word_embed_proj_dim": 32, "num_hidden_layers": 1}
    return made("OPTForCausalLM", "OPTConfig", **sizes, num_attention_heads=4, dropout=0.0)()


def broken(model: PreTrainedModel) -> PreTrainedModel:
    """A model whose embeddings do not fit its layers."""
    model.get_input_embeddings()[0] = nn.Embedding(62, 31)
    return model


MEETS = "tokens meet outside its attention"


MODELS: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "a base class": (made("BartPretrainedModel", "BartConfig", **SMALL), "BartPretrained.* it has no parameters$"),
    "RWKV": (made("RwkvForCausalLM", "RwkvConfig", vocab_size=61, hidden_size=32, num_hidden_layers=2),
        "carries a state"),
    "xLSTM": (
        made("xLSTMForCausalLM", "xLSTMConfig", vocab_size=61, hidden_size=32, num_blocks=1, num_heads=4),
        "carries a state",
    ),
    "encoder and decoder": (
        made(
            "BartForConditionalGeneration", "BartConfig", vocab_size=61, **SMALL, encoder_attention_heads=4,
            decoder_attention_heads=4,
        ),
        "cross-attention",
    ),
    "trigrams": (
        made(
            "MobileBertForMaskedLM", "MobileBertConfig", **TINY, embedding_size=16, intermediate_size=32,
            intra_bottleneck_size=32,
        ),
        MEETS,
    ),
    "position bias": (made("MPNetForMaskedLM", "MPNetConfig", **TINY, intermediate_size=40),
        "does not go through transformers' AttentionInterface"),
    "images": (
        made("ViTForImageClassification", "ViTConfig", **TINY, intermediate_size=40, image_size=16, patch_size=8),
        "computes pixel_values",
    ),
    "images beside text": (
        made("CLIPModel", "CLIPConfig", text_config=TINY | {"intermediate_size": 40},
             vision_config=TINY | {"intermediate_size": 40, "image_size": 16, "patch_size": 8}),
        "several ranks: it needs pixel_values in addition to input_ids: without, its forward fails on one process too;",
    ),
    "two heads": (made("BertForPreTraining", "BertConfig", **TINY, intermediate_size=40), "its head returns "),
    "pooler": (
        lambda: averaging(made("BertModel", "BertConfig", **TINY, intermediate_size=40)()),
        "also returns pooler_output",
    ),
    "LayerDrop": (
        made(
            "OPTForCausalLM", "OPTConfig", vocab_size=61, hidden_size=32, ffn_dim=40, word_embed_proj_dim=32,
            num_hidden_layers=1, num_attention_heads=4, layerdrop=0.1,
        ),
        "layerdrop=0.1",
    ),
    "weights": (lambda: build("llama", output_attentions=True), "output_attentions=True"),
    "batch norm": (lambda: with_layer(build("llama"), nn.BatchNorm1d(40)), "other tokens or the batch: BatchNorm1d"),
    "convolution": (lambda: with_layer(build("llama"), nn.Conv1d(40, 40, 3)), "see other tokens or the batch: Conv1d"),
    "shifts": (lambda: with_layer(build("llama"), Shifted()), MEETS),
    "shifts behind a gate of 0": (lambda: with_layer(build("llama"), Gated(0.0)), MEETS),
    "behind a gate of nearly 0": (lambda: with_layer(build("llama"), Gated(1e-6)), MEETS),
    "behind one gate of two": (lambda: with_layer(build("llama"), Gated(1.0, 0.0)), MEETS),
    "other arguments": (biased, "passes position_bias to its attention, a bias that the model makes itself; train"),
    "a learned bias": (
        made("T5EncoderModel", "T5Config", vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4),
        "T5Attention passes position_bias to its attention, a bias that the model makes itself; train it",
    ),
    "an edited mask": (made("DogeForCausalLM", "DogeConfig", **TINY, intermediate_size=40), "attention edits its mask"),
    "choices": (made("BertForMultipleChoice", "BertConfig", **TINY, intermediate_size=40), r"\[B, choices, S\]; train"),
    "codebooks below each other": (
        made("MusicgenForCausalLM", "MusicgenDecoderConfig", **TINY, ffn_dim=40, num_codebooks=2, pad_token_id=60),
        r"several ranks: it computes input_ids of several codebooks, \[B \* codebooks, S\]; train it with",
    ),
    "codebooks beside each other": (
        made("CsmBackboneModel", "CsmConfig", **TINY, intermediate_size=40, num_codebooks=3, codebook_size=61,
             num_key_value_heads=2, head_dim=8, pad_token_id=0),
        r"several ranks: it computes input_ids of several codebooks, \[B, S, codebooks\]; train it with",
    ),
    "codebooks, and a fault": (
        lambda: broken(made("MusicgenForCausalLM", "MusicgenDecoderConfig", **TINY, ffn_dim=40, num_codebooks=2,
                            pad_token_id=60)()),
        "its forward of 13 input_ids fails on one process too: RuntimeError",
    ),
    "a mask of its own": (
        made("LayoutLMForTokenClassification", "LayoutLMConfig", **TINY, intermediate_size=40),
        "several ranks: it makes its attention mask itself; train it with",
    ),
    "scores of tokens": (
        made("ElectraForPreTraining", "ElectraConfig", **TINY, intermediate_size=40),
        r"its head returns logits \[3, 7\] of \[3, 7\] tokens",
    ),
    "both directions": (lambda: build("gemma3", use_bidirectional_attention=True), "the mask function .*or_masks"),
    "no weights": (on_meta, "has modules that one of its config lacks: Shifted; load the weights"),
    "zeros": (lambda: filled(build("llama"), 0.0), "the same for every token, as if .*; load or initialise"),
    "ones": (lambda: filled(build("llama"), 1.0), "embed_tokens.weight is the same for every token"),
    "memory of anything": (lambda: filled(build("llama"), float("nan")), "embed_tokens.weight has infinities or NaN"),
    "silent attention": (silent, "its attention changes nothing"),
    "positions of zeros": (lambda: filled(opt(), 0.0, "embed_positions"), "embed_positions.weight is the same for"),
}  # fmt: skip
