"""Client of vLLM and SGLang: their streams, errors, counts of verifies and resets, from stubs of their formats."""

from __future__ import annotations

import types

import pytest
from rival_servers import Rival, rival

from specbatch.core.request import SamplingParams
from specbatch.errors import SpecbatchError
from specbatch.records.schema import Record, checked
from specbatch.sweeps.report.server_acceptance import server_acceptance
from specbatch.sweeps.run import http_engine
from specbatch.sweeps.run.http_engine import HttpEngine, Server

KINDS = ("vllm", "sglang")
DRAFTED = ((3, 2), (3, 0), (3, 3))
SOMETIMES = ((3, 2), (0, 0), (3, 3))  # as n-gram lookup drafts


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch):
    opened = types.SimpleNamespace(name="org/toy", vocab_size=256, eos_ids=frozenset(), bos_id=1)
    monkeypatch.setattr("specbatch.weights.open_tokenizer", lambda name, log=None: opened)


def measured(server: Rival, tokens: int = 10, count: int = 4, **settings):
    """Completions and record of a window, after another one."""
    prompts = [[5 + place] * 3 for place in range(count)]
    with rival(server) as url:
        engine = HttpEngine(Server(url, **settings))
        engine.know_messages(prompts, [[{"role": "user", "content": str(ids)}] for ids in prompts])
        engine.generate(prompts[:1], [SamplingParams(max_new_tokens=7)], concurrency=1)
        server.kept = server.steps = 0
        server.bodies.clear()
        engine.forget_prefixes()
        engine.reset_record()
        found = engine.generate(prompts, [SamplingParams(max_new_tokens=tokens)] * count, concurrency=2)
        record = engine.record(concurrency=2)
    checked("folder", "record.json", Record, {k: v for k, v in record.as_dict().items() if k != "requests"}, "")
    return found, record


@pytest.mark.parametrize("send", ["ids", "chat"])
@pytest.mark.parametrize("kind", KINDS)
def test_accept_length_has_one_definition(kind, send):
    """10 tokens in verifies of 3, 1, 4 and 1 of 3: the last one is trimmed, the first token is of prefill."""
    server = Rival(kind, DRAFTED, template_tokens=9)
    found, record = measured(server, send=send)
    assert [item.text for item in found] == ["abc abc ab"] * 4
    assert all(item.metrics.output_tokens == 10 and len(item.metrics.itl_s) == 9 for item in found)
    assert (server.kept, server.steps) == (4 * 9, 4 * 4)
    metrics = record.metrics
    assert (metrics["accept_length"], metrics["verify_steps"]) == (9 / 4, 16)
    assert metrics["untrimmed_accept_length"] == 1 + 7 / 4, "2 + 0 + 3 + 2 accepted drafts"
    assert metrics["untrimmed_accept_rate"] == 7 / 12
    assert metrics["accept_rate"] is None, "drafts after the limit are not known"
    assert record.counters["server_acceptance"] == {"verifies": 16, "accepted": [12, 12, 4]}
    path = "/v1/chat/completions" if send == "chat" else "/v1/completions"
    assert {name for name, _ in server.bodies} == {path}
    assert ("messages" in server.bodies[0][1]) == (send == "chat")
    assert ("return_spec_tokens_details" in server.bodies[0][1]) == (kind == "sglang"), "vLLM would warn"
    assert [item.metrics.prompt_tokens for item in found] == [9 if send == "chat" else 3] * 4
    if kind == "sglang":
        assert [(row["emitted"], row["verify_steps"]) for row in record.requests] == [(9, 4)] * 4


def test_verifies_without_drafts_count_in_the_accept_length():
    """Tokens of 3, 1, 4 and 1 of 3, of which vLLM's figure has the three with drafts, untrimmed."""
    server = Rival("vllm", SOMETIMES)
    _, record = measured(server)
    assert record.metrics["accept_length"] == server.kept / server.steps == 9 / 4
    assert record.metrics["untrimmed_accept_length"] == 1 + 7 / 3
    assert record.counters["accept_length_source"] == "vLLM's counters of tokens and steps"


@pytest.mark.parametrize("kind", KINDS)
def test_older_releases(kind):
    _, record = measured(Rival(kind, DRAFTED, details=False))
    if kind == "sglang":  # all that its counter of verifies can say
        assert record.metrics["accept_length"] == 9 / 4
        assert record.counters["accept_length_source"] == "SGLang's counter of verifies"
    else:
        assert record.metrics["accept_length"] is None
        assert record.metrics["untrimmed_accept_length"] == 1 + 7 / 4
        assert "counters of generated tokens and latencies are missing" in record.counters["no_accept_length"]


@pytest.mark.parametrize("kind", KINDS)
def test_errors(kind):
    """Statuses before the stream and errors inside it, in the server's own words."""
    fails = {0: 400, 1: 503 if kind == "sglang" else 500, 2: "stream"}
    found, record = measured(Rival(kind, DRAFTED, fails=fails), count=6)
    queue, broken = "The request queue is full.", "The server had an error while processing your request."
    of_status, in_stream = (f"HTTP 503: {queue}", queue) if kind == "sglang" else (f"HTTP 500: {broken}", broken)
    errors = record.counters["errors"]
    assert sum(errors.values()) == 3
    assert any(text.startswith("HTTP 400: This model's maximum context length is 512 tokens.") for text in errors)
    assert {of_status, f"the stream ended with an error: {in_stream}"} < set(errors)
    assert sum(item.finish_reason == "length" for item in found) == record.metrics["requests"] == 3
    if kind == "vllm":  # its counters have the tokens of the failed stream
        assert record.metrics["accept_length"] is None
        assert "other or failed requests" in record.counters["no_accept_length"]
    else:
        assert record.metrics["accept_length"] == 9 / 4


@pytest.mark.parametrize("kind", KINDS)
def test_prefix_cache_is_emptied_when_the_server_is_idle(kind, monkeypatch):
    monkeypatch.setattr(http_engine, "RETRY_S", 0.0)
    path = "/flush_cache" if kind == "sglang" else "/reset_prefix_cache"
    server = Rival(kind, busy=2)
    _, record = measured(server, count=1)
    assert server.resets == 3
    assert record.config["prefix_cache"] == f"the server's own, emptied by {path}"
    monkeypatch.setattr(http_engine, "EMPTYING_S", 0.02)
    _, record = measured(Rival(kind, busy=10**6), count=1)
    answer = "HTTP 400: Flush cache failed." if kind == "sglang" else "success=false"
    assert record.config["prefix_cache"] == f"the server's own, NOT EMPTIED: {path} answered {answer}"


def test_reset_of_vllm_needs_its_development_mode():
    _, record = measured(Rival("vllm", is_dev=False), count=1)
    assert "NOT EMPTIED" in record.config["prefix_cache"]
    assert "VLLM_SERVER_DEV_MODE=1" in record.config["prefix_cache"]


def test_chat_needs_messages():
    with rival(Rival("vllm")) as url:
        engine = HttpEngine(Server(url, send="chat"))
        with pytest.raises(SpecbatchError, match="send='chat': needs prompts that are messages"):
            engine.know_messages([[5], [6]], [[{"role": "user", "content": "hi"}], None])


def test_table_of_the_servers_own_counts():
    records = [measured(Rival(kind, DRAFTED))[1] for kind in KINDS]
    table = server_acceptance({(1, kind): [record] * 2 for kind, record in zip(KINDS, records, strict=True)}, ["", ""])
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    assert [[cell.strip() for cell in row.split("|")[2:-1]] for row in rows] == [
        [kind, "32", "75 75 25"] for kind in KINDS
    ]
    assert server_acceptance({(1, "none"): [measured(Rival("vllm"))[1]]}, ["", ""]) == ""
