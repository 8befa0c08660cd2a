"""An engine of this package behind the API of OpenAI's servers, as vLLM has it: an answer is known from the engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from local_server import NOT_FOUND, QuietHandler, listening

from specbatch.core.request import Completion, SamplingParams
from specbatch.engine.engine import Engine

Body = dict[str, Any]


@dataclass
class EngineServer:
    """A server. A request's number counts from 0, over all of them.

    kind      "vllm", "sglang" or "llamacpp"; only the last one has no log-probabilities of prompts
    fails     by the number of a request: whether it is answered with status 503
    says      replaces the text of an answer
    splits    whether text up to </think> is `reasoning_content` of a chat
    key       that requests must have
    before    called with the number of each request
    """

    engine: Engine
    model: str = "org/tiny"
    kind: str = "vllm"
    fails: Callable[[int], bool] = lambda number: False
    says: Callable[[str], str] = lambda text: text
    splits: bool = False
    key: str | None = None
    before: Callable[[int], None] = lambda number: None

    bodies: list[tuple[str, Body]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ids(self, path: str, body: Body) -> list[int]:
        tokenizer = self.engine.tokenizer
        if "chat" in path:
            messages = body["messages"]
            continues = body.get("continue_final_message", False)
            return tokenizer.encode(tokenizer.apply_chat_template(messages, continue_final_message=continues))
        return tokenizer.encode(body["prompt"]) if isinstance(body["prompt"], str) else body["prompt"]

    def answer(self, prompt: list[int], body: Body) -> Completion:
        params = SamplingParams(
            max_new_tokens=body["max_tokens"],
            temperature=body["temperature"],
            stop=tuple(body.get("stop", ())),
            seed=body.get("seed"),
            repetition_penalty=body.get("repetition_penalty", body.get("repeat_penalty", 1.0)),
        )
        with self.lock:
            return self.engine.generate([prompt], [params])[0]

    def echoed(self, prompt: list[int]) -> Body:
        """Log-probabilities of a prompt, with the most likely token of each place."""
        with self.lock:
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


@contextmanager
def serving_engine(server: EngineServer) -> Iterator[str]:
    """The server's address."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            if self._is_refused():
                return
            if self.path == "/v1/models":
                longest = server.engine.caps["max_model_len"]
                card = {"id": server.model, "owned_by": server.kind, "max_model_len": longest}
                self.send_text(200, json.dumps({"data": [card]}))
            elif self.path == "/version":
                self.send_text(200, '{"version": "0.33.0"}')
            else:
                self.send_text(*NOT_FOUND)

        def do_POST(self) -> None:
            body = json.loads(self.body())
            if self._is_refused():
                return
            if self.path not in ("/v1/completions", "/v1/chat/completions"):
                self.send_text(*NOT_FOUND)
                return
            with server.lock:
                number = len(server.bodies)
                server.bodies.append((self.path, body))
            server.before(number)
            prompt = server.ids(self.path, body)
            if server.fails(number):
                self.send_text(503, '{"error": {"message": "overloaded"}}')
            elif not body.get("echo"):
                self._stream(prompt, body)
            elif server.kind == "llamacpp":
                self.send_text(400, '{"error": {"message": "Only no echo is supported"}}')
            else:
                choice = {"index": 0, "text": "", "logprobs": server.echoed(prompt), "finish_reason": "length"}
                self.send_text(200, json.dumps({"choices": [choice]}))

        def _is_refused(self) -> bool:
            if server.key is None or self.headers["Authorization"] == f"Bearer {server.key}":
                return False
            self.send_text(401, '{"error": {"message": "Unauthorized"}}')
            return True

        def _stream(self, prompt: list[int], body: Body) -> None:
            done = server.answer(prompt, body)
            text, is_chat = server.says(done.text), "chat" in self.path
            reasoning, mark, rest = text.partition("</think>")
            parts = {"reasoning_content": reasoning, "content": rest} if server.splits and mark else {"content": text}
            self.begin_events()
            for name, part in parts.items():
                said = {"delta": {name: part}} if is_chat else {"text": text}
                self.send_event({"choices": [{"index": 0, **said, "finish_reason": None}]})
            end = {"delta": {}} if is_chat else {"text": ""}
            self.send_event({"choices": [{"index": 0, **end, "finish_reason": done.finish_reason}]})
            usage = {"prompt_tokens": len(prompt), "completion_tokens": len(done.token_ids)}
            self.send_event({"choices": [], "usage": usage})
            self.send_event("[DONE]")

    with listening(Handler) as address:
        yield address
