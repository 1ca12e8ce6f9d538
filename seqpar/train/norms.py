"""Modules that cannot be computed from one rank's tokens."""

from __future__ import annotations

from torch import nn

from seqpar.private import torch as torch_private

# modules that normalise by statistics over tokens, which are on many ranks here, with pads among them
_OVER_TOKENS = (torch_private.BatchNorm, torch_private.InstanceNorm)


def check_model(model: nn.Module) -> None:
    """Raise if a module of the model takes statistics over the tokens of one rank only.

    Norms over a token's own channels (LayerNorm, RMSNorm) are right on any rows. So is BatchNorm with frozen statistics
    (in eval); InstanceNorm never is. A loss that uses such statistics is not detected: compute it with `token_mean`.

    Raises: NotImplementedError naming every such module.
    """
    found = [
        f"{name or 'the model'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if isinstance(module, _OVER_TOKENS) and (module.training or module.running_mean is None)
    ]
    if found:
        raise NotImplementedError(
            f"check_model: {', '.join(found)}: statistics over the tokens of one rank are not those of the batch; "
            "freeze them with .eval(), or use LayerNorm, RMSNorm or GroupNorm over a token's channels"
        )
