"""Losses, gradients and statistics of a batch spread over many ranks, matching a single-device run.

Convention: a rank's loss is its share of the global loss, the sum over its tokens divided by the valid tokens of all
ranks, so losses and parameter gradients are *summed* over ranks. If a wrapper averages gradients over n ranks
(DistributedDataParallel, `fully_shard`), give the loss ``average_over=n``.
"""

from seqpar.train.activations import recompute, tile
from seqpar.train.clipping import clip_grad_norm, grad_norm
from seqpar.train.gradients import sync_gradients
from seqpar.train.log_probs import token_log_probs
from seqpar.train.loss import cross_entropy, linear_cross_entropy
from seqpar.train.mean import Mean
from seqpar.train.sums import all_sum, token_mean
from seqpar.train.trace import trace
from seqpar.trial.modules import check_model

__all__ = [
    "Mean", "all_sum", "check_model", "clip_grad_norm", "cross_entropy", "grad_norm", "linear_cross_entropy",
    "recompute", "sync_gradients", "tile", "token_log_probs", "token_mean", "trace",
]  # fmt: skip
