"""Which modules of transformers are mixers that seqpar computes, and how they find their plan.

Their name says which function replaces their forward. Whether that computes what the module does is tried on a few
tokens when a model becomes parallel (`seqpar.integrations.hf.trial.runs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from seqpar.foreign import name_of
from seqpar.foreign.wrap import ForwardWrapper, replaced
from seqpar.integrations.hf.attention import implementation
from seqpar.integrations.hf.forward import planned
from seqpar.integrations.hf.mask import Rule
from seqpar.integrations.hf.recurrent import linear, mamba, rglru
from seqpar.integrations.hf.recurrent.states import convolved, states_of
from seqpar.ops import bind
from seqpar.ops.attention.source import Given, PlanSource
from seqpar.parallel import surrounding
from seqpar.plan import Plan


def short_conv(mixer: nn.Module, x: Tensor, plan: Tensor) -> Tensor:
    """The mixer of LFM2 and LFM3, a filter alone: [1, T, hidden] in and out."""
    before, after, x = mixer.in_proj(x).chunk(3, -1)
    return mixer.out_proj(after * convolved(mixer.conv, (before * x)[0], plan)[None])  # type: ignore[no-any-return]


# The function of each mixer. It takes the mixer, its input [1, T, hidden], and the handle of a plan and a comm, and
# returns what the mixer does.
MIXERS: dict[str, Callable[..., Any]] = {
    "MambaMixer": mamba.mamba,
    "FalconMambaMixer": mamba.mamba,
    "JambaMambaMixer": mamba.mamba,
    "ZambaMambaMixer": mamba.zamba,
    "RecurrentGemmaRecurrentBlock": rglru.recurrent_gemma,
    "MiniMaxLightningAttention": linear.lightning,
    "Mamba2Mixer": mamba.mamba2,
    "BambaMixer": mamba.mamba2,
    "GraniteMoeHybridMambaLayer": mamba.mamba2,
    "NemotronHMamba2Mixer": mamba.mamba2,
    "Zamba2MambaMixer": mamba.mamba2,
    "FalconH1Mixer": mamba.falcon_h1,
    "Qwen3NextGatedDeltaNet": linear.qwen3_next,
    "Qwen3_5GatedDeltaNet": linear.qwen3_5,
    "Qwen3_5MoeGatedDeltaNet": linear.qwen3_5,
    "OlmoHybridGatedDeltaNet": linear.olmo_hybrid,
    "KimiLinearDeltaAttention": linear.kimi,
    "BailingHybridDeltaAttention": linear.bailing,
    "Lfm2ShortConv": short_conv,
    "Lfm2MoeShortConv": short_conv,
    "Lfm3ShortConv": short_conv,
}
# Those that a split cache does not serve: states of channels, a cache of MiniMax's own, and attention of Zamba 2 that
# several layers share.
UNSPLIT = (
    "MambaMixer", "FalconMambaMixer", "JambaMambaMixer", "ZambaMambaMixer", "RecurrentGemmaRecurrentBlock",
    "MiniMaxLightningAttention", "Zamba2MambaMixer",
)  # fmt: skip
# Buffers of a MiniMax mixer: rounded powers of its rates.
TABLES = ("query_decay", "key_decay", "diagonal_decay")
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
            ) from None
        return Given(of_documents(plan), comm, None)


SURROUNDING = bind(SurroundingDocuments())


def mixers(model: nn.Module) -> list[nn.Module]:
    """The mixers of a model that seqpar computes."""
    return [module for module in model.modules() if name_of(module) in MIXERS]


def unsplit_mixers(model: nn.Module) -> list[str]:
    """The classes of a model's mixers whose states a split cache does not keep."""
    return sorted({name_of(mixer) for mixer in mixers(model)} & set(UNSPLIT))


def begins_at_zero(model: nn.Module) -> bool:
    """Whether mixers of a model begin anew where a position is 0, and nowhere else."""
    return any(MIXERS[name_of(mixer)] is rglru.recurrent_gemma for mixer in mixers(model))


def mix(mixer: nn.Module, forward: Callable[..., Any], hidden_states: Tensor, **named: Any) -> Any:
    """What replaces a mixer's forward: its output, of [1, T, hidden], over this rank's rows of the surrounding plan.

    The plan has the documents, so neither a mask of pads nor document numbers are needed.

    Raises: RuntimeError where no plan surrounds the call; NotImplementedError for a cache.
    """
    if (states := states_of()) is not None:
        return states.mixed(MIXERS[name_of(mixer)], mixer, hidden_states, SURROUNDING)
    if any(named.get(name) is not None for name in CACHES):
        raise NotImplementedError(f"{type(mixer).__name__} got a cache, which is not split over ranks")
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


@contextmanager
def exact_tables(model: nn.Module) -> Iterator[None]:
    """A context in which the tables of decays of a model of 16 bits, rounded powers of its rates, are in 32 bits."""
    with ExitStack() as stack:
        for mixer in model.modules():
            if name_of(mixer) == "MiniMaxLightningAttention" and mixer.slope_rate.dtype.itemsize == 2:
                tables = dict(zip(TABLES, mixer.decay_factors(mixer.slope_rate.float()), strict=True))
                stack.enter_context(replaced(mixer, {"_buffers": mixer._buffers | tables}))
        yield
