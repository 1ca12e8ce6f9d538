"""Settings of tests of kernels."""

from tests.interpreting import patched_once

__all__ = ["patched_once"]
