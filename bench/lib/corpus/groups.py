"""The corpus by group, and its run: the digest of every case, written as JSON."""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from .digest import digest

Cases = dict[str, Callable[[], Any]]

# group -> the module of this package and its function that lists the cases
GROUPS = {
    "attention": ("attention", "cases"),
    "kernels": ("attention", "kernels"),
    "processes": ("attention", "processes"),
    "switch": ("moves", "switch"),
    "relayout": ("moves", "relayout"),
    "unshard": ("moves", "unshard"),
    "merge": ("moves", "merge"),
    "stages": ("moves", "stages"),
    "dsp": ("models", "latte"),
    "transformers": ("models", "transformers"),
    "diffusers": ("models", "diffusers"),
    "sdpa": ("models", "sdpa"),
    "train": ("train", "cases"),
    "plans": ("plans", "plans"),
    "steps": ("plans", "steps"),
    "planner": ("plans", "planner"),
}
BROKEN = "broken by"  # the start of an outcome without a digest
FREE = ("planner",)  # groups whose choices may improve: differences are shown and do not fail


def cases(group: str) -> Cases:
    """The cases of a group."""
    module, function = GROUPS[group]
    found: Cases = getattr(import_module(f".{module}", __package__), function)()
    return found


def outcome(case: Callable[[], Any]) -> str:
    """The digest of what a case returns, or the kind of the error that broke it."""
    try:
        return digest(case())
    except Exception as error:
        return f"{BROKEN} {type(error).__name__}: {error}"[:300]


def refused(case: Callable[[], Any]) -> str:
    """The kind of error that refuses a call. It is hashed like any result, so a call that is taken now differs."""
    try:
        case()
    except (NotImplementedError, ValueError) as error:
        return f"refused with {type(error).__name__}"
    return "taken"


def run(path: Path, only: list[str]) -> None:
    """Write the digests of some groups: {group: {case: digest}}."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    results = {}
    for group in only:
        start = time.perf_counter()
        results[group] = {name: outcome(case) for name, case in cases(group).items()}
        seconds = time.perf_counter() - start
        print(f"  {group}: {len(results[group])} cases, {seconds:.1f} s", file=sys.stderr, flush=True)
    path.write_text(json.dumps(results, indent=0))
