"""Client of vLLM and SGLang: their streams, errors, counts of verifies and resets, from stubs of their formats."""

from __future__ import annotations

import types

import pytest
from crossed import first_quick
from rival_servers import Rival, rival

from specbatch.core.sampling_params import SamplingParams
from specbatch.errors import SpecbatchError
from specbatch.records.schema import Record
from specbatch.records.validation import checked
from specbatch.servers import server_cache
from specbatch.servers.engine import HttpEngine
from specbatch.servers.server import Server
from specbatch.sweeps.report.acceptance import server_acceptance

KINDS = ("vllm", "sglang")
LLAMACPP = "llamacpp"
DRAFTED = ((3, 2), (3, 0), (3, 3))
SOMETIMES = ((3, 2), (0, 0), (3, 3))  # as n-gram lookup drafts


@pytest.fixture(autouse=True)
def tokenizer(use_tokenizer):
    opened = types.SimpleNamespace(name="org/toy", vocab_size=256, eos_ids=frozenset(), bos_id=1)
    use_tokenizer(opened)


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


@pytest.mark.parametrize("send", ["ids", "chat"])
@pytest.mark.parametrize("details", [True, False])
def test_accept_length_of_llamacpp(send, details):
    """10 tokens in verifies of 3, 1 (no draft), 4 and 1 token, whose draft is cut to nothing. details: --metrics."""
    server = Rival(LLAMACPP, SOMETIMES, template_tokens=9, details=details)
    found, record = measured(server, send=send)
    assert [item.text for item in found] == ["abc abc ab"] * 4
    metrics = record.metrics
    assert metrics["accept_length"] == server.kept / server.steps == 9 / 4
    assert (metrics["verify_steps"], metrics["drafted_tokens"], metrics["accepted_tokens"]) == (16, 4 * 6, 4 * 5)
    assert metrics["accept_rate"] == metrics["untrimmed_accept_rate"] == 5 / 6
    assert metrics.get("untrimmed_accept_length") == (1 + 5 / 2 if details else None)
    assert record.counters["accept_length_source"] == "llama.cpp's timings of each request"
    assert record.counters.get("server_acceptance") == ({"verifies": 8, "accepted": [8, 8, 4]} if details else None)
    assert [(row["emitted"], row["verify_steps"], row["accept_length"]) for row in record.requests] == [
        (9, 4, 2.25)
    ] * 4


def test_answers_of_llamacpp_that_end_early_have_no_accept_length_if_chunks_do_not_show_it():
    """The drafts that it accepted after the end count in its timings."""
    _, record = measured(Rival(LLAMACPP, ((3, 3),), ends=7, several=2), tokens=20)
    assert record.metrics["accept_length"] is record.metrics["accept_rate"] is record.metrics["verify_steps"] is None
    assert record.metrics["untrimmed_accept_length"] == 4.0
    assert (
        "4 of 4 answers ended before their limit with chunks of several tokens" in record.counters["no_accept_length"]
    )
    _, record = measured(Rival(LLAMACPP, ((3, 0),), ends=7, several=2), tokens=20)
    assert record.metrics["accept_length"] == 1.0, "nothing was accepted, so nothing was trimmed"


@pytest.mark.parametrize("send", ["ids", "chat"])
@pytest.mark.parametrize("kind", ["vllm", LLAMACPP])
def test_each_verify_is_known(kind, send):
    """Tokens of 1, 4 and 2 of 4, as this engine counts them: two of the last verify came after the end."""
    server = Rival(kind, ((3, 3),), ends=7, template_tokens=9, of_requests="detailed", others=11)
    _, record = measured(server, tokens=20, send=send)
    metrics, counters = record.metrics, record.counters
    assert (metrics["accept_length"], metrics["verify_steps"]) == (6 / 2, 8)
    assert (metrics["drafted_tokens"], metrics["accept_rate"]) == (4 * 5, 1.0)
    assert counters["emitted_histogram"] == [0, 0, 4, 0, 4]
    context = 9 if send == "chat" else 3
    assert counters["acceptance"] == {
        "drafted": [8, 8, 4],
        "tried": [8, 8, 4],
        "accepted": [8, 8, 4],
        "context": [[1 << (context + 1).bit_length() - 1, 4, 16], [8, 4, 8]] if context == 3 else [[8, 8, 24]],
    }
    assert counters["accept_length_source"].endswith("of each request")
    assert [row["accept_length"] for row in record.requests] == [3.0] * 4


def test_summaries_of_vllm_have_the_accept_length_and_no_counts_of_each_verify():
    _, record = measured(Rival("vllm", ((3, 3),), ends=7, of_requests="summary"), tokens=20)
    assert (record.metrics["accept_length"], record.metrics["accept_rate"]) == (6 / 2, None)
    assert "acceptance" not in record.counters
    assert record.counters["server_acceptance"] == {"verifies": 8, "accepted": [8, 8, 8]}


@pytest.mark.parametrize("counters", [True, False])
def test_summaries_of_a_vllm_that_leaves_drafts_out_need_its_counters(counters):
    """Tokens of 1, 2, 1, 1 (no drafts), 2, 1, 1 and 1 of 2."""
    server = Rival("vllm", ((3, 1), (0, 0), (0, 0)), ends=10, of_requests="summary", details=counters)
    _, record = measured(server, tokens=20)
    assert record.metrics["accept_length"] == (9 / 7 if counters else None)
    reason = record.counters.get("no_accept_length", "--per-request-spec-decode-metrics detailed reports the drafts")
    assert "--per-request-spec-decode-metrics detailed reports the drafts" in reason


def test_counters_of_vllm_show_verifies_without_drafts_that_trimmed_tokens_hide():
    """Tokens of 1, 4, 1 (no draft) and 1 of 4."""
    server = Rival("vllm", ((3, 3), (0, 0)), ends=7, of_requests="detailed")
    _, record = measured(server, tokens=20)
    assert record.metrics["accept_length"] == server.kept / server.steps == 6 / 3
    assert record.counters["accept_length_source"] == "vLLM's counters of tokens and steps"


@pytest.mark.parametrize("kind", KINDS)
def test_accept_length_is_of_the_window(kind):
    """Work before it, which accepted less, is in the server's own figure since its start."""
    server = Rival(kind, ((3, 0),))
    with rival(server) as url:
        engine = HttpEngine(Server(url))
        engine.generate([[5]] * 9, [SamplingParams(max_new_tokens=30)] * 9, concurrency=1)
        server.verifies = ((3, 3),)
        engine.reset_record()
        engine.generate([[5]], [SamplingParams(max_new_tokens=9)], concurrency=1)
        assert engine.record(concurrency=1).metrics["accept_length"] == 4.0


@pytest.mark.parametrize("send", ["ids", "chat"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_after_the_end_do_not_count_in_the_accept_length(kind, send):
    """Tokens of 1, 4 and 2 of 4: both servers count 3 accepted drafts of the last verify."""
    found, record = measured(Rival(kind, ((3, 3),), ends=7, template_tokens=9), tokens=20, send=send)
    assert [(item.finish_reason, item.metrics.output_tokens) for item in found] == [("stop", 7)] * 4
    assert record.metrics["accept_length"] == 6 / 2
    assert record.metrics["untrimmed_accept_length"] == 4.0


def test_llamacpp_without_speculation():
    _, record = measured(Rival(LLAMACPP))
    assert record.metrics["accept_length"] is None
    assert record.counters["no_accept_length"] == "the server's answers show no drafts"


def test_counters_of_other_clients_do_not_count():
    server = Rival(LLAMACPP, DRAFTED)
    server.others = 7
    _, record = measured(server)
    assert record.metrics["accept_length"] == 9 / 4
    assert record.metrics.get("untrimmed_accept_length") is None
    assert record.metrics["untrimmed_accept_rate"] == 5 / 9


def test_llamacpp_is_asked_not_to_use_its_prompt_cache():
    server = Rival(LLAMACPP)
    _, record = measured(server)
    assert [body["cache_prompt"] for _, body in server.bodies] == [False] * 4
    assert (record.config["prefix_cache"], server.resets) == ("the server's own, not used (cache_prompt=false)", 0)
    for kind in KINDS:
        server = Rival(kind)
        measured(server)
        assert not {"cache_prompt", "cache_salt"} & set(server.bodies[0][1])


@pytest.mark.parametrize("kind", [*KINDS, LLAMACPP])
def test_tokens_of_an_arrival_are_known_if_chunks_are_counted(kind):
    """vLLM and SGLang count in each chunk; llama.cpp sends a chunk per token, and counts at the end."""
    step_s = 0.03
    found, record = measured(Rival(kind, DRAFTED, step_s=step_s), count=1)
    (done,) = found
    if kind == LLAMACPP:
        assert done.metrics.itl_s == []
        assert record.metrics["peak_output_throughput"] is record.metrics["mean_itl_s"] is None
    else:
        assert record.metrics["peak_output_throughput"] is None, "in less than two seconds"
        gaps = done.metrics.itl_s
        assert gaps[0] == gaps[1] == gaps[2] == pytest.approx(step_s / 3, rel=0.5), "a third of a step of 3 tokens"
        assert sum(gaps) == pytest.approx(9 * done.metrics.tpot_s)
    assert done.metrics.tpot_s == pytest.approx(4 * step_s / 9, rel=0.5)


@pytest.mark.parametrize("kind", [*KINDS, LLAMACPP])
@pytest.mark.parametrize("send", ["ids", "chat"])
def test_an_answer_of_one_token_has_no_tpot(kind, send):
    """It is left out of the mean, as in `vllm bench serve`; guidellm's has the TTFT in it."""
    found, record = measured(Rival(kind, DRAFTED, template_tokens=9), tokens=1, send=send)
    assert all(item.metrics.tpot_s is None and item.metrics.ttft_s for item in found)
    assert record.metrics["mean_tpot_s"] is record.metrics["accept_length"] is None
    assert record.metrics["requests"] == 4


@pytest.mark.parametrize("kind", first_quick(1, [*KINDS, LLAMACPP]))
def test_first_token_comes_with_text_and_not_with_the_role(kind):
    found, _ = measured(Rival(kind, step_s=0.05, template_tokens=9), send="chat", count=1)
    assert found[0].metrics.ttft_s >= 0.05


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
    path = "/flush_cache" if kind == "sglang" else "/reset_prefix_cache"
    server = Rival(kind, busy=2)
    _, record = measured(server, count=1)
    assert server.resets == 3
    assert record.config["prefix_cache"] == f"the server's own, emptied by {path}"
    monkeypatch.setattr(server_cache, "EMPTYING_S", 0.02)
    _, record = measured(Rival(kind, busy=10**6), count=1)
    answer = "HTTP 400: Flush cache failed." if kind == "sglang" else "success=false"
    assert record.config["prefix_cache"] == f"the server's own, NOT EMPTIED: {path} answered {answer}"


def test_vllm_without_its_development_mode_gets_a_salt_for_each_point():
    server = Rival("vllm", is_dev=False)
    salts: list[set[str]] = []
    for _ in range(2):
        _, record = measured(server, count=3)
        assert record.config["prefix_cache"] == "the server's own, with a cache_salt of its own for each point"
        salts.append({body["cache_salt"] for _, body in server.bodies})
    assert [len(found) for found in (*salts, salts[0] | salts[1])] == [1, 1, 2]


def test_chat_needs_messages():
    with rival(Rival("vllm")) as url:
        engine = HttpEngine(Server(url, send="chat"))
        with pytest.raises(SpecbatchError, match="send='chat': needs prompts that are messages"):
            engine.know_messages([[5], [6]], [[{"role": "user", "content": "hi"}], None])


def test_table_of_the_servers_own_counts():
    records = [measured(Rival(kind, DRAFTED))[1] for kind in KINDS]
    table = server_acceptance({(1, kind): [record] * 2 for kind, record in zip(KINDS, records, strict=True)})
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    assert [[cell.strip() for cell in row.split("|")[2:-1]] for row in rows] == [
        [kind, "32", "75 75 25"] for kind in KINDS
    ]
    assert server_acceptance({(1, "none"): [measured(Rival("vllm"))[1]]}) == ""
