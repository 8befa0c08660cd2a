"""Stub servers with the wire formats of vLLM 0.33.0, SGLang 0.5.23 and llama.cpp, whose verifies are known.

Written after the packages of these releases:

* vLLM: vllm/entrypoints/openai/completion/serving.py and chat_completion/serving.py (chunks, final usage),
  entrypoints/serve/engine/protocol.py (models, errors), entrypoints/serve/exception_handling/error_response.py,
  entrypoints/serve/dev/cache/api_router.py (reset), v1/spec_decode/metrics.py, v1/metrics/loggers.py and stats.py and
  v1/core/sched/scheduler.py (what counters count), v1/metrics/stats.py (RequestSpecDecodeMetrics).
* SGLang: sglang/srt/entrypoints/openai/serving_completions.py, serving_chat.py, sse_utils.py, usage_processor.py,
  protocol.py, serving_base.py (errors), entrypoints/http_server.py (flush), managers/tokenizer_manager.py and
  managers/scheduler_components/batch_result_processor.py (what is counted of a request).
* llama.cpp: what its server in xllamacpp 2026.10.11549 answered. One event per token; usage comes with the finish
  reason, timings too, or with `timings_per_token` in each event. Of answers that it really gave, see
  `llamacpp_answers.json`.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from local_server import NOT_FOUND, QuietHandler, listening

Verify = tuple[int, int]  # drafted and accepted tokens
Event = dict[str, Any]


@dataclass
class Rival:
    """A server. `verifies` repeats for each request, after its first token.

    kind       "vllm", "sglang" or "llamacpp"
    busy       how many requests to empty its cache are refused first
    fails      by the number of a request: the status of its answer, or "stream" for an error after two chunks
    details    whether vLLM's counters of tokens and steps, or SGLang's per-request details, exist (older releases), or
               llama.cpp has --metrics
    ends       tokens after which an answer ends; None: at its limit
    others     drafted tokens of other clients in each request
    of_requests  vLLM's --per-request-spec-decode-metrics
    several    tokens of each event of llama.cpp, which holds back characters of several tokens
    """

    kind: str
    verifies: tuple[Verify, ...] = ()
    model: str = "org/toy"
    busy: int = 0
    step_s: float = 0.0
    template_tokens: int = 0
    is_dev: bool = True
    details: bool = True
    ends: int | None = None
    others: int = 0
    of_requests: str = "none"
    several: int = 1
    fails: dict[int, int | str] = field(default_factory=dict)

    counts: Counter[str] = field(default_factory=Counter)
    bodies: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    resets: int = 0
    kept: int = 0  # tokens of verifies, as the metrics registry counts them
    steps: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    # -- an answer --------------------------------------------------------------------------------------------

    def tokens_of_steps(self, most: int, details: Counter[str]) -> Iterator[int]:
        """The new tokens of each step of a request; counts them as the server does."""
        left, most = most - 1, min(most, self.ends or most)
        with self.lock:
            self.counts["generation_tokens"] += 1
            self.counts["time_to_first_token_seconds_count"] += 1
        yield 1
        verifies = cycle(self.verifies or [(0, 0)])
        sent = 1
        while left and sent < most:
            drafted, accepted = next(verifies)
            if self.kind == "llamacpp":  # drafts are cut to fit into the limit
                drafted, accepted = min(drafted, left - 1), min(accepted, left - 1)
            kept = min(accepted + 1, left)
            left -= kept
            kept = min(kept, most - sent)
            sent += kept
            with self.lock:
                self.kept, self.steps = self.kept + kept, self.steps + 1
                self.counts["generation_tokens"] += kept
                self.counts["inter_token_latency_seconds_count"] += 1
                if drafted:
                    self.counts["spec_decode_num_drafts_total"] += 1
                    self.counts["spec_decode_num_draft_tokens_total"] += drafted
                    self.counts["spec_decode_num_accepted_tokens_total"] += accepted
                    self.counts["spec_decode_num_draft_tokens_total"] += self.others
                    for place in range(max(drafted for drafted, _ in self.verifies)):
                        self.counts[f"position {place}"] += accepted > place
            if drafted:
                details.update(verifies=1, proposed=drafted, accepted=accepted)
                details[f"histogram {accepted}"] += 1
                details[f"step {details['verifies'] - 1} {drafted} {accepted}"] = 1
            yield kept

    def events_of_llamacpp(self, body: dict[str, Any], *, chat: bool) -> Iterator[Event]:
        prompt, sent, details = self.template_tokens if chat else len(body["prompt"]), 0, Counter[str]()

        def piece(text: str | None, reason: str | None = None, **delta: Any) -> Event:
            said = {"delta": {**delta, "content": text} if reason is None else {}} if chat else {"text": text or ""}
            return {"choices": [{"index": 0, **said, "logprobs": None, "finish_reason": reason}]}

        if chat:
            yield piece(None, role="assistant")

        def timings() -> Event:
            found: Event = {"cache_n": 0, "prompt_n": prompt, "predicted_n": sent}
            if details["proposed"]:
                found |= {"draft_n": details["proposed"], "draft_n_accepted": details["accepted"]}
            return found

        text = ""
        for count in self.tokens_of_steps(body["max_tokens"], details):
            time.sleep(self.step_s)
            for place in range(sent, sent + count):
                text, sent = text + "abc "[place % 4], sent + 1
                if len(text) == self.several:
                    yield piece(text) | ({"timings": timings()} if body.get("timings_per_token") else {})
                    text = ""
        usage = {"completion_tokens": sent, "prompt_tokens": prompt, "total_tokens": prompt + sent}
        usage["prompt_tokens_details"] = {"cached_tokens": 0}
        end = piece(text, "length" if sent == body["max_tokens"] else "stop")
        if chat:  # usage comes in a chunk of its own
            yield end
            yield {"choices": [], "usage": usage, "timings": timings()}
        else:
            yield end | {"usage": usage, "timings": timings()}

    def events(self, body: dict[str, Any], *, chat: bool, number: int) -> Iterator[Event]:
        """The events of a stream."""
        if self.kind == "llamacpp":
            yield from self.events_of_llamacpp(body, chat=chat)
            return
        prompt = self.template_tokens if chat else len(body["prompt"])
        options, sent, details = body["stream_options"], 0, Counter[str]()
        head = {"id": f"r-{number}", "created": 1, "model": self.model}
        head["object"] = "chat.completion.chunk" if chat else "text_completion"

        def usage(count: int) -> Event:
            found: Event = {"prompt_tokens": prompt, "total_tokens": prompt + count, "completion_tokens": count}
            extra = {"prompt_tokens_details": None, "reasoning_tokens": 0, "completion_tokens_details": None}
            return found | (extra if self.kind == "sglang" else {})

        def piece(text: str, reason: str | None, **delta: Any) -> Event:
            said = {"delta": {**delta, "content": text} if text or delta else {}} if chat else {"text": text}
            if chat and self.kind == "sglang":
                said["delta"] = {"reasoning_content": None, **said["delta"]}
            stop = {"matched_stop": None} if self.kind == "sglang" else {"stop_reason": None}
            return head | {"choices": [{"index": 0, **said, "logprobs": None, "finish_reason": reason, **stop}]}

        if chat:  # the role comes first, from vLLM with usage
            yield piece("", None, role="assistant") | ({"usage": usage(0)} if self.kind == "vllm" else {})
        for count in self.tokens_of_steps(body["max_tokens"], details):
            time.sleep(self.step_s)
            sent += count
            if self.fails.get(number) == "stream" and sent > 1:
                yield {"error": self.error(503 if self.kind == "sglang" else 500)}
                return
            ended = sent == min(body["max_tokens"], self.ends or sent + 1)
            reason = "length" if sent == body["max_tokens"] else "stop"
            last = ended and not (chat and self.kind == "sglang")
            new = piece("".join("abc "[place % 4] for place in range(sent - count, sent)), reason if last else None)
            continuous = {"usage": usage(sent)} if options.get("continuous_usage_stats") else {}
            yield new | continuous
        if chat and self.kind == "sglang":
            yield piece("", reason) | {"usage": None}
        if self.kind == "sglang" and body.get("return_spec_tokens_details") and self.details and details["verifies"]:
            yield head | {"choices": [], "usage": None, "sglext": {"spec_tokens_details": self._details(details, sent)}}
        self.counts["spec_verify_calls_total"] += details["verifies"]
        of_request = (
            {"metrics": {"speculative_decoding": self._of_request(details)}} if self.of_requests != "none" else {}
        )
        yield head | {"choices": [], "usage": usage(sent)} | of_request

    def _of_request(self, counted: Counter[str]) -> dict[str, Any]:
        verifies, most = counted["verifies"], max(drafted for drafted, _ in self.verifies)
        found = {
            "mean_acceptance_length": 1.0 + counted["accepted"] / verifies if verifies else 1.0,
            "draft_acceptance_rate": counted["accepted"] / counted["proposed"] if verifies else 0.0,
            "acceptance_histogram": [counted[f"histogram {place}"] for place in range(most + 1)],
            "num_spec_steps": verifies,
            "num_accepted_draft_tokens": counted["accepted"],
            "num_draft_tokens": counted["proposed"],
            "num_spec_tokens": most,
        }
        if verifies and self.of_requests == "detailed":
            steps = [name.split()[2:] for name in counted if name.startswith("step ")]
            found |= {"per_step_accepted": [int(right) for _, right in steps]}
            found |= {"per_step_drafted": [int(drafted) for drafted, _ in steps]}
        return found

    def _details(self, counted: Counter[str], tokens: int) -> dict[str, Any]:
        verifies, most = counted["verifies"], max(drafted for drafted, _ in self.verifies)
        return {
            "spec_accept_rate": counted["accepted"] / counted["proposed"],
            "spec_accept_length": tokens / verifies,
            "spec_cap_length": 0.0,
            "spec_block_accept_length": 0.0,
            "spec_num_correct_drafts": counted["accepted"],
            "spec_num_proposed_drafts": counted["proposed"],
            "spec_verify_ct": verifies,
            "spec_correct_drafts_histogram": [counted[f"histogram {place}"] for place in range(most + 1)],
            "spec_cap_lens_histogram": [],
        }

    # -- the rest ---------------------------------------------------------------------------------------------

    def error(self, status: int) -> Event:
        """The body of an error; of vLLM without the object `error` around it."""
        kinds = {400: "BadRequestError", 500: "InternalServerError", 503: "SERVICE_UNAVAILABLE"}
        text = {
            400: "This model's maximum context length is 512 tokens. Please reduce the length of the input prompt.",
            500: "The server had an error while processing your request.",
            503: "The request queue is full.",
        }[status]
        found = {"message": text, "type": kinds[status], "param": None, "code": status}
        return {"object": "error", **found} if self.kind == "sglang" else found

    def metrics(self) -> str:
        names = [name for name in self.counts if not name.startswith("position ")]
        if self.kind == "sglang":
            count = self.counts["spec_verify_calls_total"]
            return f'sglang:spec_accept_length{{model_name="m"}} 9.9\nsglang:spec_verify_calls_total{{}} {count}.0\n'
        if self.kind == "llamacpp":
            lines = [f"llamacpp:{name} {count}" for name, count in self.counts.items() if name.startswith("spec_")]
            name = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"
            places = [name for name in self.counts if name.startswith("position ")]
            lines += [f'{name}{{position="{place.split()[1]}"}} {self.counts[place]}' for place in places]
            return "\n".join(["llamacpp:n_decode_total 7", *lines, ""])
        old = () if self.details else ("generation_tokens", "time_to_first_token_seconds_count")
        labels = f'engine="0",model_name="{self.model}"'
        lines = ["# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts."]
        shown = {"generation_tokens": "generation_tokens_total"}
        for name in names:
            if name not in old and not (name.startswith("spec_") and not self.verifies):
                lines.append(f"vllm:{shown.get(name, name)}{{{labels}}} {self.counts[name]}.0")
        for name in sorted(set(self.counts) - set(names)):
            place = name.removeprefix("position ")
            counter = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines.append(f'{counter}{{{labels},position="{place}"}} {self.counts[name]}.0')
        lines.append(f"vllm:spec_decode_num_drafts_created{{{labels}}} 1.7e+09")
        return "\n".join(lines) + "\n"

    def reset(self, path: str) -> tuple[int, str]:
        """Status and body of a request to empty the prefix cache."""
        if self.kind == "sglang" and path == "/flush_cache":
            self.resets += 1
            if self.resets <= self.busy:
                return 400, "Flush cache failed.\n"
            return 200, "Cache flushed.\nPlease check backend logs for more details. (...)\n"
        if self.kind == "vllm" and path == "/reset_prefix_cache" and self.is_dev:
            self.resets += 1
            return 200, json.dumps({"success": self.resets > self.busy})
        return NOT_FOUND


@contextmanager
def rival(server: Rival) -> Iterator[str]:
    """The server's address."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            if self.path == "/v1/models":
                card = {"id": server.model, "object": "model", "created": 1, "owned_by": server.kind}
                card |= {"root": server.model, "parent": None, "max_model_len": 512}
                self.send_text(200, json.dumps({"object": "list", "data": [card]}))
            else:
                is_open = self.path == "/metrics" and (server.details or server.kind != "llamacpp")
                self.send_text(*((200, server.metrics()) if is_open else NOT_FOUND))

        def do_POST(self) -> None:
            body = json.loads(self.body() or "{}")
            if self.path not in ("/v1/completions", "/v1/chat/completions"):
                self.send_text(*server.reset(self.path))
                return
            with server.lock:
                number = len(server.bodies)
                server.bodies.append((self.path, body))
            status = server.fails.get(number)
            if isinstance(status, int):
                error = server.error(status)
                self.send_text(status, json.dumps(error if server.kind == "sglang" else {"error": error}))
                return
            self.begin_events()
            for event in server.events(body, chat="chat" in self.path, number=number):
                self.send_event(event)
            self.send_event("[DONE]")

    with listening(Handler) as address:
        yield address
