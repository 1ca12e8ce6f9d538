"""`advised`: a block that must end in an error that says what to do. The test then does that, and is right::

with advised(ValueError, "drop the batch dimension"):
    module(x[None])
assert torch.equal(module(x), expected)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist


@contextmanager
def advised(kind: type[Exception] | tuple[type[Exception], ...], advice: str) -> Iterator[None]:
    """A block that must raise that error, or warn so, with that advice in the message; ``{}`` is any text."""
    pattern = ".*".join(map(re.escape, advice.split("{}")))
    if isinstance(kind, type) and issubclass(kind, Warning):
        with pytest.warns(kind, match=pattern):
            yield
        return
    with pytest.raises(kind) as raised:
        yield
    message = " ".join(str(raised.value).split())
    assert re.search(pattern, message), f"the message does not say {advice!r}: {message}"


@contextmanager
def default_group() -> Iterator[None]:
    """A default group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
