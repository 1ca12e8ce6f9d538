"""The gated short convolution of LFM2 and LFM3: no state, only the few rows before each."""

from __future__ import annotations

from torch import Tensor, nn

from seqpar.integrations.hf.recurrent.filters import convolved


def short_conv(mixer: nn.Module, x: Tensor, plan: Tensor) -> Tensor:
    """The mixer of LFM2 and LFM3: [1, T, hidden] in and out."""
    before, after, x = mixer.in_proj(x).chunk(3, -1)
    return mixer.out_proj(after * convolved(mixer.conv, (before * x)[0], plan)[None])  # type: ignore[no-any-return]
