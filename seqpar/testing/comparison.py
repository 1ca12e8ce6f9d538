"""`compare`: a training program on one rank and on several, value by value."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from seqpar.comm import Comm
from seqpar.facts.value import integer
from seqpar.launch import run_processes, run_threads
from seqpar.ops.core.collective_op import is_dtensor
from seqpar.train.wrappers import local

Program = Callable[[Comm], Iterator[tuple[nn.Module, Tensor | float]]]
Values = dict[tuple[str, str], Tensor]  # ("loss", ""), or the kind of a `Row` and a name -> the whole tensor
TIMEOUT = 300.0  # seconds that a rank waits for another one, which may compile or load a model
SHOWN = 20  # rows that are printed


class Row(NamedTuple):
    """One value of one step, on one rank and on several.

    kind: "loss", "gradient", "weight" or "buffer". difference: the largest distance of an element, on any rank, from
    its value on one rank, relative to the largest element. allowed: the distance that rounding explains. ranks: those
    whose distance is larger. apart: those whose distance from rank 0's value is larger.
    """

    step: int
    kind: str
    name: str
    difference: float
    allowed: float
    ranks: tuple[int, ...]
    apart: tuple[int, ...]


@dataclass(repr=False)
class Comparison:
    """The result of `compare`. rows: all values that it compares, the largest ``difference / allowed`` first."""

    ranks: int
    rows: list[Row]

    @property
    def equal(self) -> bool:
        """Whether all values match the run on one rank, up to rounding."""
        return not any(row.ranks or row.apart for row in self.rows)

    def __repr__(self) -> str:
        wrong = sum(bool(row.ranks or row.apart) for row in self.rows)
        verdict = f"{wrong} of {len(self.rows)} values differ" if wrong else f"all {len(self.rows)} values agree"
        lines = [["step", "value", "difference", "allowed", "on ranks"]]
        for row in self.rows[:SHOWN]:
            where = ", ".join(map(str, row.ranks)) or "-"
            if row.apart:
                where += f" ({', '.join(map(str, row.apart))} not as rank 0)"
            value = f"{row.kind} {row.name}".strip()
            lines.append([str(row.step), value, f"{row.difference:.1e}", f"{row.allowed:.1e}", where])
        widths = [max(map(len, column)) for column in zip(*lines)]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
        left = [f"and {len(self.rows) - SHOWN} more"] if len(self.rows) > SHOWN else []
        return "\n".join([f"{self.ranks} ranks against one: {verdict}", *table, *left])


def compare(program: Program, *, ranks: int = 2, steps: int = 1, processes: bool = False) -> Comparison:
    """Run a training program on one rank and on `ranks` ranks, and compare loss, gradients, weights and saved buffers.

    program: a generator function. ``program(comm)`` builds the model with a fixed seed, makes it parallel over comm,
    and yields ``(model, loss)`` after each ``optimizer.step()``, with the gradients still in place. loss is the
    global one, the same on every rank. Batches must not depend on the number of ranks, and the model must not use
    dropout. A mistake that the program makes on one rank too, such as labels that are shifted twice, does not show.

    steps: how many steps are compared; the program is closed after them. processes: ranks are processes of a gloo
    group, as DDP and FSDP2 need, and the program is a function of an importable module. Otherwise they are threads
    that take turns, each with its own random numbers of torch, NumPy and Python. DTensors are compared whole.

    Tolerance: ranks add the same terms in another order. The result of a row costs about one product and sum for each
    of the model's N weights. Roundings that add up like a random walk reach ``sqrt(N) * eps`` of the dtype of sums
    (Higham, Accuracy and Stability of Numerical Algorithms, section 2.8). In 16 bits the result of each of about T
    operations, T the number of parameters, is rounded too: ``sqrt(T) * eps``. Four times the sum of both is allowed,
    relative to the loss (at least 1), to the largest gradient of all parameters, and to the largest element of a weight
    or buffer. A gradient may be a difference of terms as large as other gradients, as that of a key's bias, which is 0.
    An optimizer such as Adam turns the rounding of such a gradient into a whole step. So the program also runs on one
    rank with gradients that lie that far off before each optimizer's step, and twice the resulting distance is allowed
    too. In float64 nearly every mistake exceeds this; in 16 bits, under autocast, and where a model multiplies
    roundings, compare in float64 instead. Buffers are those of the state dict; others may hold a rank's own rows.

    Raises: the error of the rank that failed first, other than a `PeerError` if there is one. TypeError if program is
    not such a generator function; ValueError if it yields fewer than `steps` times.
    """
    ranks, steps = integer("ranks", ranks, 2), integer("steps", steps, 1)

    def run(size: int, *, nudged: bool = False) -> list[list[Values]]:
        if processes:
            return run_processes(size, _run, program, steps, nudged, timeout=TIMEOUT)
        return run_threads(size, _run, program, steps, nudged, timeout=TIMEOUT, turns=True)

    (one,), (off,), several = run(1), run(1, nudged=True), run(ranks)
    rows = [row for step in range(steps) for row in _rows(step, one[step], off[step], [own[step] for own in several])]
    rows.sort(key=lambda row: row.difference / max(row.allowed, 1e-300), reverse=True)
    return Comparison(ranks, rows)


def _run(comm: Comm, program: Program, steps: int, nudged: bool) -> list[Values]:
    """What the program yields on this rank. nudged: whether its gradients are moved as far as rounding may."""
    hook = register_optimizer_step_pre_hook(_nudge) if nudged else None
    try:
        run: Any = program(comm)
        if not isinstance(run, Generator):
            raise TypeError(
                f"compare: program returned {type(run).__name__}, expected a generator; yield (model, loss) after "
                "each optimizer.step()"
            )
        with closing(run):
            found = [_values(given) for given in islice(run, steps)]
    finally:
        if hook is not None:
            hook.remove()
    if len(found) < steps:
        raise ValueError(
            f"compare: program yielded {len(found)} times, expected steps={steps}; yield (model, loss) after each "
            "optimizer.step()"
        )
    return found


def _values(given: Any) -> Values:
    """Copies of the loss and of whole gradients, weights and buffers of the state dict."""
    if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], nn.Module)):
        raise TypeError(f"compare: program yielded {type(given).__name__}, expected (model, loss)")
    model, loss = given
    loss = loss if isinstance(loss, Tensor) else torch.tensor(loss, dtype=torch.float64, device="cpu")
    found = {("loss", ""): _whole(loss)}
    for name, p in model.named_parameters():
        name = _plain(name)
        if p.grad is not None:
            found["gradient", name] = _whole(p.grad)
        found["weight", name] = _whole(p)
    saved = model.state_dict().keys()
    for name, x in model.named_buffers():
        if name in saved:  # others, such as a cache of this rank's rows, may differ
            found["buffer", _plain(name)] = _whole(x)
    return found


def _plain(name: str) -> str:
    """The name of a parameter or buffer without DDP and `torch.compile`."""
    return name.removeprefix("module.").replace("_orig_mod.", "")


def _whole(x: Any) -> Tensor:
    """A copy in memory of the host. Collective for DTensors."""
    return (x.detach().full_tensor() if is_dtensor(x) else x.detach()).to("cpu", copy=True)


def _nudge(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Move each gradient that an optimizer is about to use towards 0, by as much as rounding may."""
    several = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    # not the versions of gradients, by which `sync_gradients` knows its sums
    gradients = [local(p.grad).data for p in several]
    far = _tolerance([local(p) for p in several]) * max((_largest(g) for g in gradients), default=0.0)
    for g in gradients:
        g.sub_(g.sign(), alpha=far)


def _tolerance(weights: list[Tensor]) -> float:
    """How far results of a model with these weights may lie apart, relative to their terms: see `compare`."""
    eps = max((torch.finfo(x.dtype).eps for x in weights if x.is_floating_point()), default=0.0)
    sums = min(eps, torch.finfo(torch.float32).eps)  # 16 bits are added in single precision
    stored = eps if eps > sums else 0.0
    return 4 * (math.sqrt(sum(x.numel() for x in weights)) * sums + math.sqrt(len(weights)) * stored)


def _rows(step: int, one: Values, off: Values, several: list[Values]) -> list[Row]:
    """The rows of a step. one, off: on one rank, as it is and nudged. several: on each of several ranks."""
    weights = [x for (kind, _), x in one.items() if kind == "weight"]
    tolerance = _tolerance(weights)
    gradients = max((_largest(x) for (kind, _), x in one.items() if kind == "gradient"), default=0.0)
    rows = []
    for kind, name in dict.fromkeys(key for values in (one, *several) for key in values):
        values = [found.get((kind, name)) for found in (one, off, *several)]
        if kind == "gradient":  # one that was not computed is 0
            like = next(x for x in values if x is not None)
            values = [torch.zeros_like(like) if x is None else x for x in values]
        expected, moved, *own = values
        size = 0.0 if expected is None else _largest(expected)
        scale = {"loss": max(size, 1.0), "gradient": gradients}.get(kind, size)
        rough = tolerance if kind != "buffer" or expected is None else _tolerance([*weights, expected])
        allowed = rough * scale + 2 * _distance(expected, moved)
        if not math.isfinite(allowed):  # a value that is not finite on one rank equals nothing
            allowed = 0.0
        unit = size if 0 < size < math.inf else 1.0
        distances = [_distance(expected, x) for x in own]
        away = tuple(rank for rank, far in enumerate(distances) if far > allowed)
        apart = tuple(rank for rank, x in enumerate(own) if _distance(own[0], x) > allowed)
        rows.append(Row(step, kind, name, max(distances) / unit, allowed / unit, away, apart))
    return rows


def _distance(a: Tensor | None, b: Tensor | None) -> float:
    """The largest distance of two elements in one place; infinite if one is not a number, or shapes differ."""
    if a is None or b is None or a.shape != b.shape:
        return math.inf
    far = _largest(a.double() - b.double())
    return math.inf if math.isnan(far) else far


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0
