"""Triton's interpreter, spared what it does in vain."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from types import FunctionType

import pytest


@pytest.fixture(scope="session", autouse=find_spec("triton") is not None)
def patched_once() -> Iterator[None]:
    """Triton's interpreter patches its language once, and not for every launch and each helper that a kernel calls.

    To look for what it would replace takes a fifth of the time of a launch, and most of that of a small one.
    """
    from triton import language
    from triton.runtime import interpreter

    patch, is_builtin = interpreter._patch_lang, language.core.is_builtin

    def unless_patched(fn: FunctionType) -> object:
        named = [module for module in fn.__globals__.values() if module is language or module is language.core]
        if any(is_builtin(module.load) for module in named):
            patch(fn)  # for good: nothing is compiled in a process that interprets
        return interpreter._LangPatchScope()

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(interpreter, "_patch_lang", unless_patched)
        yield
