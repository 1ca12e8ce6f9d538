"""Fingerprints of a model's weights, and the forwards before which ranks compare them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn

from seqpar.foreign.fingerprint import SPREAD, hashed
from seqpar.foreign.kinds import name_of

# Numbers of the forwards before which ranks compare weights: the first, which detects weights drawn or loaded
# differently, and some later ones, by which an optimizer has stepped even if gradients are accumulated.
COMPARED = frozenset({0, 1, 2, 4, 8, 16})


class WeightsHash(NamedTuple):
    """A fingerprint of a model's weights before a forward, for the comparison of ranks.

    stepped: whether an optimizer may have stepped since the first one; buffers count before the first one alone, since
    a step does not write to them.
    """

    stepped: bool
    value: int


def check_weights(what: str, every: Sequence[WeightsHash | None]) -> None:
    """Raise ValueError if the weights of two ranks differ. what: begins the message.

    every: by rank; None where a rank compares its weights before other forwards, as one that froze a parameter does.
    """
    first: dict[bool, tuple[int, int]] = {}
    for rank, weights in enumerate(every):
        if weights is None:
            continue
        before, value = first.setdefault(weights.stepped, (rank, weights.value))
        if value == weights.value:
            continue
        if weights.stepped:
            raise ValueError(
                f"{what}: weights differ between rank {before} and rank {rank} since an optimizer stepped with "
                "gradients that are shares; start again from equal weights, and call "
                "seqpar.train.sync_gradients(model.parameters(), comm) before every step of the optimizer"
            )
        raise ValueError(
            f"{what}: weights differ between rank {before} and rank {rank} (by fingerprint); load the same ones on "
            "every rank, or draw them with the same seed"
        )


class WeightChecks:
    """Says before which forwards of a model ranks compare its weights: see `COMPARED`.

    After the first one only forwards with gradients count, as optimizers step between these. Parameters that are
    trainable for the first time start a count of their own, and other modules, such as adapters, start anew.
    """

    def __init__(self) -> None:
        self._modules: list[ref[nn.Module]] = []  # that the counts are for
        self._counts: dict[int, int] = {}  # forwards by a hash of the parameters that are trainable
        self._now = 0

    def weights(self, model: nn.Module, modules: Sequence[nn.Module]) -> WeightsHash | None:
        """The weights for the forward that begins, None if this rank compares none. modules: all of the model."""
        if len(modules) != len(self._modules) or any(a() is not b for a, b in zip(self._modules, modules)):
            self._modules, self._counts = list(map(ref, modules)), {}
        parameters = [p for module in modules for p in module._parameters.values() if p is not None]
        self._now = hash(tuple([p.requires_grad for p in parameters]))
        count = self._counts.get(self._now, 0)
        if count not in COMPARED or (count and not torch.is_grad_enabled()):
            return None
        return WeightsHash(count > 0, weights_of(model, buffers=not count))

    def passed(self) -> None:
        """Count that forward, since all ranks have begun it."""
        count = self._counts.get(self._now, 0)
        if not count or torch.is_grad_enabled():
            self._counts[self._now] = count + 1


def weights_of(model: nn.Module, *, buffers: bool = True) -> int:
    """A fingerprint of a model's parameters, and of its buffers, without those that a wrapper has sharded.

    Not taken from the state dict: reading that makes fully_shard drop the weights that a forward needs.
    """
    found, seen = 0, set[int]()
    for path, module in model.named_modules():
        for name, x in (*module._parameters.items(), *(module._buffers.items() if buffers else ())):
            if x is not None and id(x) not in seen:
                seen.add(id(x))
                if x.is_meta and (x := _offloaded(module, name)) is None:
                    _warn_of_meta(model, f"{path}.{name}".lstrip("."))
                found = (found * SPREAD + hashed(x)) % (1 << 64)
    return found


def _offloaded(module: nn.Module, name: str) -> Tensor | None:
    """A parameter or buffer that accelerate has put away until the module's forward."""
    hook = module.__dict__.get("_hf_hook")
    for each in getattr(hook, "hooks", [hook]):
        stored = getattr(each, "weights_map", None)
        if stored is not None and name in stored:
            return stored[name]  # type: ignore[no-any-return]
    return None


_told: WeakSet[nn.Module] = WeakSet()


def _warn_of_meta(model: nn.Module, name: str) -> None:
    if model not in _told:
        _told.add(model)
        warnings.warn(
            f"{name} of a parallel {name_of(model)} is on the meta device, so that ranks do not compare its values",
            stacklevel=2,
        )
