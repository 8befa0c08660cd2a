"""An OpenAI-compatible server on loopback that runs this engine, so that its answers are known, and has faults.

The faults stand between the client and the engine: what they change of a request or an answer is all that is wrong.
"""

from __future__ import annotations

import json
import queue
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from local_server import NOT_FOUND, QuietHandler, listening

from specbatch.core.completion import Completion
from specbatch.core.sampling_params import SamplingParams
from specbatch.engine.engine import Engine
from specbatch.errors import SpecbatchError

Body = dict[str, Any]
MOST = 32  # requests that the engine gets at once
ENGINES = threading.Lock()  # several servers may run the same one
GIVEN = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "stop", "stop_token_ids", "ignore_eos", "min_tokens", "logit_bias", "skip_special_tokens",
)  # fmt: skip
IGNORING = {
    name: f"ignores {name}"
    for name in (
        "seed", "top_p", "top_k", "min_p", "stop", "min_tokens", "logit_bias", "presence_penalty", "frequency_penalty",
        "repetition_penalty",
    )
}  # fmt: skip
FAULTS = (
    "ignores temperature",
    "ignores response_format",
    *IGNORING.values(),
    "repeats a token after a prefix hit",
    "keeps a token of a stop",
    "loses a token before a stop",
    "swaps two answers",
    "counts tokens twice",
    "drops a token of max_tokens",
    "cuts streams",
    "wrong log-probabilities",
)


@dataclass
class EngineServer:
    """A server. A request's number counts from 0, over all of them.

    kind      `owned_by` of its model, such as "vllm" or "llamacpp", which has no log-probabilities of prompts
    root      where the model is, if it says so
    faults    of `FAULTS`
    shows     whether it sends token ids and log-probabilities
    fails     by the number of a request: whether it is answered with status 503
    says      replaces the text of an answer
    splits    whether text up to </think> is `reasoning_content` of a chat
    key       that requests must have
    refuses   fields that requests may not have
    before    called with the number of each request
    """

    engine: Engine
    model: str = "org/tiny"
    kind: str = "vllm"
    root: str | None = None
    faults: frozenset[str] = frozenset()
    shows: bool = True
    fails: Callable[[int], bool] = lambda number: False
    says: Callable[[str], str] = lambda text: text
    splits: bool = False
    key: str | None = None
    refuses: tuple[str, ...] = ()
    before: Callable[[int], None] = lambda number: None

    bodies: list[tuple[str, Body]] = field(default_factory=list)
    seen: set[tuple[int, ...]] = field(default_factory=set)
    jobs: queue.Queue[Any] = field(default_factory=queue.Queue)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        """Give the engine all requests that wait, until None comes."""
        while (first := self.jobs.get()) is not None:
            batch = [first]
            while batch[-1] is not None and len(batch) < MOST:
                try:
                    batch.append(self.jobs.get(timeout=0.002))
                except queue.Empty:
                    break
            ends = batch[-1] is None
            batch = [job for job in batch if job is not None]
            with ENGINES:
                done = self.engine.generate([prompt for prompt, _, _ in batch], [params for _, params, _ in batch])
            if "swaps two answers" in self.faults and len(done) > 1:
                done[0], done[1] = done[1], done[0]
            for (_, _, reply), completion in zip(batch, done, strict=True):
                reply.put(completion)
            if ends:
                return

    def ids(self, body: Body) -> list[int]:
        """The prompt of a request."""
        tokenizer = self.engine.tokenizer
        if "messages" in body:
            continues = body.get("continue_final_message", False)
            text = tokenizer.apply_chat_template(body["messages"], continue_final_message=continues)
            return tokenizer.encode(text)
        return tokenizer.encode(body["prompt"]) if isinstance(body["prompt"], str) else body["prompt"]

    def complete(self, prompt: list[int], body: Body) -> Completion:
        """Raises SpecbatchError for fields that the engine refuses."""
        params = self.params(body)
        self.engine.check(prompt, params)
        reply: queue.Queue[Completion] = queue.Queue()
        self.jobs.put((prompt, params, reply))
        return reply.get()

    def params(self, body: Body) -> SamplingParams:
        if wrong := [name for name in self.refuses if body.get(name)]:
            raise SpecbatchError(f"{wrong[0]} is not yet supported with speculative decoding")
        values = {name: body[name] for name in GIVEN if body.get(name) is not None}
        values["max_new_tokens"] = body["max_tokens"] - ("drops a token of max_tokens" in self.faults)
        if values.get("top_k") == -1:
            values["top_k"] = 0
        if "repeat_penalty" in body:  # of llama.cpp
            values["repetition_penalty"] = body["repeat_penalty"]
        for name, fault in IGNORING.items():
            if fault in self.faults:
                values.pop(name, None)
        if values.get("seed") is None:
            values["seed"] = secrets.randbits(31)
        if "ignores temperature" in self.faults:
            values["temperature"] = 1.0
        likely = body.get("top_logprobs") if "messages" in body else body.get("logprobs")
        if likely is not None:
            values |= {"logprobs": True, "top_logprobs": likely}
        form = body.get("response_format")
        if form is not None and "ignores response_format" not in self.faults:
            values["json_schema"] = form["json_schema"]["schema"]
        return SamplingParams(**values)

    def pieces(self, prompt: list[int], body: dict[str, Any]) -> tuple[list[str], Completion]:
        """The text of each token, and the answer."""
        done = self.complete(prompt, body)
        tokens, text = list(done.token_ids), done.text
        with self.lock:
            again = tuple(prompt) in self.seen
            self.seen.add(tuple(prompt))
        place = min(2, len(tokens) - 1)
        if "repeats a token after a prefix hit" in self.faults and again and place > 0:
            tokens = [*tokens[:place], tokens[place - 1], *tokens[place:-1]]
            text = self.engine.tokenizer.decode(tokens)
            done.token_ids[:] = tokens
            for shown in (done.logprobs, done.top_logprobs):
                if shown:
                    shown[:] = [*shown[:place], shown[place - 1], *shown[place:-1]]
        shown = self.engine.tokenizer
        hides = body.get("skip_special_tokens", True)
        parts = [shown.decode([token], skip_special_tokens=hides) for token in tokens]
        left, found = text, []
        for part in parts:  # what a stop string cuts is not shown
            found.append(left[: len(part)])
            left = left[len(part) :]
        found[-1] += left
        if body.get("stop") and done.finish_reason == "stop":
            if "keeps a token of a stop" in self.faults:
                found[-1] += body["stop"][0][:1]
            elif "loses a token before a stop" in self.faults:
                found[len(text) - 1] = ""
        return found, done

    def echoed(self, prompt: list[int]) -> Body:
        """Log-probabilities of a prompt, with the most likely token of each place."""
        with ENGINES:
            found = self.engine.score([(prompt[:at], [prompt[at]]) for at in range(1, len(prompt))])
        names = [f"token_id:{token}" for token in prompt]
        top = [
            {name: one.logprob} | ({} if one.is_greedy else {"another": one.logprob + 0.5})
            for name, one in zip(names[1:], found, strict=True)
        ]
        return {
            "tokens": [*names, "next"],
            "token_logprobs": [None, *(one.logprob for one in found), -1.0],
            "top_logprobs": [None, *top, {"next": -1.0}],
        }

    def choices(self, body: Body, parts: list[str], done: Completion) -> Iterator[Body]:
        """Of the events of an answer: one for each token or, where it is another text, for each part of that."""
        text, is_chat = self.says(done.text), "messages" in body
        if text != done.text or self.splits:
            reasoning, mark, rest = text.partition("</think>")
            splits = self.splits and bool(mark)
            for name, part in {
                "reasoning_content": reasoning if splits else "",
                "content": rest if splits else text,
            }.items():
                if part:
                    yield {"delta": {name: part}} if is_chat else {"text": part}
            yield ({"delta": {}} if is_chat else {"text": ""}) | {"finish_reason": done.finish_reason}
            return
        for index, (part, token) in enumerate(zip(parts, done.token_ids, strict=True)):
            choice: Body = {"delta": {"content": part}} if is_chat else {"text": part}
            if index == len(parts) - 1:
                choice["finish_reason"] = done.finish_reason
            if self.shows and body.get("return_token_ids"):
                choice["token_ids"] = [token]
            if self.shows and done.logprobs is not None and done.top_logprobs is not None:
                wrong = 0.7 if "wrong log-probabilities" in self.faults and index % 3 == 1 else 0.0
                top = {f"token_id:{name}": value - wrong for name, value in done.top_logprobs[index].items()}
                name, value = f"token_id:{token}", done.logprobs[index]
                choice["logprobs"] = {"tokens": [name], "token_logprobs": [value], "top_logprobs": [top]}
                if is_chat:
                    likely = [{"token": other, "logprob": each} for other, each in top.items()]
                    choice["logprobs"] = {"content": [{"token": name, "logprob": value, "top_logprobs": likely}]}
            yield choice


@contextmanager
def serving_engine(server: EngineServer) -> Iterator[str]:
    """The server's address."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            if self._is_refused():
                return
            if self.path == "/v1/models":
                longest = server.engine.caps["max_model_len"]
                card = {"id": server.model, "owned_by": server.kind, "root": server.root, "max_model_len": longest}
                self.send_text(200, json.dumps({"data": [card]}))
            elif self.path == "/version" and server.kind == "vllm":
                self.send_text(200, '{"version": "0.33.0"}')
            else:
                self.send_text(*NOT_FOUND)

        def do_POST(self) -> None:
            body = json.loads(self.body() or "{}")
            if self._is_refused():
                return
            if self.path not in ("/v1/completions", "/v1/chat/completions"):
                self.send_text(*NOT_FOUND)
                return
            with server.lock:
                number = len(server.bodies)
                server.bodies.append((self.path, body))
            server.before(number)
            if server.fails(number):
                self._refuse(503, "overloaded")
                return
            prompt = server.ids(body)
            if body.get("echo") and server.kind == "llamacpp":
                self._refuse(400, "Only no echo is supported")
            elif body.get("echo"):
                choice = {"index": 0, "text": "", "logprobs": server.echoed(prompt), "finish_reason": "length"}
                self.send_text(200, json.dumps({"choices": [choice]}))
            else:
                try:
                    parts, done = server.pieces(prompt, body)
                except (SpecbatchError, TypeError, LookupError) as error:
                    self._refuse(400, str(error))
                    return
                self._stream(body, prompt, parts, done, cut="cuts streams" in server.faults and number % 5 == 4)

        def _refuse(self, status: int, message: str) -> None:
            self.send_text(status, json.dumps({"error": {"message": message}}))

        def _is_refused(self) -> bool:
            if server.key is None or self.headers["Authorization"] == f"Bearer {server.key}":
                return False
            self._refuse(401, "Unauthorized")
            return True

        def _stream(self, body: Body, prompt: list[int], parts: list[str], done: Completion, *, cut: bool) -> None:
            self.begin_events()
            for index, choice in enumerate(server.choices(body, parts, done)):
                if cut and index == len(parts) // 2:
                    return
                self.send_event({"choices": [{"index": 0, "finish_reason": None, **choice}]})
            count = len(done.token_ids) * (2 if "counts tokens twice" in server.faults else 1)
            usage = {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": len(prompt) + count}
            self.send_event({"choices": [], "usage": usage})
            self.send_event("[DONE]")

    worker = threading.Thread(target=server.run, daemon=True)
    worker.start()
    try:
        with listening(Handler) as address:
            yield address
    finally:
        server.jobs.put(None)
        worker.join()
