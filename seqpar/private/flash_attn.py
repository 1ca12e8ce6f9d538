"""Private names of FlashAttention 2, 3 and 4, which are three distributions. They are imported at the first call."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from seqpar.private import PrivateNames

names = PrivateNames("flash-attn", "2.8", globals(), {})
varlen_forward = names.attribute("_flash_attn_varlen_forward")
varlen_backward = names.attribute("_flash_attn_varlen_backward")
of_4 = PrivateNames("flash-attn-4", "4.0.0b12 to 4.0.0b27", globals(), {})
forward_of_4, backward_of_4 = of_4.attribute("_flash_attn_fwd"), of_4.attribute("_flash_attn_bwd")


def interface_of_2() -> Any:
    """The module that has the functions of FlashAttention 2."""
    return import_module("flash_attn.flash_attn_interface")


def operators_of_3() -> Any:
    """The operators of FlashAttention 3 in ``torch.ops``, which a private module registers."""
    import_module("flash_attn_3._C")
    return torch.ops.flash_attn_3


def interface_of_4() -> Any:
    """The module that has the functions of FlashAttention 4."""
    return import_module("flash_attn.cute.interface")
