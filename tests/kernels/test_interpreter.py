"""The kernels in Triton's interpreter, on any machine.

Triton decides when a kernel is decorated whether it is interpreted, so these tests need a process
of their own. One is enough for all `test_triton_*.py`, whose tests are skipped elsewhere.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.launch import is_interpreted

FILES = sorted(str(path) for path in Path(__file__).parent.glob("test_triton_*.py"))


@pytest.mark.skipif(is_interpreted(), reason="this process interprets them itself")
def test_the_kernels_pass_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", *FILES, "-p", "no:cacheprovider"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout
