"""Which modules of transformers are mixers that seqpar computes, and how they find their plan.

Their name says which function replaces their forward. Whether that computes what the module does is tried on a few
tokens when a model becomes parallel (`seqpar.integrations.hf.trial.runs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from seqpar.foreign.kinds import name_of
from seqpar.foreign.wrap import ForwardWrapper, replaced
from seqpar.integrations.hf.forward import planned
from seqpar.integrations.hf.mask import Rule
from seqpar.integrations.hf.recurrent.delta import kimi, olmo_hybrid, qwen3_5, qwen3_next
from seqpar.integrations.hf.recurrent.lightning import lightning
from seqpar.integrations.hf.recurrent.mamba import mamba, zamba
from seqpar.integrations.hf.recurrent.mamba2 import falcon_h1, mamba2
from seqpar.integrations.hf.recurrent.rglru import BLOCK, recurrent_gemma
from seqpar.integrations.hf.recurrent.shortconv import short_conv
from seqpar.integrations.hf.registry import implementation
from seqpar.ops import bind
from seqpar.ops.attention.source import Given, PlanSource
from seqpar.parallel import surrounding
from seqpar.plan import Plan

# Functions of a mixer, its input [1, T, hidden], and the handle of a plan and a comm; they return what the mixer does.
MIXERS: dict[str, Callable[[nn.Module, Tensor, Tensor], Any]] = {
    "MambaMixer": mamba,
    "FalconMambaMixer": mamba,
    "JambaMambaMixer": mamba,
    "ZambaMambaMixer": zamba,
    BLOCK: recurrent_gemma,
    "MiniMaxLightningAttention": lightning,
    "Mamba2Mixer": mamba2,
    "BambaMixer": mamba2,
    "GraniteMoeHybridMambaLayer": mamba2,
    "NemotronHMamba2Mixer": mamba2,
    "Zamba2MambaMixer": mamba2,
    "FalconH1Mixer": falcon_h1,
    "Qwen3NextGatedDeltaNet": qwen3_next,
    "Qwen3_5GatedDeltaNet": qwen3_5,
    "Qwen3_5MoeGatedDeltaNet": qwen3_5,
    "OlmoHybridGatedDeltaNet": olmo_hybrid,
    "KimiLinearDeltaAttention": kimi,
    "Lfm2ShortConv": short_conv,
    "Lfm2MoeShortConv": short_conv,
    "Lfm3ShortConv": short_conv,
}
CACHES = ("cache", "cache_params", "past_key_values")  # the first since transformers 5.24


def of_documents(plan: Plan) -> Plan:
    """A plan as mixers see it: a recurrence runs over whole documents in order, whatever the masks of attention are."""
    return planned(plan, Rule(causal=True))


class SurroundingDocuments(PlanSource):
    """Looks up the surrounding plan at the time of a call, in compiled layers too, as mixers see it."""

    def now(self, given: Sequence[Any], seed: int | None) -> Given:
        """The surrounding plan's documents and its comm."""
        try:
            plan, comm, _, _ = surrounding()
        except RuntimeError as error:
            raise RuntimeError(
                f"a recurrent layer found no plan: {error}; call the model that was given to seqpar.parallelize, or "
                "work inside handle.local()"
            ) from error
        return Given(of_documents(plan), comm, None)


SURROUNDING = bind(SurroundingDocuments())


def mixers(model: nn.Module) -> list[nn.Module]:
    """The mixers of a model that seqpar computes."""
    return [module for module in model.modules() if name_of(module) in MIXERS]


def begins_at_zero(model: nn.Module) -> bool:
    """Whether mixers of a model begin anew where a position is 0, and nowhere else."""
    return any(name_of(mixer) == BLOCK for mixer in mixers(model))


def mix(mixer: nn.Module, forward: Callable[..., Any], hidden_states: Tensor, **named: Any) -> Any:
    """What replaces a mixer's forward: its output, of [1, T, hidden], over this rank's rows of the surrounding plan.

    The plan has the documents, so neither a mask of pads nor document numbers are needed.

    Raises: RuntimeError where no plan surrounds the call; NotImplementedError for a cache.
    """
    if any(named.get(name) is not None for name in CACHES):
        raise NotImplementedError(f"{type(mixer).__name__} got a cache, which is not spread over ranks")
    if hidden_states.dim() != 3 or len(hidden_states) != 1:
        raise ValueError(
            f"{type(mixer).__name__} got {list(hidden_states.shape)} under a plan, whose rows are [1, T, hidden]"
        )
    return MIXERS[name_of(mixer)](mixer, hidden_states, SURROUNDING)


@contextmanager
def as_written(model: nn.Module) -> Iterator[None]:
    """The model by transformers' own code until the block ends: its "eager" attention, and mixers of its classes."""
    with ExitStack() as stack:
        stack.enter_context(implementation(model, "eager"))
        for module in model.modules():
            own = {name: x.forward for name, x in module.__dict__.items() if isinstance(x, ForwardWrapper)}
            stack.enter_context(replaced(module, own))
        yield
