"""Values of programs that XLA optimises with users' settings, in a separate process."""

import os
import subprocess
import sys
from pathlib import Path


def test_optimised_programs_are_accurate():
    usual = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS" and not name.startswith("JAX_")}
    result = subprocess.run(
        [sys.executable, "-m", "tests.ops.optimised_programs"],
        cwd=Path(__file__).parents[2],
        env=usual | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.endswith("all are accurate\n")
