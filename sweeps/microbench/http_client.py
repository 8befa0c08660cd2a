"""CPU time of the client of `sweep --engine http` per streamed chunk, against a local server that streams at once.

The rate at which chunks would keep one core busy is the most that a sweep can measure of a server; well below it the
client adds little to the server's times. A chunk has the tokens of one step of a request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbatch.config.engine_config import EngineConfig
from specbatch.core.sampling_params import SamplingParams
from specbatch.servers.server import Server
from specbatch.sweeps.microbench.runner import Row, Table, counts

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nConnection: close\r\n\r\n"
_MODELS = {"object": "list", "data": [{"id": "local", "object": "model", "owned_by": "local"}]}


def tables(
    concurrency: Annotated[str, typer.Option(help="Requests in flight, separated by commas.")] = "1,32,128",
    chunks: Annotated[int, typer.Option(min=2, help="Chunks of each answer.")] = 256,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
) -> Iterator[Table]:
    sizes = counts("concurrency", concurrency)
    with _server() as url:
        yield Table([_row(url, size, chunks, repeats) for size in sizes])


def _row(url: str, concurrency: int, chunks: int, repeats: int) -> Row:
    from specbatch.servers.engine import HttpEngine

    engine = HttpEngine(Server(url, alongside=EngineConfig()))
    params = [SamplingParams(max_new_tokens=chunks)] * (2 * concurrency)
    costs, rates = [], []
    for repeat in range(repeats + 1):
        engine.reset_record()
        engine.generate([[1, 2, 3]] * len(params), params, concurrency=concurrency)
        record = engine.record(concurrency=concurrency)
        assert record.metrics["requests"] == len(params), record.counters["errors"]
        if repeat:  # the first one warms up
            total, seconds = chunks * len(params), record.metrics["duration_s"] or 0.0
            costs.append(seconds * record.counters["client_cpu_share"] / total)
            rates.append(total / seconds)
    costs.sort()
    spread = f"{1e6 * costs[len(costs) // 2]:.0f} ({1e6 * costs[0]:.0f}-{1e6 * costs[-1]:.0f})"
    return {
        "requests in flight": concurrency,
        "client CPU per chunk (us)": spread,
        "chunks/s on a full core": f"{1 / costs[len(costs) // 2]:.0f}",
        "chunks/s reached": f"{max(rates):.0f}",
    }


@contextmanager
def _server() -> Iterator[str]:
    """The address of a server in a process of its own."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.terminate()
        process.join()


def _serve(pipe: Connection) -> None:
    asyncio.run(_listen(pipe))


async def _listen(pipe: Connection) -> None:
    server = await asyncio.start_server(_answer, "127.0.0.1", 0)
    pipe.send(server.sockets[0].getsockname()[1])
    async with server:
        await server.serve_forever()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    length = next((int(line.split(":")[1]) for line in head.splitlines() if line.startswith("content-length:")), 0)
    body: dict[str, Any] = json.loads(await reader.readexactly(length) or b"{}")
    path = head.split()[1]
    if path == "/v1/models":
        writer.write(_HEAD % b"application/json" + json.dumps(_MODELS).encode())
    elif path == "/v1/completions":
        await _stream(writer, body["max_tokens"], len(body["prompt"]))
    else:
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    await writer.drain()
    writer.close()


async def _stream(writer: asyncio.StreamWriter, count: int, prompt: int) -> None:
    """One chunk per token, in the form of vLLM, each written by itself."""
    writer.write(_HEAD % b"text/event-stream")
    for sent in range(1, count + 1):
        usage = {"prompt_tokens": prompt, "total_tokens": prompt + sent, "completion_tokens": sent}
        choice = {"index": 0, "text": "word ", "logprobs": None, "finish_reason": "length" if sent == count else None}
        chunk = {"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1, "model": "local"}
        writer.write(b"data: " + json.dumps(chunk | {"choices": [choice], "usage": usage}).encode() + b"\n\n")
        await writer.drain()
        await asyncio.sleep(0)
    writer.write(b"data: [DONE]\n\n")
