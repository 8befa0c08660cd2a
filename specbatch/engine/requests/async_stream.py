"""Asynchronous streaming: a thread runs a stream of the engine, and an asynchronous generator yields its events."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TypeVar

WAITING_EVENTS = 1024  # of a slow reader, before the engine waits for it

Event = TypeVar("Event")


async def stream_in_thread(open_stream: Callable[[], Generator[Event, None, None]]) -> AsyncGenerator[Event, None]:
    """Yield the events of a stream that is opened, run and closed in a thread of its own.

    When this generator ends, for whatever reason, the stream is closed.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[list[Event]] = asyncio.Queue()
    room = threading.Semaphore(WAITING_EVENTS)
    left = threading.Event()

    def deliver(events: list[Event]) -> None:
        loop.call_soon_threadsafe(queue.put_nowait, events)

    def work() -> None:
        try:
            with closing(open_stream()) as events:
                for event in events:
                    room.acquire()
                    if left.is_set():
                        return
                    deliver([event])
        finally:
            deliver([])

    executor = ThreadPoolExecutor(1, "specbatch-stream")
    worker = loop.run_in_executor(executor, work)
    try:
        while events := await queue.get():
            room.release()
            yield events[0]
        await worker  # raises what the stream raised
    finally:
        left.set()
        room.release()
        executor.shutdown(wait=False)
        await asyncio.wait([worker])
