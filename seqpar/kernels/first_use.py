"""A kernel's first use on a GPU: a small case of its kind against the reference, before "auto" takes the kernel.

Releases of libraries have had wrong gradients at one head dim, and this project could not run all of them everywhere.
So results, lse and gradients are compared under every kind of mask. The outcome is remembered for the device, its
driver and the versions of the libraries; where that is impossible, each process checks anew.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqpar.facts.mask import Mask
from seqpar.facts.segments import segments
from seqpar.facts.tiles import tile_tables
from seqpar.facts.value import Ints
from seqpar.kernels.memory.upload import upload
from seqpar.kernels.protocol import CallSpec, Grads, Kernel, Operands, Score, StepFacts, Sums, acc_dtype
from seqpar.kernels.reference import Reference
from seqpar.kernels.vendor.segmented import Segmented

log = logging.getLogger("seqpar.kernels")
PLAIN = ("blockwise", "reference")  # of torch's own operators, and never checked
DRIVER = Path("/proc/driver/nvidia/version")
PACKAGES = ("seqpar", "torch", "triton", "flash-attn", "flash-attn-3", "flash-attn-4", "nvidia-cutlass-dsl")

# Of queries and keys: a document longer than a tile, one with more keys than queries, and one with fewer.
LENGTHS, KEYS = [132, 12, 16], [132, 40, 6]
CUT = 128  # keys of the first buffer, where results are merged
# The largest error of a row over the mean norm of a row, in rounding units; right kernels have up to 1.8. At least
# that of float32, whose sums are long. The largest error of an lse.
ROUNDINGS, LEAST, LSE = 6, 1e-4, 0.01


class FirstUse:
    """The outcomes of first checks in this process and, in a file, of this machine.

    path: of the file. device: where cases run, by default the call's.
    """

    def __init__(self, path: str = "~/.cache/seqpar/kernels.json", device: str | None = None) -> None:
        self._path, self._device = Path(os.path.expanduser(path)), device
        self._found: dict[str, str | None] = {}  # kind of kernel and call -> its fault
        self._warned: set[str] = set()
        self._lock = threading.Lock()

    def fault(self, kernel: Kernel, call: CallSpec) -> str | None:
        """What the kernel computes wrong in calls of this kind on this GPU, or None. The first one is checked."""
        if call.device != "cuda" or kernel.name in PLAIN:
            return None
        kind, device = kind_of(kernel.name, call), self._device or call.device
        if kind not in self._found:
            if device == "cuda" and torch.cuda.is_current_stream_capturing():
                return None  # the call itself is then refused, since it has to upload its facts
            with self._lock:
                if kind not in self._found:
                    self._found[kind] = found = self._looked_up(kind, kernel, call, device)
                    if found and kernel.name not in self._warned:
                        self._warned.add(kernel.name)
                        _warn(kernel.name, f"{found} ({kind})", self._path)
        return self._found[kind]

    def known(self, name: str, call: CallSpec) -> str | None:
        """The fault of a kernel in such calls, as far as this process has checked: None, or "not checked"."""
        return self._found.get(kind_of(name, call), "not checked")

    def _looked_up(self, kind: str, kernel: Kernel, call: CallSpec, device: str) -> str | None:
        machine = machine_name(device)
        if machine and f"{machine}; {kind}" in (known := _read(self._path)):
            return known[f"{machine}; {kind}"]
        here = torch.empty(0, device=device)
        # a thread of its own has none of the caller's modes, and no checkpoint records what it computes
        with ThreadPoolExecutor(1) as thread:
            found, lasting = thread.submit(_checked, kernel, call, here).result()
        if lasting and machine:
            _write(self._path, f"{machine}; {kind}", found)
        return found


def kind_of(name: str, call: CallSpec) -> str:
    """What a check is valid for: a kernel's name and a call, without the number of heads and what only choices need."""
    groups = 2 if call.heads == call.kv_heads else 1
    return f"{name}: {replace(call, heads=2, kv_heads=groups, few_shapes=False, fast=False)}"


def machine_name(device: str) -> str | None:
    """The device, its driver and the versions of libraries; None if the driver's version is unknown."""
    try:
        driver = DRIVER.read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return None
    found = [torch.cuda.get_device_name() if device == "cuda" else device, driver, f"cuda {torch.version.cuda}"]
    found.append(f"cudnn {torch.backends.cudnn.version()}")  # type: ignore[no-untyped-call]
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return "; ".join(found)


def _warn(name: str, found: str, path: Path) -> None:
    warnings.warn(
        f'kernel="auto" passes over {name}, which is wrong on this machine: {found}; to have it checked again, delete '
        f"{path}", stacklevel=3,
    )  # fmt: skip


def _read(path: Path) -> dict[str, str | None]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _write(path: Path, key: str, found: str | None) -> None:
    """Add an outcome to the file. Of processes that write at the same time one wins, and the others check again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_suffix(f".{os.getpid()}")
        own.write_text(json.dumps(_read(path) | {key: found}, indent=1), encoding="utf-8")
        own.replace(path)
    except OSError as error:
        log.info("the check of a kernel is not remembered: %s", error)


def _checked(kernel: Kernel, call: CallSpec, here: Tensor) -> tuple[str | None, bool]:
    """The fault, and whether other processes would find the same: an error may pass, as memory that is full."""
    with torch.cuda.device_of(here):  # type: ignore[no-untyped-call]
        try:
            return wrong(kernel, call, here.device), True
        except Exception as error:  # whatever a library raises is why it is not used
            return f"it fails: {type(error).__name__}: {error}"[:300], False


def wrong(kernel: Kernel, call: CallSpec, device: torch.device) -> str | None:
    """What the kernel computes wrong in small calls of this kind, or None. Reads values of the device."""
    if isinstance(kernel, Segmented):
        # however short the segments are: the library has to compute all that it ever would
        library = copy(kernel.library)
        library.rows_per_segment = library.rows_per_call = 0
        kernel = Segmented(library, rest=Reference(), deterministic=call.deterministic, borrows=kernel.borrows)
    masks = {
        "full": Mask(LENGTHS, causal=False, kv_lengths=KEYS),
        "causal": Mask(LENGTHS, kv_lengths=KEYS),
        "window": Mask(LENGTHS, window=(17, None), kv_lengths=KEYS),
    } | ({"tree": Mask.shared_prefix([(40, [30, 20])])} if call.until else {})  # fmt: skip
    limit = max(LEAST, ROUNDINGS * torch.finfo(call.dtype).eps)
    for title, mask in masks.items():
        draw, heads = torch.Generator("cpu").manual_seed(0), 2 if call.heads == call.kv_heads else 1
        shapes = ((mask.tokens, 2, call.dim), (mask.kv_tokens, heads, call.dim), (mask.kv_tokens, heads, call.v_dim),
                  (mask.tokens, 2, call.v_dim))  # fmt: skip
        inputs = [torch.randn(shape, generator=draw, device="cpu").to(call.dtype) for shape in shapes]
        found = _computed(kernel, call, mask, [x.to(device) for x in inputs])
        exact = _computed(Reference(), replace(call, merges=False), mask, [x.double() for x in inputs])
        for name, x in exact.items():
            error = (found[name].cpu().double() - x).masked_fill(
                found[name].cpu() == x, 0.0
            )  # also where both are -inf
            off = float(error.abs().max())
            if name != "lse":
                off = float(error.flatten(1).norm(dim=1).max() / x.flatten(1).norm(dim=1).square().mean().sqrt())
            if not off <= (LSE if name == "lse" else limit):
                return f"with a {title} mask, {name} is off by {off:.2g}"
    return None


def _computed(kernel: Kernel, call: CallSpec, mask: Mask, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """out and lse, and dq, dk, dv if the call has gradients; keys come in two buffers if results are merged."""
    q, k, v, dout = inputs
    wide, heads = acc_dtype(q.dtype), q.shape[1]
    slopes = torch.arange(1, heads + 1, dtype=wide, device=q.device) / 64 if call.alibi else None
    score = Score(call.dim**-0.5, 5.0 if call.softcap else 0.0, slopes, 0.25 if call.dropout else 0.0, 1)
    cuts = [0, CUT, mask.kv_tokens] if call.merges and mask.kv_tokens > CUT else [0, mask.kv_tokens]
    steps = []
    for begin, end in zip(cuts, cuts[1:], strict=False):
        facts = _facts(mask, np.arange(begin, end), q.device)
        steps.append((slice(begin, end), Operands(q, k[begin:end], v[begin:end], facts, score)))
    out, acc = (torch.full(dout.shape, torch.nan, dtype=dtype, device=q.device) for dtype in (q.dtype, wide))
    lse = torch.full((heads, len(q)), torch.nan, dtype=wide, device=q.device)
    for n, (_, x) in enumerate(steps):
        last = n == len(steps) - 1
        kernel.forward(x, Sums(None if len(steps) == 1 else acc, lse, out if last else None, first=n == 0))
    results = {"out": out, "lse": lse}
    if call.grads:
        delta = (dout.to(wide) * out.to(wide)).sum(-1).t().contiguous()
        dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=q.device) for x in (q, k, v))
        for at, x in steps:
            kernel.backward(x, Grads(dout, lse, delta, out, dq, dk[at], dv[at]))
        results |= {"dq": dq, "dk": dk, "dv": dv}
    return results


def _facts(mask: Mask, keys: Ints, device: torch.device) -> StepFacts:
    """The facts of all queries of a mask of one band over a buffer of its keys."""
    rows, (band,) = np.arange(mask.tokens), mask.bands
    at, (lo, hi) = mask.key_positions(rows), mask.bounds(rows)
    until = None if band.until is None else band.until.of(keys)
    q_pos, q_lo, q_hi, key_pos, *ends = upload([at, lo, hi, keys, *([] if until is None else [until])], device)
    kept: dict[Hashable, Any] = {}

    def memo(key: Hashable, make: Callable[[], Any]) -> Any:
        return kept[key] if key in kept else kept.setdefault(key, make())

    return StepFacts(
        q_pos, q_lo, q_hi, key_pos, ends[0] if ends else None,
        lambda bm, bn: tile_tables(lo, hi, keys, bm, bn, at=at, until=until),
        lambda: segments(lo, hi, keys, at=at, until=until), memo,
    )  # fmt: skip
