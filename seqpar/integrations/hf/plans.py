"""The plans of a model's batches: those that were made already, and those that a thread makes ahead."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

from transformers import PreTrainedModel

from seqpar.data.union import Brought
from seqpar.facts.value import Ints
from seqpar.integrations.hf.config import PlanState
from seqpar.plan import Plan
from seqpar.train.activations import is_recomputed

Planner = Callable[[Ints, int], Plan]

KEPT = 8  # plans of short batches to keep
SHORT = 1 << 15  # tokens of a short batch; longer ones take long to compute anyway, and their plans take memory


class Plans:
    """Plans of a model's batches; looks among those it has made first.

    plan: the planner, which is asked for every batch; None for that of `planning`. derive: what a thread does with a
    plan that it made ahead. repeats: whether equal documents and states always have equal plans.
    """

    def __init__(
        self, model: PreTrainedModel, *, causal: bool, plan: Planner | None, derive: Callable[[Plan], None]
    ) -> None:  # fmt: skip
        self._model, self._causal, self._plan, self._derive = model, causal, plan, derive
        self.repeats = plan is None
        # cached: it is asked for every batch, and walking a model takes long
        self._recomputing = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
        self._coming: OrderedDict[Hashable, Future[Plan]] = OrderedDict()
        self._kept: OrderedDict[Hashable, Plan] = OrderedDict()

    @cached_property
    def _make(self) -> Callable[[Ints, int, PlanState, Brought | None], Plan]:
        """The planner, of lengths, ranks, the state, and the number of documents that each rank brings."""
        own = self._plan
        if own is not None:
            return lambda lengths, ranks, *_: own(lengths, ranks)
        from seqpar.integrations.hf.planning import ModelPlanner  # loads the package's planner, at the first batch

        return ModelPlanner(self._model, causal=self._causal)

    @property
    def state(self) -> PlanState:
        """The inputs of a plan other than the batch."""
        recomputed = any([module.gradient_checkpointing or is_recomputed(module) for module in self._recomputing])
        return PlanState(recomputed, self._model.device.type)

    def __call__(self, lengths: Ints, ranks: int, *, brought: Brought | None) -> Plan:
        """The plan of documents of these lengths. brought: how many each rank brings; None if all bring the same."""
        key = lengths.tobytes(), ranks, self.state, brought
        if key in self._coming:
            return self._coming.pop(key).result()
        if not self.repeats or int(lengths.sum()) > SHORT:
            return self._make(lengths, *key[1:])
        if key not in self._kept:
            self._kept[key] = self._make(lengths, *key[1:])
        self._kept.move_to_end(key)
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return self._kept[key]

    def start(self, lengths: Ints, ranks: int, thread: ThreadPoolExecutor, *, brought: Brought | None) -> None:
        """Start a thread on the plan of documents that come later, unless the plan is kept."""
        key = lengths.tobytes(), ranks, self.state, brought
        if key not in self._kept:
            self._coming[key] = thread.submit(self._ahead, lengths, *key[1:])
        if len(self._coming) > KEPT:  # the oldest was never asked for
            self._coming.popitem(last=False)

    def _ahead(self, lengths: Ints, *facts: Any) -> Plan:
        plan = self._make(lengths, *facts)
        self._derive(plan)
        return plan

    def forget(self) -> None:
        """Drop the plans made ahead that were not asked for."""
        self._coming.clear()
