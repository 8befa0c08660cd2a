"""Client of an OpenAI-compatible server (vLLM, SGLang and others) with the interface of an engine.

    engine = HttpEngine(Server("http://localhost:8000"))
    completions = engine.generate(prompts, params, concurrency=8)

Times are measured on this machine and include HTTP: a request is submitted when it is sent (with arrivals, when it
arrives), and its first token arrives with the first chunk of the stream that has one. `queue_s` is the time that
`concurrency` made it wait here; the server does not report its own queue. The server counts the tokens (`usage`); if it
counts in every chunk (`continuous_usage_stats`: vLLM, SGLang), inter-token latencies and the peak second are known.
A request whose connection ends before a byte of its answer came is sent once more, on a new connection: servers close
connections between requests, as llama.cpp's does after each stream. `resent_requests` in the counters is their number.
`client_cpu_share` in the counters is the CPU time of this client over the window: near 1 the client itself is slow.

A sweep gives prompts as token ids, which go out as `Server.send` says. An evaluation also gives texts and messages,
which go out as they are and need no tokenizer here.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import aiohttp

from specbatch.core.completion import Completion
from specbatch.core.sampling_params import SamplingParams
from specbatch.errors import refuse
from specbatch.records.run_record import RunRecord
from specbatch.records.summarize import error_counts, most_at_once, peak_throughput, summarize
from specbatch.servers import client as http_client
from specbatch.servers.answer import Answer
from specbatch.servers.client import CONNECT_S, Failed, Unanswered, describe, events, parsed
from specbatch.servers.prompt_text import PromptText
from specbatch.servers.scoring import Scores
from specbatch.servers.sent_params import fields_of, penalties, refuse_unsent
from specbatch.servers.served_model import (
    LLAMACPP,
    NAME_LENGTH,
    SGLANG,
    ask_text,
    get_text,
    model_of,
    tokenizer_of,
    version_of,
)
from specbatch.servers.server import Server
from specbatch.servers.server_cache import ServerCache
from specbatch.servers.server_counters import accepted, counters_of
from specbatch.servers.verifies import Drafting, Timings

if TYPE_CHECKING:
    from specbatch.engine.scoring import Likelihood, Pair
    from specbatch.text.tokenizer import Tokenizer

# By `HttpEngine.kind`, what asks it to report its verifies. vLLM does if it was started to.
VERIFIES = {SGLANG: "return_spec_tokens_details", LLAMACPP: "timings_per_token"}
Messages = list[dict[str, Any]]
Prompt = list[int] | str | Messages


@dataclass(frozen=True)
class _Asked:
    """A prompt as it is sent: as messages, else as text, else as token ids.

    text  of messages: that of all of them
    """

    ids: list[int]
    text: str | None = None
    messages: Messages | None = None


class HttpEngine:
    """The part of `Engine` that a sweep or an evaluation needs. Raises SpecbatchError if the server, its model or a
    tokenizer is not available; a request that fails later is a completion with finish_reason "error", counted by its
    `error` in the record.

    model   one of the server's
    kind    `VLLM`, `SGLANG` or `LLAMACPP`, another name, or "" of a server that names itself by none
    """

    tokenizer: Tokenizer  # next to an engine, that of the engine, set by whoever loads it

    def __init__(
        self,
        server: Server,
        *,
        log: Callable[[str], None] | None = None,
        tokenizer: bool = True,
        prefix_cache: bool = False,
    ) -> None:
        """tokenizer: prompts are token ids, for which the model's tokenizer is opened here. prefix_cache: answers may
        come from it, also from that of a server which requests can keep from using it."""
        self.server = server
        self._log = log or (lambda line: None)
        found = model_of(server)
        self.model: str = found["id"]
        if server.alongside is None and tokenizer:
            self.tokenizer = tokenizer_of(server, found, self._log)
        self.config = server
        self.caps: dict[str, Any] = {"device": server.base_url, "dtype": "the server's own"}
        meta = found.get("meta")  # of llama.cpp
        longest = found.get("max_model_len", meta.get("n_ctx") if isinstance(meta, dict) else None)
        if isinstance(longest, int) and not isinstance(longest, bool) and 0 < longest < 2**31:
            self.caps["max_model_len"] = longest
        self._messages: dict[tuple[int, ...], Messages] = {}
        self._texts: PromptText | None = None
        owned = found.get("owned_by")
        self.kind = owner = http_client.one_line(owned, NAME_LENGTH) if isinstance(owned, str) else ""
        self._verifies = {VERIFIES[owner]: True} if owner in VERIFIES else {}
        self._cache = ServerCache(owner or None, lambda path: ask_text(server, path, method="POST"), used=prefix_cache)
        if (version := version_of(server)) is not None:
            self.caps["server_version"] = version
            owner = f"{owner} {version}".lstrip()
        about = f" ({owner})" if owner else ""
        self._name = f"server{about} at {server.base_url}, prompts as {server.send}"
        self._log(f"{self._name}, model {self.model}")
        self._before: dict[str, float] | None = None
        self._start_window()

    # -- work -------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        *,
        concurrency: int,
        arrivals: Sequence[float] | None = None,
        on_completion: Callable[[Completion], None] | None = None,
    ) -> list[Completion]:
        """As `Engine.generate`; the completions hold text and no token ids. Refuses parameters that are not sent."""
        for own in {id(own): own for own in params}.values():
            refuse_unsent(own, self.kind)
        self._prepare_texts(prompts)
        cpu = time.thread_time()
        try:
            return asyncio.run(self._work(prompts, params, concurrency, arrivals, on_completion))
        finally:
            self._cpu_s += time.thread_time() - cpu

    def score(
        self,
        pairs: Sequence[Pair],
        *,
        concurrency: int,
        on_score: Callable[[int, Likelihood], None] | None = None,
    ) -> list[Likelihood | str]:
        """As `Engine.score`; in place of a likelihood that the server did not give, the reason in one line."""
        return self._scores.of(pairs, concurrency, on_score)

    def check_scores(self, pair: Pair) -> None:
        """Raises Failed if the server gives no log-probabilities of a prompt, here this one."""
        self._scores.check(pair)

    def know_messages(self, prompts: Sequence[list[int]], messages: Sequence[Messages | None]) -> None:
        """The messages that the chat template rendered as these prompts, for `send` "chat"; None: another kind."""
        if self.server.send != "chat":
            return
        if not all(messages):
            works = "needs prompts that are messages: use a data set of messages, or chat_template=True"
            raise refuse("send", "chat", works)
        self._messages |= {tuple(ids): found for ids, found in zip(prompts, messages, strict=True) if found}

    def question(self, prompt: list[int]) -> tuple[dict[str, Any], str]:
        """Fields of a caller's request, and its path: those of the model and the prompt, and penalties that are off,
        which the caller may set."""
        self._prepare_texts([prompt])
        asked, path = self._question(self._asked(prompt))
        return {"model": self.model, **asked, **penalties(SamplingParams(), self.kind), **self._cache.fields}, path

    def messages_of(self, prompt: list[int]) -> Messages:
        """What `know_messages` said of a prompt."""
        return self._messages[tuple(prompt)]

    def forget_prefixes(self) -> None:
        """Keep what follows from using the server's prefix cache of what came before, if it has a way for that."""
        self._cache.forget()

    def reset_record(self) -> None:
        """Start a new measured window."""
        self._start_window()
        self._before = counters_of(get_text(self.server, "/metrics"))

    def record(self, *, concurrency: int | None = None, workload: dict[str, Any] | None = None) -> RunRecord:
        """All work since `reset_record`. The accept length is what the server
        reports of each request or, where it reports nothing, its own counters over that time."""
        window = self._closed - self._opened if self._opened is not None else 0.0
        metrics = summarize(self._completions, window, concurrency)
        metrics["peak_output_throughput"] = peak_throughput(self._per_second, window) if self._counts_chunks else None
        metrics["peak_concurrency"] = most_at_once(self._spans)
        found = accepted(
            self._before, counters_of(get_text(self.server, "/metrics")), self._completions, self._drafting
        )
        metrics |= found.metrics
        counters = {"errors": error_counts(self._completions), "resent_requests": self._resent} | found.counters
        if window > 0:
            counters["client_cpu_share"] = self._cpu_s / window
        requests = [item.as_row() for item in self._completions]
        if self._scores.is_used:
            counters["scoring"] = self._scores.tally.numbers()
            if self._opened is None:  # nothing was generated
                metrics, requests = self._scores.tally.numbers(), list(self._scores.tally.rows)
        return RunRecord(
            config=self._config(),
            caps=dict(self.caps),
            metrics=metrics,
            counters=counters,
            requests=requests,
            workload=workload or {},
        )

    # -- inside -----------------------------------------------------------------------------------------------

    def _prepare_texts(self, prompts: Sequence[Prompt]) -> None:
        if self.server.send == "text" and self._texts is None and any(_is_ids(prompt) for prompt in prompts):
            self._texts = PromptText(self.tokenizer, lambda body: get_text(self.server, "/tokenize", body))

    def _config(self) -> dict[str, Any]:
        found = self.server.as_dict() | {
            "server": self._name,
            "served_model": self.model,
            "prefix_cache": f"the server's own, {self._cache.state}",
            "idle_timeout_s": self.server.idle_timeout,
            "request_timeout_s": self.server.request_timeout,
        }
        if self.server.alongside is None:
            tokenizer = self.tokenizer.name if hasattr(self, "tokenizer") else self.server.tokenizer
            found |= {"model": self.model, "tokenizer": tokenizer}
        return found

    def _start_window(self) -> None:
        self._scores = Scores(self.server, self.model)
        self._completions: list[Completion] = []
        self._drafting: list[Drafting | Timings] = []
        self._resent = 0
        self._counts_chunks = True  # of each answer
        self._cpu_s = 0.0
        self._per_second: Counter[int] = Counter()
        self._spans: list[tuple[float, float]] = []
        self._opened: float | None = None
        self._closed = 0.0

    async def _work(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        concurrency: int,
        arrivals: Sequence[float] | None,
        on_completion: Callable[[Completion], None] | None,
    ) -> list[Completion]:
        done: dict[int, Completion] = {}
        timeout = aiohttp.ClientTimeout(total=self.server.request_timeout, sock_connect=CONNECT_S)
        start = time.perf_counter()
        if self._opened is None:
            self._opened = start + (arrivals[0] if arrivals else 0.0)

        async def work(session: aiohttp.ClientSession, index: int) -> None:
            arrived = time.perf_counter() if arrivals is None else start + arrivals[index]
            await asyncio.sleep(max(0.0, arrived - time.perf_counter()))
            asked, most = self._asked(prompts[index]), params[index].max_new_tokens
            templated = asked.messages is not None
            answer = Answer(index, asked.ids, arrived, most, asked.text, templated=templated)
            try:
                await self._ask(session, answer, params[index], asked)
            except Exception as error:  # whatever an answer leads to fails its request and not the sweep
                answer.finish_reason, answer.error = "error", describe(error)
            self._closed = max(self._closed, time.perf_counter())
            self._spans.append((arrived, time.perf_counter()))
            done[index] = completion = replace(answer.completion(), seed=params[index].seed)
            if completion.is_complete:
                self._take(answer)
            self._completions.append(completion)
            if on_completion is not None:
                on_completion(completion)

        await http_client.in_flight(len(prompts), concurrency, http_client.session(self.server.headers, timeout), work)
        return [done[index] for index in range(len(prompts))]

    def _take(self, answer: Answer) -> None:
        """Add a complete answer to the window."""
        assert self._opened is not None
        if answer.drafting is not None:
            self._drafting.append(answer.drafting)
        if self._texts is not None and answer.text is not None and answer.prompt:
            self._texts.learn(answer.prompt, answer.text, answer.prompt_tokens)
        self._counts_chunks = self._counts_chunks and answer.is_counted
        for when, tokens in answer.arrivals:
            self._per_second[int(when - self._opened)] += tokens

    async def _ask(self, session: aiohttp.ClientSession, answer: Answer, params: SamplingParams, asked: _Asked) -> None:
        """Send a request and read its stream to the end. Raises what went wrong, one of ERRORS."""
        question, path = self._question(asked)
        body: dict[str, Any] = {
            "model": self.model,
            **question,
            **fields_of(params, self.kind),
            **self._cache.fields,
            **self._verifies,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        answer.sent = time.perf_counter()
        try:
            await self._stream(session, path, body, answer)
        except Unanswered:  # other connections that wait for a request may be closed, too
            self._resent += 1
            async with http_client.session(self.server.headers, session.timeout, reuse=False) as fresh:
                await self._stream(fresh, path, body, answer)
        answer.check()

    async def _stream(self, session: aiohttp.ClientSession, path: str, body: dict[str, Any], answer: Answer) -> None:
        """Send a request and add its stream to `answer`."""
        url, loop = f"{self.server.base_url}{path}", asyncio.get_running_loop()
        idle = asyncio.timeout(self.server.idle_timeout)  # aiohttp's own does not see a broken chunk encoding
        try:
            async with idle, session.post(url, json=body, allow_redirects=False) as response:
                await http_client.check_status(response)
                async for event in events(response, answer.most_bytes):
                    now = time.perf_counter()
                    idle.reschedule(loop.time() + self.server.idle_timeout)
                    answer.take(parsed(event), now)
        except aiohttp.ConnectionTimeoutError:
            raise
        except TimeoutError:
            if idle.expired():
                raise Failed(f"no data for {self.server.idle_timeout:g} s, the idle timeout") from None
            raise Failed(f"not finished after {self.server.request_timeout:g} s, the timeout of a request") from None

    def _asked(self, prompt: Prompt) -> _Asked:
        if isinstance(prompt, str):
            return _Asked([], prompt)
        if _is_ids(prompt):
            if self.server.send == "chat":
                return _Asked(prompt, messages=self._messages[tuple(prompt)])
            return _Asked(prompt, self._texts.of(prompt) if self._texts is not None else None)
        messages = cast("Messages", prompt)
        return _Asked([], "".join(str(message.get("content", "")) for message in messages), messages)

    def _question(self, asked: _Asked) -> tuple[dict[str, Any], str]:
        """The fields of a request that hold its prompt, and its path. An answer may be begun by the last message."""
        if asked.messages is None:
            return {"prompt": asked.ids if asked.text is None else asked.text}, "/v1/completions"
        fields: dict[str, Any] = {"messages": asked.messages}
        if asked.messages[-1].get("role") == "assistant":
            fields |= {"add_generation_prompt": False, "continue_final_message": True}
        if self.server.thinking is not None:
            fields["chat_template_kwargs"] = {"enable_thinking": self.server.thinking}
        return fields, "/v1/chat/completions"


def _is_ids(prompt: Prompt) -> TypeGuard[list[int]]:
    return not isinstance(prompt, str) and not (prompt and isinstance(prompt[0], dict))
