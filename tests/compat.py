"""Where the heavy clients of the gateway are, the packages of the ``compat`` extra."""

import os
import subprocess
import sys

import pytest


def python_with(*packages: str) -> str:
    """An interpreter that has packages of the ``compat`` extra; skips the test without one."""
    python = os.environ.get("ANABRANCH_COMPAT_PYTHON", sys.executable)
    found = f"import importlib.util as of, sys; sys.exit(not all(map(of.find_spec, {packages!r})))"
    if subprocess.run([python, "-c", found], capture_output=True, check=False).returncode:
        pytest.skip(f"{', '.join(packages)} is not installed (pip install '.[compat]')")
    return python
