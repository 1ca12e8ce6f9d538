"""Dynamic sequence parallelism: each stage of a multi-dimensional transformer shards a dimension that it does not mix.

`Space` has the sizes of the dimensions; forms such as ``"(b t) s c"`` name the axes of a tensor; verbs (`split`,
`switch`, `gather`, or `move` for any of them) move it. `plan_stages` chooses the sharded dimension of each stage.
`parallelize` applies the plan to an unchanged model, by the `Spec` of its class.

Source: Zhao et al. 2024 (DSP).
"""

from seqpar.dsp.apply import Parallelized, parallelize
from seqpar.dsp.costs import Stage
from seqpar.dsp.grid import attention_plan, grid
from seqpar.dsp.moves import begin_switch, gather, move, split, switch, switch_all
from seqpar.dsp.plan import StagePlan, plan_stages, rivals
from seqpar.dsp.space import Space
from seqpar.dsp.spec import Block, Core, Exit, Spec
from seqpar.dsp.specs import LATTE

__all__ = [
    "LATTE", "Block", "Core", "Exit", "Parallelized", "Space", "Spec", "Stage", "StagePlan", "attention_plan",
    "begin_switch", "gather", "grid", "move", "parallelize", "plan_stages", "rivals", "split", "switch", "switch_all",
]  # fmt: skip
