"""What of a model cannot be computed from one rank's tokens."""

from __future__ import annotations

from torch import nn

# normalise by statistics over tokens, which here are on many ranks and some of which are pads
_OVER_TOKENS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


def check_model(model: nn.Module) -> None:
    """Return if no module of the model would take statistics over the tokens of one rank alone.

    Norms of a token's own channels (LayerNorm, RMSNorm) are right on any rows. BatchNorm with frozen statistics (in
    eval) is too; InstanceNorm never. A loss made of such statistics is not seen here: make it of `token_mean`.

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
