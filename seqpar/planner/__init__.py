"""The planner: layout, degrees and widths for a batch, from facts about model and machine. No torch, no devices."""

from seqpar.plan.recurrence import RecurrentLayer
from seqpar.planner.batch import plan_batch
from seqpar.planner.fitting import Ladder, fit
from seqpar.planner.forecast import Forecast
from seqpar.planner.hardware import AttentionCost, Hardware, Link
from seqpar.planner.shape import ModelShape
from seqpar.planner.step import MicroBatch, plan_step
from seqpar.planner.training import Training

__all__ = [
    "AttentionCost", "Forecast", "Hardware", "Ladder", "Link", "MicroBatch", "ModelShape", "RecurrentLayer", "Training",
    "fit", "plan_batch", "plan_step",
]  # fmt: skip
