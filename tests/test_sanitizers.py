"""The compiled CPU code without Python, under the sanitizers of the compiler: `make sanitize`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler")
@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_no_sanitizer_finds_anything() -> None:
    command = [sys.executable, "setup.py", "--quiet", "sanitize"]
    env = os.environ | {"SEQPAR_STRICT": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    for sanitizers in ("address,undefined", "thread"):
        assert f"{sanitizers}: clean" in done.stdout
