"""`parallelize` for a model of plain PyTorch: every forward runs inside `sdpa`, after trials before the first ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from seqpar.comm import Comm
from seqpar.comm.entry import refuse_transforms, uncompiled
from seqpar.foreign.wrap import ParallelModel, refuse_unready
from seqpar.integrations.sdpa.reroute import Local, Rerouting, sdpa
from seqpar.integrations.sdpa.trials import ModelCall, key_of, refused, warn_untried
from seqpar.ops.attention.signature import Accuracy, Numerics
from seqpar.ops.core.agreement import errors_on_all_ranks, gathering
from seqpar.ops.core.compared import leaves
from seqpar.ops.core.regions import under_way
from seqpar.parallel import derived_seed, surrounded, surrounding
from seqpar.plan import Plan
from seqpar.train.checks import StepChecks, expect_loss
from seqpar.trial.modules import check_model, dropping, mixing, renorming
from seqpar.trial.record import under_trial


def parallelize(
    model: nn.Module, comm: Comm, *, plan: Plan | None = None, local: Local | None = None,
    dropout_seed: int | None = None, accuracy: Accuracy = "exact", deterministic: bool = True,
) -> ParallelModel:  # fmt: skip
    """The handle of a model of plain PyTorch whose forwards run inside `sdpa`.

    model: takes this rank's rows and calls PyTorch's attention functions on them. plan: of every forward, by default
    the plan of the `seqpar.parallel` block in which the forward begins. local: as in `sdpa`. dropout_seed: the seeds of
    all forwards follow from it; equal on all ranks. accuracy, deterministic: as in `seqpar.attention`. Backward may run
    anywhere, with checkpoints inside or around the model. Parameters, buffers, hooks and the state dict stay as they
    are; a copy of the model is parallelized too.

    Ranks compare weights at the first forward, and at the first one after they were written otherwise than by a step
    of an optimizer.

    The model is tried before its first forward, in training and in eval, and again when the class or forward of one of
    its modules is another. A trial is a few forwards without gradients, and restores the model.

    Raises: TypeError for a plan that is not a Plan. From the forward: as `sdpa`; RuntimeError without a plan, given or
    surrounding; ValueError for weights that differ. NotImplementedError for a model that mixes rows outside its
    attention, and for one of transformers or with one inside: here if its modules say so, or
    `seqpar.train.check_model`; in the forward if a trial shows it.
    """
    if not isinstance(plan, (Plan, type(None))):
        raise TypeError(
            f"parallelize({type(model).__name__}, sdpa=True, plan={plan!r:.200}): expected the Plan of every forward; "
            "give a Plan, or none and enter seqpar.parallel(plan, comm) around each forward"
        )
    numerics = Numerics.checked(accuracy, deterministic)
    if reasons := mixing(model):
        raise refused(model, reasons)
    check_model(model)
    refuse_unready(model)
    handle, forward = ParallelModel(model, comm), _Forward(comm, plan, local, dropout_seed, numerics)
    handle.put_around(model, forward)
    handle.on_undo(forward.close)
    return handle


class _Forward:
    """Wraps a model's forward: `sdpa`, with a seed for every forward."""

    def __init__(
        self, comm: Comm, plan: Plan | None, local: Local | None, seed: int | None, numerics: Numerics
    ) -> None:  # fmt: skip
        self.comm, self.plan, self.local, self.seed, self.count = comm, plan, local, seed, 0
        self.numerics = numerics
        self._checks = WeakKeyDictionary[nn.Module, StepChecks]()  # of the model and its copies

    def close(self) -> None:
        """Leave optimizers and `sync_gradients` alone."""
        for checks in self._checks.values():
            checks.close()

    def __call__(self, model: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if under_way() and (self.plan is None or self.seed is not None):
            raise NotImplementedError(
                "a checkpoint around a parallelized model would lose the plan that surrounds it and the number of its "
                "forward; checkpoint parts inside the model, or give parallelize its plan and no dropout_seed"
            )
        plan = self._surrounding(model) if self.plan is None else self.plan
        why = None if under_trial() else self._try(model, forward, plan, args, kwargs)
        seed = None if self.seed is None else derived_seed(self.seed, self.count)
        self.count += not under_trial()
        with Rerouting(plan, self.comm, self.local, seed, self.numerics, tries=False):
            try:
                out = forward(*args, **kwargs)
            except RuntimeError as failure:
                if type(failure) is RuntimeError:  # torch's, as of shapes that do not fit
                    self._blame_whole(model, plan, args, kwargs, failure)
                raise
        if why is not None:
            warn_untried(model, why)
        if not under_trial():
            self._note(model, plan.layout.tokens(self.comm.rank), out)
        return out

    @uncompiled
    def _note(self, model: nn.Module, rows: int, out: Any) -> None:
        """Note the results of a forward, whose gradients are to be summed."""
        self._checks[model].note_results(rows, [x for _, x in leaves(out) if isinstance(x, Tensor)])

    @uncompiled
    def _try(self, model: nn.Module, forward: Any, plan: Plan, args: Any, kwargs: Any) -> str | None:
        """Raise NotImplementedError on every rank if the model's rows do not follow. Returns why that is unknown."""
        refuse_transforms(f"parallelize({type(model).__name__})")
        if (checks := self._checks.get(model)) is None:
            checks = self._checks[model] = StepChecks(model, self.comm, within="the forward of parallelize")
        what = f"sdpa: what {type(model).__name__} runs"
        gather = partial(checks.gather, what, facts={"grad enabled": torch.is_grad_enabled()})
        with gathering(what, self.comm, gather) as told:
            with suppress(ValueError):  # of a scripted forward, which has no signature
                inspect.signature(forward).bind(*args, **kwargs)
            told.own = own = key_of(model, self.comm)
        if torch.is_grad_enabled():
            checks.wrapper()
            expect_loss(checks)
        call = ModelCall(model, plan, self.comm, told.every, own)
        if not call.is_due():
            return call.changed()
        if model.training and (reasons := dropping(model) + renorming(model)):
            with errors_on_all_ranks("sdpa", self.comm):
                raise refused(model, reasons)
        return call.untried(call.tried(forward, args, kwargs, partial(sdpa, plan, self.comm, local=self.local)))

    def _blame_whole(self, model: nn.Module, plan: Plan, args: Any, kwargs: Any, failure: Exception) -> None:
        """Raise ValueError if a failed forward got the tokens of all ranks where this rank's rows belong."""
        rows, tokens = plan.rows(self.comm.rank), plan.mask.tokens
        given = {**dict(enumerate(args)), **kwargs}.items()
        shapes = {name: list(x.shape) for name, x in given if isinstance(x, Tensor)}
        whole = [name for name, shape in shapes.items() if tokens in shape and rows not in shape]
        if whole:
            raise ValueError(
                f"sdpa: argument {whole[0]} of {type(model).__name__} is {shapes[whole[0]]}, with all {tokens} tokens "
                f"of the plan, and rank {self.comm.rank} has {rows} rows; give its rows, seqpar.shard(x, plan, rank)"
            ) from failure

    def _surrounding(self, model: nn.Module) -> Plan:
        if not surrounded():
            raise RuntimeError(
                f"no plan surrounds this call of a parallel {type(model).__name__}; call it inside "
                "`with seqpar.parallel(plan, comm):`, or on this rank alone inside `with handle.local():`, where "
                "handle is what `parallelize` returned"
            )
        around = surrounding()
        if around.comm is not self.comm:
            raise ValueError("the plan that surrounds this forward is for another comm than its model's")
        return around.plan
