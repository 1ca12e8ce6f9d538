"""Dynamic sequence parallelism: each stage of a multi-dimensional transformer shards a dimension that it does not mix.

`Space` says the sizes, forms such as ``"(b t) s c"`` say what the axes of a tensor are, verbs (`split`, `switch`,
`gather`) move it, and `Flow` keeps track during one forward. `plan_stages` chooses what each stage shards.

Source: Zhao et al. 2024 (DSP).
"""

from seqpar.dsp.flow import Flow
from seqpar.dsp.planner import StagePlan, plan_stages, rivals
from seqpar.dsp.space import Space
from seqpar.dsp.stage import Stage
from seqpar.dsp.verbs import begin_switch, gather, split, switch, switch_all

__all__ = [
    "Flow", "Space", "Stage", "StagePlan", "begin_switch", "gather", "plan_stages", "rivals", "split", "switch",
    "switch_all",
]  # fmt: skip
