"""Pipes between processes: closes one while another thread waits for a message from it."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from multiprocessing.connection import Connection


def hang_up(connection: Connection) -> None:
    """End a duplex pipe: both sides read its end. `Connection.close` alone does not wake a thread that reads, and until
    it wakes the other side notices nothing."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)
