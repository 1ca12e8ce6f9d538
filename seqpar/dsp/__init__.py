"""Dynamic sequence parallelism: each stage of a multi-dimensional transformer shards a dimension that it does not mix.

`Space` says the sizes, forms such as ``"(b t) s c"`` say what the axes of a tensor are, verbs (`split`, `switch`,
`gather`) move it, and `Flow` keeps track during one forward. `plan_stages` chooses what each stage shards, and
`parallelize` applies it to a model that knows nothing of this, by a `Spec` of its class.

Source: Zhao et al. 2024 (DSP).
"""

from seqpar.dsp.attend import attention_plan
from seqpar.dsp.flow import Flow
from seqpar.dsp.grid import grid
from seqpar.dsp.models import LATTE
from seqpar.dsp.parallelize import Parallelized, parallelize
from seqpar.dsp.planner import StagePlan, plan_stages, rivals
from seqpar.dsp.space import Space
from seqpar.dsp.spec import Block, Core, Exit, Spec
from seqpar.dsp.stage import Stage
from seqpar.dsp.verbs import begin_switch, gather, split, switch, switch_all

__all__ = [
    "LATTE", "Block", "Core", "Exit", "Flow", "Parallelized", "Space", "Spec", "Stage", "StagePlan", "attention_plan",
    "begin_switch", "gather", "grid", "parallelize", "plan_stages", "rivals", "split", "switch", "switch_all",
]  # fmt: skip
