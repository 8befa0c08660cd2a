"""Runs the command with Ray in a network namespace of its own: Ray probes a public address when it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from specbatch.extras import is_installed

UP = """
import fcntl, socket, struct, sys
with socket.socket() as any_socket:  # flags of the interface: up, running
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))
"""
CLI = f"{UP}\nfrom specbatch.cli.app import main\nmain()"
RAY = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "error"}


@cache
def why_not() -> str:
    """Why Ray cannot run here; empty if it can."""
    if not is_installed("ray"):
        return "ray is not installed"
    try:
        made = subprocess.run(["unshare", "-rn", sys.executable, "-c", UP], capture_output=True)
    except FileNotFoundError:
        return "there is no unshare to make a network namespace"
    return "" if made.returncode == 0 else "this machine does not allow network namespaces"


def start(folder: Path, words: str, program: str = CLI, **how: Any) -> subprocess.Popen[str]:
    """Start the command, whose standard error is a pipe."""
    environment: Mapping[str, str] = (
        os.environ
        | RAY
        | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "HOME": str(folder),
        }
    )
    command = ["unshare", "-rn", sys.executable, "-c", program, *words.split()]
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True, **how)
