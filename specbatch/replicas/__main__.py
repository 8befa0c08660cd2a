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
from typing import Any


def main() -> None:
    connection, sending = Connection(int(sys.argv[1])), threading.Lock()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that leads decides what Ctrl-C ends
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    from specbatch.replicas.replica import Replica  # takes seconds, in which the connection may end

    def send(message: Any) -> None:
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with sending:
            connection.send_bytes(data)

    replica = Replica(send)

    def read() -> None:
        try:
            while True:
                replica.receive(pickle.loads(connection.recv_bytes()))
        except (EOFError, OSError):
            os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    replica.run()
    sys.exit(1)  # after an error, which it has reported


def _end_with(connection: Connection) -> None:
    ends = select.poll()
    ends.register(connection.fileno(), select.POLLRDHUP)
    ends.poll()
    os._exit(0)


if __name__ == "__main__":
    main()
