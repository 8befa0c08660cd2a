"""A server that misbehaves: requests end in time with a one-line reason; no impossible number is recorded."""

from __future__ import annotations

import gzip
import json
import re
import time
import types

import pytest
from misbehaving_server import (
    Misbehaviour,
    chunk,
    dripping,
    endless,
    event,
    good_stream,
    half_close,
    head,
    misbehaving,
    reset,
)

from specbatch.core.sampling_params import SamplingParams
from specbatch.errors import SpecbatchError
from specbatch.servers import client as http_client
from specbatch.servers.engine import HttpEngine
from specbatch.servers.server import Server

BYTES = types.SimpleNamespace(
    name="bytes", vocab_size=256, eos_ids=frozenset(), bos_id=1,
    decode=lambda ids, skip_special_tokens=True: bytes(ids).decode(),
)  # fmt: skip
GOOD = b"".join(good_stream())
CHUNKED = head("200 OK", "text/event-stream", "Transfer-Encoding: chunked")
DEEP = b"[" * 100_000 + b"]" * 100_000
HUGE = 10**9


@pytest.fixture(autouse=True)
def tokenizer(use_tokenizer):
    use_tokenizer(BYTES)


def ask(script: Misbehaviour, *, count: int = 1, idle: float = 0.3, total: float = 0.6, concurrency=None, **settings):
    """The completions and the record of `count` requests for 4 tokens, and how long they took. concurrency: of the
    requests, by default all at once."""
    with misbehaving(script) as url:
        engine = HttpEngine(Server(url, idle_timeout=idle, request_timeout=total, **settings))
        engine.reset_record()
        start = time.perf_counter()
        params = [SamplingParams(max_new_tokens=4)] * count
        found = engine.generate([[5, 6, 7]] * count, params, concurrency=concurrency or count)
        return found, engine.record(concurrency=count), time.perf_counter() - start


def streamed(*events: bytes) -> list:
    return [head() + b"".join(events)]


def last(**usage) -> list:
    """A stream whose last usage is `usage`."""
    return streamed(
        *good_stream()[:2], event(chunk("c", tokens=4, reason="length") | {"usage": usage}), event(b"[DONE]")
    )


FAILING = {
    "no answer": ([], r"^the server closed the connection before it answered$"),
    "connection reset": ([reset], r"^the server closed the connection before it answered$"),
    "connection reset in the headers": ([b"HTTP/1.1 200 OK\r\nContent-", 0.05, reset],
                                        r"^the connection broke before the answer ended \(ClientOSError\)$"),
    "connection reset in the stream": ([head(), event(chunk()), 0.05, reset],
                                       "ClientOSError|ended before its answer did"),
    "half-closed before the headers end": ([b"HTTP/1.1 200 OK\r\nContent-", half_close, 0.1], "Error"),
    "not HTTP": ([b"\x00\x01 hello\r\n\r\n"], "Error"),
    "slow headers": (dripping(head(), 0.02), "no data for 0.3 s"),
    "silence": ([1.0], "no data for 0.3 s"),
    "silence in the stream": ([head(), event(chunk()), 1.0], "no data for 0.3 s"),
    "endless comments": ([head(), endless(b": keep-alive\n\n", 0.02)], "no data for 0.3 s"),
    "endless empty events": ([head(), endless(event(chunk("")), 0.02)], "not finished after 0.6 s"),
    "endless headers": ([b"HTTP/1.1 200 OK\r\n", endless(b"X-A: b\r\n")], "Error"),
    "one endless header": ([b"HTTP/1.1 200 OK\r\nX-A: ", endless(b"b" * 999)], "Error"),
    "endless 100 Continue": ([endless(b"HTTP/1.1 100 Continue\r\n\r\n", 0.001)], "no data for 0.3 s|Error"),
    "endless line": ([head(), b"data: ", endless(b"x" * 9999)], "a line of more than 131072 bytes"),
    "endless tokens": ([head(), endless(event(chunk()))], "more than 5 chunks for max_tokens=4"),
    "endless counted tokens": ([head(), endless(event(chunk(tokens=4)))], "more than 5 chunks for max_tokens=4"),
    "endless events without text": ([head(), endless(event({"choices": [], "x": "y" * 60_000}))],
                                    "the stream has more than 1081344 bytes"),
    "redirect": ([head("307 Temporary Redirect", "text/plain", "Location: http://127.0.0.1:1/")],
                 "HTTP 307: redirects are not followed"),
    "status 500 with a huge body": ([head("500 Oh", "text/plain"), endless(b"sorry " * 9999)], "HTTP 500: sorry sorry"),
    "status 500 with deep JSON": ([head("500 Oh", "application/json"), DEEP], r"HTTP 500: \[\["),
    "status 400 with a long reason": ([head("400 No", "text/plain"), b"The prompt is " + b"very " * 99],
                                      r"^HTTP 400: The prompt is (very ){20,}very\.\.\.$"),
    "status 503 without a body": ([head("503 Busy")], "HTTP 503: no reason given"),
    "content type": ([head("200 OK", "text/html"), GOOD], "the answer is text/html instead of text/event-stream"),
    "compression bomb": ([head("200 OK", "text/event-stream", "Content-Encoding: gzip"), gzip.compress(b"\n" * 10**7)],
                         "the server sent Content-Encoding gzip"),
    "short body": ([head("200 OK", "text/event-stream", "Content-Length: 9999"), GOOD[:99]],
                   r"^the connection broke before the answer ended \(ClientPayloadError\)$"),
    "chunk size": ([CHUNKED, b"zz\r\nabc\r\n"], "no data for 0.3 s|Error"),
    "chunk without end": ([CHUNKED, b"5\r\nda"], "ClientPayloadError"),
    "data is no JSON": (streamed(b"data: {nonsense\n\n"), "a line that is not JSON"),
    "deep JSON": (streamed(b"data: ", DEEP[:40_000], b"\n\n"), "a line that is not JSON"),
    "NUL": (streamed(b"data: \x00\n\n"), "a line that is not JSON"),
    "invalid UTF-8": (streamed(b'data: {"choices": [{"text": "\xff"}]}\n\n'), "a line that is not JSON"),
    "data is a list": (streamed(b"data: []\n\n"), "JSON that is not an object"),
    "text is a number": (streamed(event({"choices": [{"text": 5}]})), "not a string"),
    "finish_reason is a list": (streamed(event({"choices": [{"text": "", "finish_reason": [1]}]})), "not a string"),
    "usage is a list": (streamed(event(chunk() | {"usage": [1]})), "usage that is not an object"),
    "usage only": (streamed(event(chunk(None, tokens=4)), event(b"[DONE]")), "ended before its answer did"),
    "usage missing": (streamed(event(chunk(reason="stop")), event(b"[DONE]")), "no usage"),
    "events after [DONE]": (streamed(GOOD, event(chunk())), r"continues after \[DONE\]"),
    "text after the finish reason": (streamed(event(chunk(tokens=1, reason="stop")), event(chunk(tokens=2))),
                                     "text after its finish_reason"),
    "too many tokens": (last(prompt_tokens=3, completion_tokens=HUGE), f"{HUGE} completion_tokens for max_tokens=4"),
    "more tokens than an int": (last(completion_tokens=10**30), "completion_tokens=1000.*, which is not a count"),
    "negative tokens": (last(completion_tokens=-1), "completion_tokens=-1, which is not a count"),
    "half a token": (last(completion_tokens=3.5), "completion_tokens=3.5, which is not a count"),
    "NaN tokens": (last(completion_tokens=float("nan")), "completion_tokens=nan, which is not a count"),
    "tokens as text": (last(completion_tokens="4"), "completion_tokens='4', which is not a count"),
    "tokens as truth": (last(completion_tokens=True), "completion_tokens=True, which is not a count"),
    "tokens that fall": (last(completion_tokens=1), "fell from 2 to 1"),
    "no tokens": (streamed(event(chunk("", tokens=0, reason="stop"))), "0 completion_tokens"),
    "fewer tokens than chunks": (streamed(event(chunk()) * 3, event(chunk("d", tokens=1, reason="stop"))),
                                 "1 completion_tokens for 4 chunks"),
    "too few prompt tokens": (last(prompt_tokens=2, completion_tokens=4), "changed from 3 to 2"),
    "too many prompt tokens": (streamed(event(chunk(tokens=4, reason="length", prompt=HUGE))),
                               f"{HUGE} prompt_tokens for a prompt of 3 tokens"),
    "a prompt cut short": (streamed(event(chunk(tokens=4, reason="length", prompt=2))),
                           "2 prompt_tokens for a prompt of 3"),
    "a wrong sum": (last(prompt_tokens=3, completion_tokens=4, total_tokens=9), r"9 total_tokens, but 3 \+ 4"),
    "too many cached tokens": (last(completion_tokens=4, prompt_tokens_details={"cached_tokens": 4}),
                               "4 cached_tokens of 3 prompt_tokens"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAILING)
def test_request_fails_with_its_reason(case):
    steps, reason = FAILING[case]
    ends = {} if re.search(r"0\.[36] s", reason) else {"idle": 3.0, "total": 3.0}  # a busy machine needs longer
    (done,), record, seconds = ask(Misbehaviour(steps), **ends)
    assert done.finish_reason == "error"
    assert done.error is not None
    assert "\n" not in done.error
    assert len(done.error) < 250
    assert re.search(reason, done.error), done.error
    assert record.counters["errors"] == {done.error: 1}
    assert record.metrics["requests"] == 0
    assert not record.metrics["output_throughput"]
    assert seconds < 1.5, "the request timeout is 0.6 s"


GOOD_STREAMS = {
    "as one piece": [head() + GOOD],
    "byte by byte": [head(), *dripping(GOOD, 0.0)],
    "chunked": [CHUNKED, b"%x\r\n%s\r\n0\r\n\r\n" % (len(GOOD), GOOD)],
    "CRLF and comments": [head(), b": hello\r\n\r\nevent: x\r\n" + GOOD.replace(b"\n", b"\r\n")],
    "[DONE] twice": [head() + GOOD + event(b"[DONE]")],
    "no [DONE]": [head() + b"".join(good_stream()[:-1])],
    "no empty line at the end": [head() + b"".join(good_stream()[:-1]).rstrip()],
    "open after [DONE]": [head() + GOOD, 1.0],
    "usage at the end": [head(), event(chunk()) * 3, event(chunk(reason="stop")), event(chunk(None, tokens=4))],
    "data on two lines": [head() + GOOD.replace(b'"usage"', b'\ndata: "usage"')],
}


@pytest.mark.parametrize("case", GOOD_STREAMS)
def test_valid_streams_are_read(case):
    (done,), record, seconds = ask(Misbehaviour(GOOD_STREAMS[case]), idle=2, total=2)
    assert (done.error, done.text, done.metrics.output_tokens) == (None, "a a a a ", 4)
    assert record.metrics["requests"] == 1
    assert seconds < 0.9


def test_surrogates_are_joined_or_replaced():
    texts = [b'"\\ud83d"', b'"\\ude00"', b'"\\ud800"', b'"x"']
    stream = [
        b'data: {"choices": [{"text": %s, "finish_reason": %s}], "usage": {"completion_tokens": %d}}\n\n'
        % (text, b'"stop"' if n == 4 else b"null", n)
        for n, text in enumerate(texts, start=1)
    ]
    (done,), _, _ = ask(Misbehaviour(streamed(*stream)))
    assert done.text == "\U0001f600\ufffdx"


def test_other_requests_go_on_when_some_fail():
    script = Misbehaviour()
    script.steps = lambda path: (  # type: ignore[method-assign]
        Misbehaviour.steps(script, path) if path != "/v1/completions" else _alternate(script)
    )
    found, record, _ = ask(script, count=6)
    assert sorted(item.finish_reason for item in found) == ["error"] * 3 + ["length"] * 3
    assert record.metrics["requests"] == 3
    assert record.metrics["output_tokens"] == 12


def _alternate(script: Misbehaviour) -> list:
    script.requests += 1
    return [head() + GOOD] if script.requests % 2 else [head(), event(chunk()), 0.05, reset]


KEPT = CHUNKED.replace(b"Connection: close", b"Keep-Alive: timeout=5")


@pytest.mark.parametrize("wait_s", [0.0, 0.001, 0.003, 0.02])
@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("ends", [reset, half_close])
def test_no_request_is_lost_on_connections_that_close_after_an_answer(wait_s, concurrency, ends):
    """As llama.cpp's server does after each stream, though it offers to keep the connection."""
    script = Misbehaviour([KEPT + b"%x\r\n%s\r\n0\r\n\r\n" % (len(GOOD), GOOD), wait_s, ends])
    found, record, _ = ask(script, count=16, idle=3, total=3, concurrency=concurrency)
    assert [item.error for item in found] == [None] * 16
    assert script.requests == 16, "those on a closed connection were never read"
    assert record.counters["errors"] == {}
    assert 0 <= record.counters["resent_requests"] < 16
    if wait_s == 0.02:  # the next request is under way when the connection ends
        assert record.counters["resent_requests"]


@pytest.mark.parametrize(
    ("steps", "sent"),
    [
        ([], 2),
        ([reset], 2),
        ([b"H", 0.05], 1),
        ([b"HTTP/1.1 200 OK\r\nContent-", 0.05, reset], 1),
        ([head(), 0.05], 1),
        ([head(), 0.05, reset], 1),
        ([head(), event(chunk()), 0.05], 1),
        ([head(), event(chunk()), 0.05, reset], 1),
        ([head("503 Busy")], 1),
    ],
)
def test_a_request_is_sent_again_once_and_only_if_no_byte_came(steps, sent):
    script = Misbehaviour(steps)
    (done,), record, _ = ask(script, idle=3, total=3)
    assert done.finish_reason == "error"
    assert (script.requests, record.counters["resent_requests"]) == (sent, sent - 1)


def test_a_request_that_is_answered_when_it_is_sent_again_counts_once():
    script = Misbehaviour()
    script.steps = lambda path: (  # type: ignore[method-assign]
        Misbehaviour.steps(script, path) if path != "/v1/completions" else _second(script)
    )
    (done,), record, _ = ask(script, idle=3, total=3)
    assert (done.error, record.metrics["requests"], record.metrics["output_tokens"]) == (None, 1, 4)
    assert record.counters["resent_requests"] == 1


def _second(script: Misbehaviour) -> list:
    script.requests += 1
    return [head() + GOOD] if script.requests == 2 else []


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([1.0], "no answer from /v1/models"),
        ([reset], "no answer from /v1/models"),
        ([head("200 OK", "application/json"), DEEP], "did not answer with OpenAI's list"),
        ([head("200 OK", "application/json"), b'{"data": 5}'], "did not answer with OpenAI's list"),
        ([head("200 OK", "application/json"), b'{"data": [5]}'], "did not answer with OpenAI's list"),
        ([head("200 OK", "application/json; charset=nonsense"), b"\xff"], "did not answer with OpenAI's list"),
        ([head("200 OK", "application/json"), endless(b"[" * 2**16)], "has more than 16777216 bytes"),
        ([head("301 Moved", "text/html", "Location: /")], "redirects are not followed"),
        ([head("200 OK", "application/json"), b'{"data": [{"id": "a\\nb"}]}'], "has none"),
        ([head("200 OK", "application/json"), json.dumps({"data": [{"id": "x" * 999}]}).encode()], "has none"),
    ],
)
def test_list_of_models_that_cannot_be_used_is_refused(monkeypatch, steps, reason):
    monkeypatch.setattr(http_client, "CONNECT_S", 0.5)
    with misbehaving(Misbehaviour(models=steps)) as url, pytest.raises(SpecbatchError, match=reason) as caught:
        HttpEngine(Server(url))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "metrics",
    [
        [reset],
        [head("200 OK", "text/plain"), b"vllm:spec_decode_num_drafts_total nonsense\n"],
        [head("200 OK", "text/plain"), b'vllm:spec_decode_num_drafts_total{a="\n'],
        [head("200 OK", "text/plain"), b"vllm:spec_decode_num_drafts_total NaN\n"],
        [head("200 OK", "text/plain"), b"vllm:spec_decode_num_drafts_total{} 1e999\n\xff\x00"],
        [head("200 OK", "text/plain"), endless(b"x" * 2**16)],
    ],
)
def test_invalid_counters_give_no_accept_length(metrics):
    (done,), record, _ = ask(Misbehaviour([head() + GOOD], metrics=metrics))
    assert done.error is None
    assert record.metrics["accept_length"] is None
    assert record.counters["no_accept_length"]


@pytest.mark.parametrize("name", ["idle_timeout", "request_timeout"])
@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_timeouts_must_be_positive(name, seconds):
    with pytest.raises(SpecbatchError, match=f"{name}=.*: use a positive number of seconds"):
        Server("http://h:1", **{name: seconds})
