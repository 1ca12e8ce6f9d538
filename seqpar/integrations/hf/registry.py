"""The name "seqpar" in transformers' registries of attention and masks; importing this module registers it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from seqpar.integrations.hf.attention import KEY, attention_function, mask_of
from seqpar.integrations.hf.config import nested
from seqpar.private.transformers import ATTENTION, registered


@contextmanager
def implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """The model with another attention implementation, on one rank, until the block ends."""
    own = {id(m.config): m.config for m in model.modules() if isinstance(m.__dict__.get("config"), PreTrainedConfig)}
    with ExitStack() as stack:
        for config in [inner for outer in own.values() for inner, _ in nested(outer, outer)]:
            stack.callback(setattr, config, ATTENTION, getattr(config, ATTENTION))
            setattr(config, ATTENTION, name)
        yield


def register() -> None:
    """Enter the key in the registries, as importing this module does."""
    AttentionInterface.register(KEY, attention_function)
    AttentionMaskInterface.register(KEY, mask_of)


def unregister() -> None:
    """Undo `register`; models that still use the key then fail with its name."""
    for registry in (AttentionInterface, AttentionMaskInterface):
        registered(registry).pop(KEY, None)


register()
