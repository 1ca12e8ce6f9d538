"""Plans and comms as data: tensors that stand for Python values, so that a compiled graph serves any of them.

A graph takes tensors; a Python value would be compiled in as a constant, and the next batch has another plan. So a
value is passed as a *handle*, a 0-d int64 CPU tensor that leads back to the value in two ways::

    storage   carries the value, for the original tensor, its views and autograd's saved tensors
    number    the element: names a live value of this process, for copies of the tensor; 0 names nothing

A number never stands for two values, in any process. No table keeps a value alive: only the storage and the value's
other owners do. A *ticket* is a handle that an op returns for its backward op. Its values die with the graph.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from seqpar.comm.entry import transforms_active, uncompiled
from seqpar.facts.value import Fact
from seqpar.private import torch as torch_private


class Carried:
    """Values and the number that names them, in the storage of a handle."""

    def __init__(self, values: tuple[Any, ...], number: int = 0) -> None:
        self.found, self.number = values, number

    def values(self) -> tuple[Any, ...]:
        """The values."""
        return self.found


class Name:
    """The handle of one value, stored on the value itself: it lives as long as the value, and is not copied with it."""

    def __init__(self, owner: object) -> None:
        self.owner, self.number = weakref.ref(owner), _number()
        self.handle = _element(self.number)

    def values(self) -> tuple[Any, ...] | None:
        """The value, alone, while it lives."""
        owner = self.owner()
        return None if owner is None else (owner,)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


_names: weakref.WeakValueDictionary[int, Carried | Name] = weakref.WeakValueDictionary()
_naming = threading.Lock()
_bound: weakref.WeakValueDictionary[tuple[object, ...], Carried] = weakref.WeakValueDictionary()


@uncompiled
def bind(*values: object) -> Tensor:
    """The handle of a plan and a comm, or of another verb's values, which replaces them in a compiled model.

    Afterwards `attention` accepts the handle, and in compiled code also ``plan`` and ``comm`` themselves (`switch`
    needs ``bind(comm)``, `relayout` needs ``bind(src, dst, comm)``). Equal values get equal handles. A handle keeps its
    values alive; a copy of its element finds them as long as something else does.

        handle = seqpar.bind(plan, comm)   # for each batch
        loss = compiled(tokens, handle)    # inside: seqpar.attention(q, k, v, handle)
    """
    key = tuple(value.digest() if isinstance(value, Fact) else id(value) for value in values)
    carried = _bound.get(key)
    if carried is None:
        carried = _bound[key] = Carried(values, _number())
        _names[carried.number] = carried
    for value in values:
        owned = getattr(value, "__dict__", None)
        with _naming:  # one name even if threads bind a value at once
            if owned is not None and not (
                isinstance(name := owned.get("_seqpar_handle"), Name) and name.owner() is value
            ):
                name = owned["_seqpar_handle"] = Name(value)
                _names[name.number] = name
    return _tensor(carried)


def carry(*values: object) -> Tensor:
    """A handle whose values only its storage leads to. Its element is 0, so that equal calls give equal tickets."""
    return _tensor(Carried(values))


def in_graph(*tensors: object) -> bool:
    """Whether a verb goes through its op: a graph is traced, tensors are fake, or a region is recomputed selectively.

    Modes that only observe see the operations inside, as without them.
    """
    if torch.compiler.is_compiling():
        return True
    modes = torch_private.get_current_dispatch_mode_stack() if torch_private.len_torch_dispatch_stack() else ()
    if any([mode.is_infra_mode() or type(mode).__module__ == "torch.utils.checkpoint" for mode in modes]):
        return True
    return any([type(x) is not Tensor and isinstance(x, Tensor) and type(x) is not Parameter for x in tensors])


def handles(*values: object) -> list[Tensor]:
    """The handles of an op's values; in eager mode one handle that carries all of them.

    Raises: ValueError for a handle among other values, and while a graph is compiled for values unknown to `bind`.
    """
    if any(isinstance(value, Tensor) for value in values[:-1]):
        raise ValueError(f"a handle stands for its comm too, got {values!r:.200}; leave the comm out")
    if torch.compiler.is_compiling():
        return [value if isinstance(value, Tensor) else _handle(value) for value in values]
    *others, last = values
    if isinstance(last, Tensor):
        return [carry(*others), last] if others else [last]
    return [carry(*values)]


def _handle(value: Any) -> Tensor:
    # A tensor attribute becomes an input of the graph: another value brings its own, and nothing recompiles.
    name = getattr(value, "_seqpar_handle", None)
    if name is None:
        raise ValueError("a compiled model got a plan, layout or comm without a handle; call seqpar.bind on them first")
    return name.handle  # type: ignore[no-any-return]


def checked_values(values: Sequence[Any], *kinds: type) -> tuple[Any, ...]:
    """An op's values, checked to start with these kinds and end with a comm.

    Raises: ValueError for other values.
    """
    fit = len(values) == len(kinds) + 1 and hasattr(values[-1], "exchange")
    if not fit or not all(isinstance(v, kind) for v, kind in zip(values, kinds)):
        expected = ", ".join([*(kind.__name__.lower() for kind in kinds), "comm"])
        raise ValueError(f"expected the handle of seqpar.bind({expected}), got that of {values!r:.200}")
    return tuple(values)


def carried(handle: Tensor) -> tuple[Any, ...]:
    """The values of a handle or a ticket.

    Raises: ValueError for an invalid or unknown handle; RuntimeError for a copy of a ticket.
    """
    if not isinstance(handle, Tensor) or handle.dim() or handle.dtype != torch.int64 or not handle.is_cpu:
        raise ValueError(f"a handle is a 0-d int64 CPU tensor made by seqpar.bind, got {handle!r:.200}")
    entry = getattr(handle.untyped_storage(), "_seqpar", None)
    number = int(handle)
    if entry is None or entry.number != number:  # a copy, or overwritten with another handle
        entry = _names.get(number)
    values = None if entry is None else entry.values()
    if values is None and number == 0:
        raise RuntimeError(
            "a backward got a copy of its ticket, and only the one that forward made leads to the call. A loop of the "
            "compiler (torch.scan) makes copies and cannot be served, write such a loop in Python; a hook that copies "
            "saved tensors, as save_on_cpu(pin_memory=True) does, must leave 0-d integers as they are"
        )
    if values is None:
        raise ValueError(
            f"handle {number} refers to nothing: its plan or comm was dropped, or seqpar.bind did not make it in this "
            "process; keep what bind returned for as long as the handle or a copy of it is used"
        )
    return values  # type: ignore[no-any-return]


def _tensor(carried: Carried) -> Tensor:
    handle = _element(carried.number)
    handle.untyped_storage()._seqpar = carried  # type: ignore[attr-defined]
    return handle


def _element(number: int) -> Tensor:
    if not (torch.is_inference_mode_enabled() or transforms_active()):  # saves the host microseconds
        return torch.tensor(number, dtype=torch.int64, device="cpu")
    # values bound during evaluation may be saved in training; a transform of torch.func is not to wrap the element
    with torch.inference_mode(False), torch_private.DisableFuncTorch():
        return torch.tensor(number, dtype=torch.int64, device="cpu")


def _number() -> int:
    return int.from_bytes(os.urandom(8), "little") >> 1 or 1
