"""Specs of published models, by class name: the libraries are not imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from seqpar.dsp.spec import Block, Core, Exit, Spec


def _latte_dims(model: nn.Module, arguments: Mapping[str, Any]) -> dict[str, int]:
    x, patch = arguments["hidden_states"], model.config.patch_size
    batch, _, frames, height, width = x.shape
    return {"b": batch, "t": frames, "s": (height // patch) * (width // patch)}  # type: ignore[operator]


# Between its blocks the model adds the temporal embedding, [1, all frames, channels], and reshapes by the whole batch,
# so only space may be sharded between them. Sharded frames would get a wrong embedding or none, without an error.
_LATTE_REST = ("s", None)


def _latte_core(rows: str, mixed: str) -> Core:
    form = f"({rows}) h {mixed} d"
    return Core("attn1", dict.fromkeys(("query", "key", "value"), form), form, "h", "attn1.heads", sdpa=True)


LATTE = Spec(
    model="LatteTransformer3DModel",
    dims=_latte_dims,
    blocks=(
        Block(
            "transformer_blocks.{i}",
            {"hidden_states": "(b t) s c"},
            whole=("s",),
            rows={
                "encoder_hidden_states": "(b t) l e",
                "encoder_attention_mask": "(b t) ...",
                "timestep": "(b t) ...",
            },
            rest=_LATTE_REST,
            core=_latte_core("b t", "s"),
        ),
        Block(
            "temporal_transformer_blocks.{i}",
            {"hidden_states": "(b s) t c"},
            whole=("t",),
            rows={"timestep": "(b s) ..."},
            rest=_LATTE_REST,
            core=_latte_core("b s", "t"),
        ),
    ),
    exit=Exit("proj_out", "(b t) s c", _LATTE_REST),
    between=("norm_out",),
    outside=("pos_embed", "caption_projection", "adaln_single"),
    own=("scale_shift_table", "temp_pos_embed"),
)

SPECS = {spec.model: spec for spec in (LATTE,)}
