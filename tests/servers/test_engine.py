"""Client of an OpenAI-compatible server: times, counts, arrivals and failures, with a server on loopback."""

from __future__ import annotations

import os
import signal
import socket
import time
import types
from contextlib import ExitStack
from pathlib import Path

import pytest
from checkpoints import gguf_bytes
from openai_server import Script, serving

from specbatch.core.sampling_params import SamplingParams
from specbatch.errors import SpecbatchError
from specbatch.servers.answer import Answer
from specbatch.servers.engine import HttpEngine
from specbatch.servers.server import Server
from specbatch.servers.server_counters import accepted, counters_of
from specbatch.weights import open_tokenizer

BYTES = types.SimpleNamespace(
    name="bytes", vocab_size=256, eos_ids=frozenset(), bos_id=1,
    decode=lambda ids, skip_special_tokens=True: bytes(ids).decode(),
    encode=lambda text, add_special_tokens=True: [*([1] if add_special_tokens else []), *text.encode()],
)  # fmt: skip
LATE = 1.0  # seconds that a busy machine may add


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch):
    def opened(name, log=None):
        if Path(name).exists():
            return open_tokenizer(name)
        if name != "org/toy":
            raise SpecbatchError(f"no {name}")
        return BYTES

    monkeypatch.setattr("specbatch.weights.open_tokenizer", opened)


@pytest.fixture
def serve():
    """`serve(Script(...))` starts a server and gives an engine of it."""
    with ExitStack() as stack:

        def start(script: Script, **settings: object) -> HttpEngine:
            return HttpEngine(Server(stack.enter_context(serving(script)), **settings))

        yield start


def run(engine, prompts=((5, 6, 7),), tokens=4, concurrency=1, arrivals=None, **params):
    """The completions and the record of a window."""
    each = tokens if isinstance(tokens, list) else [tokens] * len(prompts)
    wanted = [SamplingParams(max_new_tokens=count, **params) for count in each]
    engine.reset_record()
    found = engine.generate([list(p) for p in prompts], wanted, concurrency=concurrency, arrivals=arrivals)
    return found, engine.record(concurrency=concurrency)


@pytest.mark.parametrize("usage", ["every", "last"])
def test_times_of_one_request(serve, usage):
    engine = serve(Script(first_s=0.1, gap_s=0.03, usage=usage))
    start = time.perf_counter()
    (done,), record = run(engine, tokens=5)
    wall, metrics = time.perf_counter() - start, done.metrics
    assert metrics.ttft_s >= 0.1, "the first chunk is empty"
    assert metrics.tpot_s >= 0.03 * 0.7, "the first chunk may be read late"
    assert 0.22 <= metrics.e2e_s <= wall
    assert metrics.e2e_s == pytest.approx(metrics.ttft_s + 4 * metrics.tpot_s)
    assert (metrics.prompt_tokens, metrics.output_tokens, done.text, done.finish_reason) == (3, 5, "abc a", "length")
    assert record.metrics["output_throughput"] == pytest.approx(5 / record.metrics["duration_s"])
    assert 0.22 <= record.metrics["duration_s"] <= wall
    assert (record.metrics["requests"], record.metrics["input_tokens"]) == (1, 3)
    if usage == "every":
        assert len(metrics.itl_s) == 4
        assert sum(metrics.itl_s) == pytest.approx(metrics.e2e_s - metrics.ttft_s)
    else:  # how many tokens each chunk holds is unknown
        assert metrics.itl_s == []
        assert record.metrics["mean_itl_s"] is None
    assert record.metrics["peak_output_throughput"] is None, "shorter than 2 s"
    assert record.metrics["peak_concurrency"] == 1


def test_chunks_of_several_tokens_share_their_gap(serve):
    (done,), _ = run(serve(Script(gap_s=0.06, piece=3)), tokens=7)
    gaps = done.metrics.itl_s
    assert len(gaps) == 4  # the first chunk has none
    assert gaps[0] == gaps[1] == gaps[2] >= 0.02 * 0.5
    assert gaps[3] == pytest.approx(6 * done.metrics.tpot_s - 3 * gaps[0])


@pytest.mark.parametrize("usage", ["every", "last"])
def test_end_token_without_text_counts_when_it_arrives(serve, usage):
    (done,), _ = run(serve(Script(first_s=0.01, gap_s=0.1, tokens=3, end=True, usage=usage)), tokens=9)
    assert (done.metrics.output_tokens, done.finish_reason, done.text) == (3, "stop", "ab")
    assert done.metrics.tpot_s >= 0.1 * 0.7, "the last token arrives 0.2 s after the first of three"
    assert len(done.metrics.itl_s) == (2 if usage == "every" else 0)


def test_gaps_are_unknown_if_some_chunks_are_uncounted():
    answer = Answer(0, [5], 1.0, max_tokens=4)
    for now, text, counted in ((2.0, "a", 1), (3.0, "b", None), (4.0, "c", 3), (5.0, "", None)):
        usage = {"usage": {"completion_tokens": counted}} if counted else {}
        answer.take({"choices": [{"text": text, "finish_reason": None if text else "stop"}], **usage}, now)
    answer.take({"choices": [], "usage": {"completion_tokens": 4}}, 6.0)
    answer.check()
    metrics = answer.completion().metrics
    assert (metrics.ttft_s, metrics.tpot_s, metrics.itl_s) == (1.0, pytest.approx(2 / 3), [])


def test_request_bodies(serve):
    script = Script()
    run(serve(script), [[1, 72, 105]], temperature=0.0, ignore_eos=True, stop=("x", "y"), skip_special_tokens=False)
    run(serve(script, send="text"), [[1, 72, 105]])
    for changes in ({"top_p": 0.9, "top_k": 20, "min_p": 0.1}, {}):
        run(serve(script), [[5]], temperature=0.6, seed=7, **changes)
    ids, text, *sampled = script.bodies
    sent = [tuple(body[name] for name in ("temperature", "top_p", "top_k", "min_p", "seed")) for body in sampled]
    assert sent == [(0.6, 0.9, 20, 0.1, 7), (0.6, 1.0, -1, 0.0, 7)]
    assert ids["prompt"] == [1, 72, 105]
    assert text["prompt"] == "Hi"  # the server adds its own first token
    assert (ids["model"], ids["max_tokens"], ids["temperature"], ids["ignore_eos"]) == ("org/toy", 4, 0.0, True)
    assert not {"top_p", "top_k", "min_p", "seed"} & set(ids)
    assert (ids["stop"], ids["skip_special_tokens"], ids["stream"]) == (["x", "y"], False, True)
    assert "stop" not in text
    assert "Authorization" not in script.headers[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [("reasoning", ("<think>",)), ("logit_bias", {5: 1.0}), ("n", 2), ("logprobs", True), ("regex", "a")],
)
def test_parameters_that_are_not_sent_are_refused(serve, name, value):
    script = Script()
    with pytest.raises(SpecbatchError, match=f"^{name}=.*: is not sent to a server; leave it out"):
        run(serve(script), [[5]], **{name: value})
    assert not script.bodies


def test_text_keeps_a_bos_token_that_the_server_does_not_add(serve):
    """As prompts of a chat template that writes it; the count of the first answer shows what the server adds."""
    plain = types.SimpleNamespace(**{**vars(BYTES), "encode": lambda text, add_special_tokens=True: [*text.encode()]})
    script = Script()
    engine = serve(script, send="text")
    engine.tokenizer = plain
    run(engine, [[1, 72, 105]] * 2)
    assert [body["prompt"] for body in script.bodies] == ["\x01Hi"] * 2
    script = Script(extra_prompt_tokens=1)  # the server adds one, though the tokenizer does not
    engine = serve(script, send="text")
    engine.tokenizer = plain
    run(engine, [[1, 72, 105]] * 2)
    assert [body["prompt"] for body in script.bodies] == ["\x01Hi", "Hi"]


def test_closed_loop_keeps_its_concurrency(serve):
    script = Script(first_s=0.1)
    found, record = run(serve(script), [[n + 5] for n in range(9)], [1 + n for n in range(9)], concurrency=3)
    assert script.most_running == 3
    assert [item.index for item in found] == list(range(9))
    assert [item.metrics.output_tokens for item in found] == [1 + n for n in range(9)]
    assert sorted(body["prompt"] for body in script.bodies) == [[n + 5] for n in range(9)]
    assert all(item.metrics.queue_s < 0.1 for item in found), "submitted when another one has finished"
    assert record.metrics["per_user_throughput"] == pytest.approx(record.metrics["output_throughput"] / 3)


def test_prompts_arrive_on_time_and_queue_for_a_slot(serve):
    script = Script(first_s=0.3)
    arrivals = [0.0, 0.0, 0.1, 0.9]
    found, record = run(serve(script), [[n] for n in range(5, 9)], 1, concurrency=2, arrivals=arrivals)
    start = script.came[0]
    came = [when - start for when in sorted(script.came)]
    assert came[1] < 0.3
    assert 0.3 - 0.1 <= came[2] < 0.3 + LATE, "when a slot was free"
    assert 0.9 - 0.1 <= came[3] < 0.9 + LATE, "when it arrived"
    late = found[2].metrics
    assert 0.2 - 0.1 <= late.queue_s < 0.2 + LATE
    assert late.ttft_s >= late.queue_s + 0.3
    assert found[3].metrics.queue_s < 0.5
    assert record.metrics["duration_s"] >= 1.2


def test_errors_are_counted_by_message(serve):
    overloaded = {"status": 503, "message": "overloaded,\n try later"}
    failures = {
        1: overloaded,
        3: overloaded,
        4: {"after": 3},
        5: {"after": 2, "body": 'data: {"error": {"message": "out of pages"}}\n\n'},
        6: {"after": 1, "body": "data: {nonsense\n\n"},
        7: {"after": 1, "body": 'data: {"choices": ["?"]}\n\n'},
        8: {"after": 1, "body": 'data: {"choices": [{"text": "a", "finish_reason": "abort"}]}\n\n'},
    }
    seen = []
    engine = serve(Script(fails=failures.get))
    engine.reset_record()
    found = engine.generate(
        [[n + 5] for n in range(10)], [SamplingParams(max_new_tokens=4)] * 10, concurrency=1, on_completion=seen.append
    )
    record = engine.record(concurrency=1)
    assert [item.finish_reason == "error" for item in found] == [n in failures for n in range(10)]
    assert record.counters["errors"] == {
        "HTTP 503: overloaded, try later": 2,
        "the stream ended before its answer did": 1,
        "the stream ended with an error: out of pages": 1,
        "the stream has a line that is not JSON": 1,
        "the stream has a chunk that is not of a completion": 1,
        "the server ended the answer: abort": 1,
    }
    assert (record.metrics["requests"], record.metrics["output_tokens"]) == (3, 12)
    assert len(record.requests) == len(seen) == 10
    engine.reset_record()
    assert engine.record().counters["errors"] == {}


def test_timeouts_and_missing_token_counts_are_errors(serve):
    _, record = run(serve(Script(first_s=0.5), idle_timeout=0.1))
    assert record.counters["errors"] == {"no data for 0.1 s, the idle timeout": 1}
    _, record = run(serve(Script(gap_s=0.1), request_timeout=0.25))
    assert record.counters["errors"] == {"not finished after 0.25 s, the timeout of a request": 1}
    _, record = run(serve(Script(gap_s=0.1), idle_timeout=0.3))
    assert record.counters["errors"] == {}
    (done,), record = run(serve(Script(usage="never")))
    assert (done.finish_reason, done.text, record.metrics["requests"]) == ("error", "abc ", 0)
    assert list(record.counters["errors"]) == [
        "the stream has no usage (stream_options.include_usage), so tokens cannot be counted"
    ]


def test_connection_errors_are_counted(serve):
    script = Script()
    with serving(script) as url:
        engine = HttpEngine(Server(url))
    found, record = run(engine, [[5], [6]])
    assert [item.finish_reason for item in found] == ["error", "error"]
    ((error, count),) = record.counters["errors"].items()
    assert error.startswith("ClientConnectorError: Cannot connect")
    assert count == 2
    assert record.metrics["requests"] == 0


def test_counters_cover_only_the_window(serve):
    def metrics(script: Script) -> str:
        runs = 100 + len(script.bodies)
        rows = {"drafts_total": 10 * runs, "draft_tokens_total": 30 * runs, "accepted_tokens_total": 12 * runs}
        head = "# HELP vllm:spec_decode_num_drafts_total Number of drafts.\n"
        shown = [f'vllm:spec_decode_num_{name}{{engine="{n}",x="a b}}"}} {v}' for name, v in rows.items() for n in "01"]
        return head + "\n".join([*shown, 'vllm:spec_decode_num_drafts_created{engine="0"} 1.7e9', ""])

    _, record = run(serve(Script(metrics=metrics)), [[5], [6]])
    assert record.metrics["untrimmed_accept_length"] == pytest.approx(2.2)
    assert record.metrics["untrimmed_accept_rate"] == pytest.approx(0.4)


def test_without_counters_the_reason_is_kept(serve):
    _, record = run(serve(Script()))
    assert record.metrics["accept_length"] is None
    assert "the server has no /metrics" in record.counters["no_accept_length"]
    assert "--metrics (llama.cpp)" in record.counters["no_accept_length"]
    assert record.counters["no_accept_length"].endswith("--per-request-spec-decode-metrics detailed")
    _, record = run(serve(Script(metrics=lambda script: "process_cpu_seconds_total 7\n")))
    assert record.counters["no_accept_length"] == "/metrics has no counter of drafts: no speculation"
    _, record = run(serve(Script(metrics=lambda script: "vllm:spec_decode_num_drafts_total 7\n")))
    assert record.metrics["accept_length"] is None
    assert "show no drafts" in record.counters["no_accept_length"]
    counters = counters_of("vllm:spec_decode_num_drafts 0\n")
    assert accepted({}, counters, []).metrics == {}
    assert accepted(counters, {}, []).source == "/metrics no longer answered at the end: the server has stopped"


def test_impossible_counts_of_requests_give_no_accept_length():
    """More accepted than drafted tokens, as a broken kernel counts them."""
    details = {"spec_verify_ct": 2, "spec_num_correct_drafts": 7, "spec_num_proposed_drafts": 6}
    answer = Answer(0, [5], 1.0, max_tokens=4)
    answer.take({"choices": [], "sglext": {"spec_tokens_details": details}}, 2.0)
    answer.take({"choices": [{"text": "abcd", "finish_reason": "length"}], "usage": {"completion_tokens": 4}}, 3.0)
    found = accepted({}, {}, [answer.completion()], [answer.drafting])
    assert found.counters == {"no_accept_length": "SGLang reports 6 drafted tokens, but 7 accepted ones"}
    assert found.metrics["accept_length"] is found.metrics["verify_steps"] is None


def test_prefix_cache_is_flushed_if_there_is_an_endpoint(serve):
    for path in ("/flush_cache", "/reset_prefix_cache", None):
        script = Script(empties=path)
        engine = serve(script)
        assert engine.config.prefix_cache
        engine.forget_prefixes()
        _, record = run(engine)
        assert (f"emptied by {path}" if path else "NOT EMPTIED") in record.config["prefix_cache"]
        assert script.emptied == ([0] if path else [])
    assert engine.model == record.config["model"] == "org/toy"
    assert record.config["server"].startswith("server at http://127.0.0.1:")
    assert record.caps["max_model_len"] == 512
    assert (record.config["tokenizer"], record.config["speculation"]["algorithm"]) == ("bytes", "none")


@pytest.mark.parametrize(
    ("owner", "about", "shown"),
    [
        ("vllm", {"/version": '{"version": "0.33.0"}'}, " (vllm 0.33.0)"),
        ("sglang", {"/server_info": '{"tp_size": 1, "version": "0.5.23"}'}, " (sglang 0.5.23)"),
        ("vllm", {"/version": "0.33.0"}, " (vllm)"),
        ("vllm", {"/version": '{"version": 33}'}, " (vllm)"),
        (None, {"/version": '{"version": "2"}'}, " (2)"),
        ("llamacpp", {"/props": '{"build_info": "b6730-ab"}'}, " (llamacpp b6730-ab)"),
        (None, {}, ""),
    ],
)
def test_version_of_the_server_is_recorded(serve, owner, about, shown):
    _, record = run(serve(Script(models=[{"id": "org/toy"} | ({"owned_by": owner} if owner else {})], about=about)))
    assert record.config["server"].startswith(f"server{shown} at http://")
    version = shown.strip(" ()").split(" ")[-1]
    assert record.caps.get("server_version") == (version if any(map(str.isdigit, version)) else None)


def test_model_must_be_named_if_there_are_several(serve):
    models = [{"id": "a"}, {"id": "b", "root": "org/toy"}]
    with pytest.raises(SpecbatchError, match=r"model=None: the server at .* has a, b; name one"):
        serve(Script(models=models))
    with pytest.raises(SpecbatchError, match=r"model='c': .* has a, b"):
        serve(Script(models=models), model="c")
    engine = serve(Script(models=models), model="b")
    assert (engine.model, engine.tokenizer) == ("b", BYTES)
    with pytest.raises(SpecbatchError, match=r"tokenizer=None: that of the server's model a is not available .*no a"):
        serve(Script(models=models), model="a")


def test_the_model_of_a_server_may_be_the_path_of_its_gguf_file(serve, tmp_path):
    """As llama.cpp's server names it by default."""
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf_bytes())
    found = serve(Script(models=[{"id": str(path), "owned_by": "llamacpp"}])).tokenizer
    assert (found.name, found.eos_ids) == (str(path), {257})
    assert serve(Script(), tokenizer=str(path)).tokenizer.encode("abc") == found.encode("abc")
    with pytest.raises(SpecbatchError, match=r"tokenizer=None: .*give its folder or \.gguf file"):
        serve(Script(models=[{"id": f"{path}x"}]))


def test_invalid_addresses_and_servers_are_refused():
    for url in ("", "localhost:8000", "ftp://x", "http://", "http://h:x"):
        with pytest.raises(SpecbatchError, match=r"base_url='.*': give the server's address"):
            Server(url)
    assert Server("http://h:1/v1/").base_url == Server("http://h:1").base_url == "http://h:1"
    with pytest.raises(SpecbatchError, match="send='words': use one of ids, text, chat"):
        Server("http://h:1", send="words")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(SpecbatchError, match=r"no answer from /v1/models \(ClientConnectorError.*is the server up"):
        HttpEngine(Server(f"http://127.0.0.1:{port}"))
    with serving(Script(models=["?"])) as url, pytest.raises(SpecbatchError, match="with OpenAI's list"):
        HttpEngine(Server(url))


def test_api_key_is_sent_and_never_stored(serve, monkeypatch):
    with pytest.raises(SpecbatchError, match="api_key_env='SECRET': no such environment variable"):
        Server("http://h:1", api_key_env="SECRET")
    monkeypatch.setenv("SECRET", "hush-hush")
    script = Script(key="hush-hush")
    with pytest.raises(
        SpecbatchError, match=r"api_key_env=None: the server at .* refuses it \(HTTP 401: Unauthorized\)"
    ):
        serve(script)
    _, record = run(serve(script, api_key_env="SECRET"))
    assert script.headers[0]["Authorization"] == "Bearer hush-hush"
    assert "hush" not in record.summary()


def test_interruption_ends_at_once(serve):
    engine = serve(Script(first_s=0.05, gap_s=0.05))
    seen = []

    def stop(completion):
        seen.append(completion)
        os.kill(os.getpid(), signal.SIGINT)

    engine.reset_record()
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        engine.generate(
            [[5]] * 4, [SamplingParams(max_new_tokens=n) for n in (1, 99, 99, 99)], concurrency=4, on_completion=stop
        )
    assert len(seen) == 1
    assert time.perf_counter() - start < 2
