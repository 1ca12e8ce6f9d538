"""Plans of the layers of a model: the plan of a share with the mask that a layer asks for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from seqpar.comm import Comm
from seqpar.data import Share
from seqpar.facts.mask import Mask
from seqpar.integrations.hf.forward import planned
from seqpar.integrations.hf.mask import Blocks, MaskSummary, Rule, stretches, united
from seqpar.ops.core.agreement import plan_key, remember
from seqpar.plan import Plan

BlocksOf = Callable[[Rule], tuple[Rule, Blocks | None]]


class LayerPlans:
    """Makes the plans of layers, and remembers the rules that all ranks have used.

    who: the model's class. stated: whether plans state documents alone, as those of the planner of models do. blocks:
    the blocks of tokens that see each other whole under a rule, as the tokens of an image do, and the rule with them;
    None if there are none. rules: those of the forward under way or of the last one. known: those of any forward.
    """

    def __init__(self, who: str, comm: Comm, blocks: BlocksOf, *, stated: bool) -> None:
        self.who, self.comm, self.stated = who, comm, stated
        self.rules: list[Rule] = []
        self.known: set[Rule] = set()
        self._blocks = blocks

    def of(self, own: Share) -> Callable[[Plan, Rule], Plan]:
        """What returns the plan of a layer's rule for a share, in a new forward.

        All ranks have the share's plan and had the same rules before, so they derive the same plan for the rule and
        need not compare it.
        """
        self.rules = []

        def make(plan: Plan, rule: Rule) -> Plan:
            layer_plan = self._layer(own, plan, rule)
            if rule in self.known:
                remember(self.comm, plan_key(layer_plan))
            self.known.add(rule)
            self.rules.append(rule)
            return layer_plan

        return make

    def gathered(self, own: Share, plan: Plan, rule: Rule, ids: Tensor) -> Plan:
        """The plan of a share with a rule and the blocks of all ranks' rows. A collective. ids: as of `blocks_of`."""
        numbers = ids[0, : plan.layout.tokens(self.comm.rank)].cpu().numpy().astype(np.int64)
        every = np.concatenate(self.comm.gather(f"{self.who}.forward: blocks of tokens", numbers))
        at = np.concatenate([plan.layout.positions(rank) for rank in range(self.comm.size)])
        lengths = plan.mask.lengths
        told = MaskSummary({}, *stretches(every[np.argsort(at)], np.repeat(np.arange(lengths.size), lengths)))
        blocks = united([told], [lengths])[1]
        if not blocks.starts.size:
            return self._layer(own, plan, rule._replace(block=""))
        layer_plan = self._blocked(own, plan, rule, blocks)
        remember(self.comm, plan_key(layer_plan))  # all ranks made it of the same numbers
        self.rules.append(rule)
        return layer_plan

    def _layer(self, own: Share, plan: Plan, rule: Rule) -> Plan:
        """The plan of a share with a rule, including masked-out tokens between others."""
        rule, blocks = self._blocks(rule)
        if blocks is not None:
            return self._blocked(own, plan, rule, blocks)
        layer_plan = planned(plan, rule, stated=self.stated)
        if own.places is None or not rule.local:
            return layer_plan
        window = (rule.left, None if rule.causal else rule.right)
        return plan.with_mask(own.mask_for(causal=rule.causal, window=window))

    def _blocked(self, own: Share, plan: Plan, rule: Rule, blocks: Blocks) -> Plan:
        """The plan of a share with a rule and blocks."""
        if not self.stated and plan.mask != Mask(plan.mask.lengths):
            raise rule.unlike(plan.mask)
        if rule.chunk:
            raise NotImplementedError(f"a layer of {self.who} attends in chunks, and to whole images or prefixes")
        sides = (own.mask_for(causal=causal, window=(rule.left, None)) for causal in (False, True))
        return plan.with_mask(blocks.mask(rule, *sides))
