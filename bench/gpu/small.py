"""Slice `small`: kernels that move memory, as a share of the bandwidth of a copy of as many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from bench.gpu.calls import facts_of, short
from bench.gpu.machine import Machine, unable
from bench.gpu.rows import Case, Row
from bench.gpu.speed import rate
from seqpar.facts.mask import Mask

Run = tuple[Callable[[], object], float]  # a call, and the bytes that it must read and write


def small(tiny: bool) -> list[Case]:
    """The cases, on tensors of keys and values and on outputs."""
    rows = 64 if tiny else 65536
    makes = {"merge_": _merge, "pack": _pack, "place": _place, "add": _add, "rotary": _rotary, "delta": _delta}
    return [Case("small", f"{name}, {rows} rows", partial(_share, name, make, rows)) for name, make in makes.items()]


def _share(name: str, make: Callable[[Machine, int], dict[str, Run]], rows: int, machine: Machine) -> Iterator[Row]:
    try:
        runs = make(machine, rows)
    except ImportError as error:
        yield {"kernel": name, "mode": "bandwidth", **unable(error)}
        return
    for mode, (run, moved) in runs.items():
        source = torch.empty(int(moved) // 2, dtype=torch.uint8, device=machine.device).random_()
        target = torch.empty_like(source)
        times, missing = machine.times({name: run, "copy": partial(target.copy_, source)}, most=50)
        if name in missing:
            yield {"kernel": name, "mode": mode, **missing[name]}
            continue
        ratio = times["copy"].ms / times[name].ms
        yield {"kernel": name, "mode": mode, **rate(times[name], bytes=moved), "baseline": "copy", "ratio": ratio}


def _merge(machine: Machine, rows: int) -> dict[str, Run]:
    from seqpar.kernels.softmax import merge_

    runs: dict[str, Run] = {}
    for dtype in (torch.bfloat16, torch.float32):
        acc, part = _random(machine, rows, 8, 128), _random(machine, rows, 8, 128, dtype=dtype)
        lse, part_lse = (torch.randn(8, rows, device=machine.device) for _ in range(2))
        out, each = torch.empty_like(part), rows * 8
        sums = 12 * each  # lse is read and written, the part's is read
        adds = (8 + part.itemsize) * each * 128 + sums
        runs[f"into sums, {short(dtype)}"] = partial(merge_, acc, lse, part, part_lse), adds
        ends = (4 + 2 * part.itemsize) * each * 128 + sums
        runs[f"into the output, {short(dtype)}"] = partial(merge_, acc, lse, part, part_lse, out), ends
    return runs


def _rows(machine: Machine, rows: int) -> dict[str, Tensor]:
    """Row numbers: the two chunks of a zigzag, and every second row."""
    chunks = torch.cat([torch.arange(rows // 8, rows // 4), torch.arange(rows // 2, rows * 5 // 8)])
    return {
        "two chunks": chunks.to(machine.device),
        "every second row": torch.arange(0, rows, 2, device=machine.device),
    }


def _pack(machine: Machine, rows: int) -> dict[str, Run]:
    from seqpar.kernels.memory.copy import Pair, copy

    keys_values = [_random(machine, rows, 8, 128, dtype=torch.bfloat16) for _ in range(2)]
    runs: dict[str, Run] = {}
    for name, at in _rows(machine, rows).items():
        out = keys_values[0].new_empty(len(at), 2, 8, 128)
        pairs = [Pair(out[:, side], x, src_rows=at) for side, x in enumerate(keys_values)]
        runs[f"keys and values, {name}"] = partial(copy, pairs), 2.0 * out.nbytes + at.nbytes
    return runs


def _place(machine: Machine, rows: int) -> dict[str, Run]:
    from seqpar.kernels.memory.copy import Pair, copy

    out = _random(machine, rows, 8, 256, dtype=torch.bfloat16)
    runs: dict[str, Run] = {}
    for name, at in _rows(machine, rows).items():
        values = _random(machine, len(at), 8, 256, dtype=torch.bfloat16)
        run = partial(copy, [Pair(out, values, dst_rows=at)])
        runs[f"keys and values, {name}"] = run, 2.0 * values.nbytes + at.nbytes
    return runs


def _add(machine: Machine, rows: int) -> dict[str, Run]:
    from seqpar.kernels.memory.copy import Pair, add

    sums = _random(machine, rows, 8, 256)
    runs: dict[str, Run] = {}
    for name, at in _rows(machine, rows).items():
        values = _random(machine, len(at), 8, 256)
        runs[f"gradients, {name}"] = partial(add, Pair(sums, values, dst_rows=at)), 3.0 * values.nbytes + at.nbytes
    return runs


def _rotary(machine: Machine, rows: int) -> dict[str, Run]:
    from seqpar.kernels.memory.rotary import rotate

    x = _random(machine, rows, 32, 128, dtype=torch.bfloat16)
    positions = torch.arange(rows, device=machine.device)
    frequencies = 10000.0 ** -(torch.arange(64, device=machine.device) / 64)
    runs: dict[str, Run] = {}
    for interleaved in (False, True):
        run = partial(rotate, x, positions, frequencies, interleaved=interleaved)
        runs["neighbours" if interleaved else "halves"] = run, 2.0 * x.nbytes + positions.nbytes
    return runs


def _delta(machine: Machine, rows: int) -> dict[str, Run]:
    from seqpar.kernels.softmax import delta

    runs: dict[str, Run] = {}
    (facts,) = facts_of(Mask([rows]), np.arange(rows), machine.device)
    for dtype in (torch.bfloat16, torch.float32):
        dout, out = (_random(machine, rows, 32, 128, dtype=dtype) for _ in range(2))
        runs[f"of outputs, {short(dtype)}"] = partial(delta, dout, out, facts), 2.0 * out.nbytes + rows * 32 * 4
    return runs


def _random(machine: Machine, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=machine.device, dtype=dtype)
