"""Configs of a parallel model: copies, since other models may share the originals and keep their attention.

::

    original   later changes apply to this model too, from its next forward on
    copy       the model's config, which names seqpar's attention; undo brings its changes to the original
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from seqpar.integrations.hf.config import nested
from seqpar.private.transformers import ATTENTION

_ABSENT = object()


class OwnConfigs:
    """Copies of a model's configs, in their places.

    text: the part of the model whose configs get the name of an attention. They are equal in the whole model, which
    makes masks.
    """

    def __init__(self, model: PreTrainedModel, text: PreTrainedModel, name: str) -> None:
        copies: dict[int, Any] = {}
        self._places: list[tuple[nn.Module, str, PreTrainedConfig, PreTrainedConfig]] = []
        for module in model.modules():
            for key, value in list(module.__dict__.items()):
                if isinstance(value, PreTrainedConfig):
                    own = module.__dict__[key] = copy.deepcopy(value, copies)
                    self._places.append((module, key, value, own))
        pairs = {id(old): (old, new) for _, _, *both in self._places for old, new in nested(*both)}
        self._pairs = list(pairs.values())
        self._before = [_values(old) for old, _ in self._pairs]
        served = [x for part in text.modules() for x in part.__dict__.values() if isinstance(x, PreTrainedConfig)]
        for config in {id(x): x for x in (*served, model.config.get_text_config())}.values():
            for inner, _ in nested(config, config):
                setattr(inner, ATTENTION, name)

    def follow(self) -> None:
        """Take over what was changed in the originals since the last call."""
        for n, (old, new) in enumerate(self._pairs):
            if not _same(old.__dict__, self._before[n]):
                _take_over(new, old.__dict__, self._before[n])
                self._before[n] = _values(old)

    def undo(self) -> None:
        """Put the originals back, with what was changed in the copies meanwhile."""
        self.follow()
        for module, key, old, new in self._places:
            if module.__dict__.get(key) is new:
                module.__dict__[key] = old
        for old, new in self._pairs:
            _take_over(old, new.__dict__, old.__dict__)
            new.__dict__[ATTENTION] = old.__dict__.get(ATTENTION)  # for whoever holds the copy


def _take_over(config: PreTrainedConfig, now: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Change a config's entries from what they were before to what they are now; not those that are configs."""
    for key in {*now, *before} - {ATTENTION}:
        value = now.get(key, _ABSENT)
        if isinstance(value, PreTrainedConfig) or _same(value, before.get(key, _ABSENT)):
            continue
        if value is _ABSENT:
            config.__dict__.pop(key, None)
        else:
            config.__dict__[key] = _kept(value)


def _values(config: PreTrainedConfig) -> dict[str, Any]:
    """A config's entries, which later changes in place do not change."""
    return {key: _kept(value) for key, value in config.__dict__.items()}


def _kept(value: Any) -> Any:
    """A value whose dicts and lists are copied; what they hold is compared by identity first."""
    if type(value) is dict:
        return {key: _kept(x) for key, x in value.items()}
    return [_kept(x) for x in value] if type(value) is list else value


def _same(a: Any, b: Any) -> bool:
    """Whether values are equal; those that do not compare, such as arrays, are not."""
    try:
        return bool(a == b)
    except Exception:
        return False
