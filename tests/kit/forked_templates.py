"""Processes that render chat templates, forked from one that has imported Jinja, which takes most of such a test."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from specbatch.text import chat_template, template_worker

SERVER = """
import os, runpy, signal, socket, sys
link, worker = socket.socket(fileno=int(sys.argv[1])), runpy.run_path(sys.argv[2])
worker["environment"]()
while True:
    limits, (source, sink, status), _, _ = socket.recv_fds(link, 4096, 3)
    if os.fork() == 0:  # the one that waits for the process
        if (process := os.fork()) == 0:
            link.close()
            os.close(status)
            os.setpgid(0, 0)
            os.dup2(source, 0)
            os.dup2(sink, 1)
            os.close(source)
            os.close(sink)
            seconds, *sizes = limits.decode().split()
            worker["serve"](float(seconds), *map(int, sizes))
            os._exit(0)
        for file in (source, sink):
            os.close(file)
        os.write(status, process.to_bytes(4, "little"))
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        os.write(status, code.to_bytes(4, "little", signed=True))
        os._exit(0)
    for file in (source, sink, status):
        os.close(file)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
"""


class Fork:
    """What `subprocess.Popen` gives, as far as `chat_template` uses it."""

    def __init__(self, link: socket.socket, limits: list[str]) -> None:
        source, stdin = os.pipe()
        stdout, sink = os.pipe()
        self._status, status = os.pipe()
        socket.send_fds(link, [" ".join(limits).encode()], [source, sink, status])
        for file in (source, sink, status):
            os.close(file)
        self.stdin, self.stdout = os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb")
        self.pid = int.from_bytes(os.read(self._status, 4), "little")
        self.returncode: int | None = None

    def kill(self) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = int.from_bytes(os.read(self._status, 4), "little", signed=True)
            os.close(self._status)
        return self.returncode


def fork_templates(patch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Until `patch` ends, the processes of templates are forks. Returns what ends their parent."""
    started: list[tuple[socket.socket, subprocess.Popen[bytes]]] = []

    def start(command: list[str], **_: Any) -> Fork:
        if not started:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            server = [sys.executable, "-P", "-c", SERVER, str(theirs.fileno()), template_worker.__file__]
            pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            started.append((ours, subprocess.Popen(server, pass_fds=[theirs.fileno()], process_group=0, **pipes)))
            theirs.close()
        return Fork(started[0][0], command[-3:])

    def end() -> None:
        for link, server in started:
            server.kill()
            server.wait()
            link.close()

    patch.setattr(chat_template, "subprocess", SimpleNamespace(Popen=start, PIPE=None, DEVNULL=None))
    return end
