"""Runs one of the scripts that compile kernels, in a process without the interpreter and with an empty cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def compiled(script: str, cache: Path) -> Any:
    """What the script of that name in this folder prints, read as JSON."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-P", str(Path(__file__).with_name(f"{script}.py"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
