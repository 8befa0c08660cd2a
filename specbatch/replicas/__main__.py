"""The process of a replica: python -m specbatch.replicas FD

It carries out what comes through the connection FD. The end of the connection ends the process, whatever it does.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import threading
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

MOST_MESSAGES = 64  # that are sent together


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that leads decides what Ctrl-C ends
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    from specbatch.replicas.replica import Replica  # takes seconds, in which the connection may end

    messages = SimpleQueue[Any]()
    sender = threading.Thread(target=_send, args=(connection, messages), daemon=True)
    sender.start()
    replica = Replica(messages.put)

    def read() -> None:
        try:
            while True:
                replica.receive(pickle.loads(connection.recv_bytes()))
        except (EOFError, OSError):
            os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    replica.run()  # returns after an error, which it has reported
    messages.put(None)
    sender.join()
    sys.exit(1)


def _send(connection: Connection, messages: SimpleQueue[Any]) -> None:
    """Send messages up to one that is None, together those that are there: the other side handles thousands in a
    second."""
    group: list[Any] = []
    ended = False
    while not ended:
        message = messages.get()
        ended = message is None
        group += [] if ended else [message]
        if group and (ended or messages.empty() or len(group) == MOST_MESSAGES):
            connection.send_bytes(pickle.dumps(group, pickle.HIGHEST_PROTOCOL))
            group = []


def _end_with(connection: Connection) -> None:
    ends = select.poll()
    ends.register(connection.fileno(), select.POLLRDHUP)
    ends.poll()
    os._exit(0)


if __name__ == "__main__":
    main()
