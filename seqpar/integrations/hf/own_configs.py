"""Configs of a parallel model: copies, since other models may share the originals and keep their attention.

original   whoever changes it afterwards means this model too ─► taken over at the next forward
   │ undo: changes of the copy go back
  copy     the model's config, which names seqpar's attention
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from seqpar.integrations.hf.attention import nested

ATTENTION = "_attn_implementation_internal"
_ABSENT = object()


class OwnConfigs:
    """Copies of a model's configs, in their places.

    text: the part of the model whose configs get the name of an attention. They are equal in the whole model, which
    makes masks.
    """

    def __init__(self, model: PreTrainedModel, text: PreTrainedModel, name: str) -> None:
        copies: dict[int, Any] = {}
        self._places: list[tuple[nn.Module, str, PreTrainedConfig]] = []
        for module in model.modules():
            own = [(key, value) for key, value in module.__dict__.items() if isinstance(value, PreTrainedConfig)]
            self._places += [(module, *each) for each in own]
        for module, key, value in self._places:
            module.__dict__[key] = copy.deepcopy(value, copies)
        pairs = [(value, module.__dict__[key]) for module, key, value in self._places]
        self._pairs = list({id(old): (old, new) for pair in pairs for old, new in nested(*pair)}.values())
        self._before = [_values(old) for old, _ in self._pairs]
        served = [x for part in text.modules() for x in part.__dict__.values() if isinstance(x, PreTrainedConfig)]
        for config in {id(x): x for x in (*served, model.config.get_text_config())}.values():
            for inner, _ in nested(config, config):
                inner._attn_implementation_internal = name

    def follow(self) -> None:
        """Take over what was changed in the originals since the last call."""
        for n, (old, new) in enumerate(self._pairs):
            now, before = old.__dict__, self._before[n]
            if now == before:
                continue
            self._before[n] = _values(old)
            for key in now.keys() | before.keys():
                value = now.get(key, _ABSENT)
                if key == ATTENTION or isinstance(value, PreTrainedConfig) or value == before.get(key, _ABSENT):
                    continue
                if value is _ABSENT:
                    new.__dict__.pop(key, None)
                else:
                    new.__dict__[key] = copy.deepcopy(value)

    def undo(self) -> None:
        """Put the originals back, with what was changed in the copies meanwhile."""
        self.follow()
        for module, key, value in self._places:
            module.__dict__[key] = value
        for old, new in self._pairs:
            for key, value in new.__dict__.items():
                if key != ATTENTION and not isinstance(value, PreTrainedConfig):
                    old.__dict__[key] = value


def _values(config: PreTrainedConfig) -> dict[str, Any]:
    """A config's entries; copied are those that may be changed in place and compare by their values."""
    return {key: copy.deepcopy(x) if isinstance(x, (dict, list)) else x for key, x in config.__dict__.items()}
