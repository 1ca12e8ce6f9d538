"""The short convolution that mixers of every kind begin with; in LFM2 and LFM3 it is the mixer, without a state."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.activations import ACT2FN

from seqpar.integrations.hf.recurrent.states import states_of
from seqpar.recurrent import causal_conv1d

SILU = ("silu", "swish")  # two names of one function, which `causal_conv1d` has inside


def convolved(conv: nn.Conv1d, x: Tensor, plan: Tensor, activation: str | None = None) -> Tensor:
    """This rank's rows [T, C] through a module's causal depthwise filters, in x's dtype.

    As in transformers the product is of the filters' dtype, or of autocast's. plan: the handle of a plan and a comm.
    """
    weight = conv.weight.squeeze(1)
    inside = "silu" if activation in SILU else None
    states = states_of()
    if states is None:
        y = causal_conv1d(x.to(weight.dtype), weight, conv.bias, plan, activation=inside)
    else:
        y = states.convolved(x.to(weight.dtype), weight, conv.bias, inside)
    return (y if inside or activation is None else ACT2FN[activation](y)).to(x.dtype)


def short_conv(mixer: nn.Module, x: Tensor, plan: Tensor) -> Tensor:
    """The mixer of LFM2 and LFM3: [1, T, hidden] in and out."""
    before, after, x = mixer.in_proj(x).chunk(3, -1)
    return mixer.out_proj(after * convolved(mixer.conv, (before * x)[0], plan)[None])  # type: ignore[no-any-return]
