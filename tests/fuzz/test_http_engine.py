"""Mutated streams, responses, model lists and counters of a server: every request ends in time with a result that can
be right, or with a one-line reason."""

from __future__ import annotations

import json
import math
import time
import types
from collections.abc import Callable
from random import Random

import pytest
from fuzzing import Fuzz
from misbehaving_server import (
    Misbehaviour,
    Step,
    chunk,
    endless,
    event,
    good_stream,
    half_close,
    head,
    misbehaving,
    reset,
)
from mutate import HOSTILE, dump_json, mutate_bytes, mutate_json_text, mutate_value

from specbatch.core.sampling_params import SamplingParams
from specbatch.errors import SpecbatchError
from specbatch.servers import client as http_client
from specbatch.servers.answer import SPECIAL_TOKENS, Answer
from specbatch.servers.client import Failed, parsed
from specbatch.servers.engine import HttpEngine
from specbatch.servers.scoring import likelihood_of
from specbatch.servers.server import Server
from specbatch.servers.server_counters import accepted, counters_of

TOKENS = 6
TIMEOUT_S = 0.15
BYTES = types.SimpleNamespace(
    name="bytes", vocab_size=256, eos_ids=frozenset(), bos_id=1,
    decode=lambda ids, skip_special_tokens=True: bytes(ids).decode(),
    encode=lambda text, add_special_tokens=True: list(text.encode()),
)  # fmt: skip
MODELS = json.dumps({"object": "list", "data": [{"id": "org/toy", "max_model_len": 512, "owned_by": "me"}]}).encode()
METRICS = b"""# HELP vllm:spec_decode_num_drafts_total Number of drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a"} 10.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a"} 30.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 4.0
vllm:generation_tokens_total{engine="0"} 30.0
vllm:time_to_first_token_seconds_count{engine="0"} 4.0
vllm:inter_token_latency_seconds_count{engine="0"} 11.0
sglang:spec_verify_calls_total{m="x"} 7.0
"""
HEADERS = (
    "Content-Length: 50", "Content-Length: -1", "Content-Encoding: gzip", "Content-Type: text/html", "X: " + "y" * 9999,
    "Transfer-Encoding: gzip", "Location: /", "Upgrade: h2c",
)  # fmt: skip


# What vLLM, SGLang and llama.cpp report of the verifies of an answer.
REPORTS = [
    b'{"metrics": {"speculative_decoding": {"num_spec_steps": 2, "num_accepted_draft_tokens": 3, '
    b'"num_draft_tokens": 6, "acceptance_histogram": [0, 1, 1, 0], '
    b'"per_step_accepted": [1, 2], "per_step_drafted": [3, 3]}}}',
    b'{"sglext": {"spec_tokens_details": {"spec_verify_ct": 2, "spec_num_correct_drafts": 3, '
    b'"spec_num_proposed_drafts": 6, "spec_correct_drafts_histogram": [0, 1, 1]}}}',
    b'{"timings": {"predicted_n": 1}}',
    b'{"timings": {"predicted_n": 2, "draft_n": 3, "draft_n_accepted": 1}}',
    b'{"timings": {"predicted_n": 4, "draft_n": 6, "draft_n_accepted": 3}}',
]


def test_http_engine(fuzz: Fuzz, use_tokenizer: Callable[[object], None], monkeypatch: pytest.MonkeyPatch) -> None:
    use_tokenizer(BYTES)
    monkeypatch.setattr(http_client, "CONNECT_S", 2 * TIMEOUT_S)
    monkeypatch.setattr(http_client, "LINGER_S", TIMEOUT_S / 3)
    script = Misbehaviour()
    with misbehaving(script) as url:
        for random in fuzz.rounds(quick=24):
            script.completion = _completion(random)
            script.models = _other(random, MODELS) if random.random() < 0.15 else None
            script.metrics = _other(random, METRICS) if random.random() < 0.3 else [head(), METRICS]
            start = time.perf_counter()
            send = random.choice(("ids", "text"))
            try:
                engine = HttpEngine(Server(url, None, None, send, None, TIMEOUT_S, 2 * TIMEOUT_S))
            except SpecbatchError as error:
                fuzz.refused(error)
                continue
            engine.reset_record()
            count = random.choice((1, 1, 3))
            found = engine.generate([[5, 6, 7]] * count, [SamplingParams(max_new_tokens=TOKENS)] * count, concurrency=2)
            record = engine.record(concurrency=2)
            seconds = time.perf_counter() - start
            assert seconds < 6, f"{seconds} s"
            _check(fuzz, found, record, count)


def test_chunks_of_an_answer(fuzz: Fuzz) -> None:
    for random in fuzz.rounds(quick=400):
        answer = Answer(0, [5, 6, 7], 1.0, TOKENS)
        lines = [line[6:].strip() for line in good_stream(TOKENS)[:-1]]
        lines = [random.choice((line, line[:-1] + b", " + random.choice(REPORTS)[1:])) for line in lines]
        for at in random.sample(range(len(lines)), random.randint(0, 2)):
            lines[at] = mutate_json_text(random, lines[at])
        if random.random() < 0.3:
            lines = random.choices(lines, k=random.randrange(2 * len(lines)))
        try:
            for n, line in enumerate(lines):
                answer.take(parsed(line), 2.0 + n)
            answer.check()
        except Failed as error:
            reason = str(error)
        else:
            reason = ""
        if reason:
            assert reason.isprintable(), reason
            assert len(reason) < 300, reason
            fuzz.outcome("failed")
            continue
        done = answer.completion()
        assert answer.counted <= done.metrics.output_tokens <= TOKENS
        assert 3 <= done.metrics.prompt_tokens <= 3 + SPECIAL_TOKENS
        assert len(done.metrics.itl_s) < TOKENS
        assert done.metrics.ttft_s is not None
        metrics = done.metrics
        assert metrics.emitted in (0, metrics.output_tokens - 1)
        assert sum(metrics.emitted_histogram) in (0, metrics.verify_steps)
        assert metrics.accepted <= metrics.drafted
        done.text.encode()
        fuzz.outcome("completed, with verifies" if metrics.verify_steps else "completed")


def test_likelihoods(fuzz: Fuzz) -> None:
    logprobs = {"token_logprobs": [None, -1.0, -2.0, -0.5], "top_logprobs": [None, {"a": -1.0}, {"b": -1.5}, {}]}
    answer = {"choices": [{"text": "", "logprobs": logprobs, "finish_reason": "length"}]}
    for random in fuzz.rounds(quick=400):
        mutated = mutate_value(random, answer)
        try:
            found = likelihood_of(mutated, 1, 3)
        except Failed:
            fuzz.outcome("failed")
            continue
        assert math.isfinite(found.logprob)
        assert type(found.is_greedy) is bool
        fuzz.outcome("a likelihood")


def test_counters(fuzz: Fuzz) -> None:
    for random in fuzz.rounds(quick=400):
        before, after = (counters_of(mutate_bytes(random, METRICS).decode("utf-8", "replace")) for _ in range(2))
        found = accepted(before, after, [])
        assert found.source
        for name in ("accept_length", "untrimmed_accept_length"):
            length = found.metrics.get(name)
            assert length is None or (math.isfinite(length) and length >= 1)
        rate = found.metrics.get("untrimmed_accept_rate")
        assert rate is None or 0 <= rate <= 1
        fuzz.outcome("an accept length" if found.metrics else "none")


def _check(fuzz: Fuzz, found, record, count: int) -> None:
    assert len(found) == count
    for item in found:
        metrics = item.metrics
        if item.error is not None:
            assert item.finish_reason == "error"
            assert item.error.strip()
            assert item.error.isprintable(), item.error
            assert len(item.error) < 300, item.error
            fuzz.outcome("failed requests")
            continue
        assert item.finish_reason in ("stop", "length")
        assert 1 <= metrics.output_tokens <= TOKENS
        assert 3 <= metrics.prompt_tokens <= 3 + 8 or metrics.prompt_tokens >= 1
        assert 0 <= metrics.cached_tokens <= metrics.prompt_tokens
        assert metrics.ttft_s is not None
        assert 0 <= metrics.ttft_s <= metrics.e2e_s
        assert len(metrics.itl_s) < TOKENS
        item.text.encode()
        fuzz.outcome("completed requests")
    complete = [item for item in found if item.error is None]
    assert record.metrics["requests"] == len(complete)
    assert (record.metrics["output_tokens"] or 0) <= TOKENS * len(complete)
    length, rate = record.metrics["accept_length"], record.metrics.get("accept_rate")
    assert length is None or 1 <= length < 1e6, length
    assert rate is None or 0 <= rate <= 1, rate
    json.dumps([record.config, record.caps, record.metrics, record.counters, record.requests], allow_nan=False)


def _completion(random: Random) -> list[Step]:
    """A response with one misbehaviour, or none."""
    stream = good_stream(TOKENS)
    match random.randrange(8):
        case 0:  # bytes of the stream
            return [head(), mutate_bytes(random, b"".join(stream))]
        case 1:  # bytes of the response
            return _split(random, mutate_bytes(random, head() + b"".join(stream)))
        case 2:  # values of one chunk
            at = random.randrange(len(stream) - 1)
            value = json.loads(stream[at][6:])
            stream[at] = b"data: " + dump_json(mutate_value(random, value)).encode("utf-8", "surrogatepass") + b"\n\n"
            return [head(), *stream]
        case 3:  # counts
            at = random.randrange(len(stream) - 1)
            name = random.choice(("prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"))
            value = json.loads(stream[at][6:])
            value["usage"][name] = random.choice((*HOSTILE, 10**9, 7, {"cached_tokens": random.choice(HOSTILE)}))
            stream[at] = b"data: " + dump_json(value).encode("utf-8", "surrogatepass") + b"\n\n"
            return [head(), *stream]
        case 4:  # order, repetition and loss of events
            stream = random.choices(stream, k=random.randrange(2 * len(stream)))
            return _split(random, head() + b"".join(stream))
        case 5:  # chunked encoding
            parts = [b"%x\r\n%s\r\n" % (len(part), part) for part in stream] + [b"0\r\n\r\n"]
            encoded = b"".join(parts) if random.random() < 0.2 else mutate_bytes(random, b"".join(parts))
            return [head("200 OK", "text/event-stream", "Transfer-Encoding: chunked"), *_split(random, encoded)]
        case 6:  # headers
            line = random.choice(HEADERS)
            status = random.choice(
                ("200 OK", "200", "204 None", "301 Moved", "404 No", "500 Oh", "101 Switch", "999 ?")
            )
            return [head(status, "text/event-stream", line), *stream]
        case _:  # the connection
            at = random.randrange(len(stream) + 1)
            return [head(), *stream[:at], _breaking(random), *stream[at:]]


def _breaking(random: Random) -> Step:
    return random.choice((
        reset, half_close, 3 * TIMEOUT_S, endless(b": no\n\n", 0.01), endless(b"data: "), endless(event(chunk())),
        endless(event(chunk("")), 0.001), endless(b"\n"), endless(b"\x00" * 999),
    ))  # fmt: skip


def _other(random: Random, body: bytes) -> list[Step]:
    """A mutated answer of /v1/models or /metrics."""
    mutated = mutate_json_text(random, body) if body is MODELS and random.random() < 0.6 else mutate_bytes(random, body)
    steps: list[Step] = [head("200 OK", "application/json"), mutated]
    if random.random() < 0.2:
        steps.insert(random.randrange(3), _breaking(random))
    return steps


def _split(random: Random, data: bytes) -> list[Step]:
    """The data in several packets."""
    cuts = sorted(random.randrange(len(data) + 1) for _ in range(random.randrange(4)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
