"""Engines with grammars: documents of schemas, more tables than there is room for, other parameters, refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import torch
from crossed import crossed
from on_host import match_on_host
from stand_ins import fake_graphs, late_results
from targets import Targets
from thread_ranks import thread_group

from specbatch import Engine, EngineConfig, SamplingParams, SpecbatchError, Speculation
from specbatch.config.engine_config import Graphs
from specbatch.grammar.host_matcher import HostMatcher
from specbatch.memory.grammar_pool import GrammarPool
from specbatch.weights.known_models import KNOWN_MODELS

NGRAM = Speculation(algorithm="ngram", schedule="v2", draft_tokens=3)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "é", None]}, "maxItems": 3},
    },
    "required": ["name", "tags"],
}


@pytest.mark.parametrize("graphs", [Graphs(), Graphs(decode="whole", prefill="piecewise")])
def test_answers_are_documents_of_the_schema(monkeypatch: pytest.MonkeyPatch, graphs: Graphs) -> None:
    """Of a model with random weights and bytes as tokens."""
    fake_graphs(monkeypatch)
    late_results(monkeypatch)
    config = EngineConfig(
        model="toy", load_format="dummy", device="cpu", max_running=3, max_model_len=256, speculation=NGRAM,
        graphs=graphs,
    )  # fmt: skip
    params = SamplingParams(json_schema=SCHEMA, max_new_tokens=120, temperature=1.0, n=3, seed=1)
    with Engine(config) as engine:
        done = engine.generate(["a", "bc", "d"], [params, SamplingParams(max_new_tokens=4), params])
        constrained = [item for item in done if item.index != 1]
        assert len(constrained) == 6
        for item in constrained:
            assert item.finish_reason == "stop"
            jsonschema.validate(json.loads(item.text), SCHEMA)
        assert len({item.text for item in constrained}) == 6
        assert [item.token_ids for item in engine.generate(["bc"], SamplingParams(max_new_tokens=4))] == [
            item.token_ids for item in done if item.index == 1
        ]


@pytest.mark.parametrize("cells", [200, 60_000])
def test_requests_wait_for_the_places_of_tables(toy: Any, toy_engine: Callable[..., Engine], cells: int) -> None:
    """In 200 cells there is room for one table, and slots are used by requests with and without grammars."""
    engine = toy_engine(max_running=4, kv_pages=18, page_size=2, max_model_len=24, speculation=NGRAM)
    engine.parts.scheduler.grammars = GrammarPool(cells)
    letters = "abcdefg"
    free = SamplingParams(max_new_tokens=16, ignore_eos=True)
    params = [
        SamplingParams(max_new_tokens=18, regex=f"[{letter}-z ]{{9,17}}{letter}?") if place % 3 else free
        for place, letter in enumerate(letters)
    ]
    prompts = [list(prompt)[:6] for prompt in (toy.prompts() * 3)[: len(params)]]
    done = engine.generate(prompts, params)
    assert engine.record().metrics["retractions"] or cells == 200
    for item, own in zip(done, params, strict=True):
        assert own.regex is None or item.finish_reason == "length" or re.fullmatch(own.regex, item.text)
    alone = toy_engine(max_running=1, max_model_len=24)
    assert [item.token_ids for item in done] == [item.token_ids for item in alone.generate(prompts, params)]


NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "v": {"type": "integer", "minimum": 0, "maximum": 99},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["v", "next"],
    "additionalProperties": False,
    "x-vendor": 1,
}


@pytest.mark.parametrize(
    ("schedule", "graphs"), crossed(["v1", "v2"], [Graphs(), Graphs(decode="whole", prefill="piecewise")])
)
def test_schemas_on_the_host(monkeypatch: pytest.MonkeyPatch, schedule: str, graphs: Graphs) -> None:
    """A recursive one, beside requests with an automaton and without a grammar: steps wait, and say so."""
    fake_graphs(monkeypatch)
    late_results(monkeypatch)
    lines: list[str] = []
    nested, flat = (SamplingParams(json_schema=item, max_new_tokens=90) for item in (NESTED, SCHEMA))
    how = [nested, SamplingParams(max_new_tokens=4), flat, nested]

    def answers(speculation: Speculation, params: list[SamplingParams]) -> list[str]:
        config = EngineConfig(
            model="toy", load_format="dummy", device="cpu", dtype="float32", max_running=3, max_model_len=256,
            speculation=speculation, graphs=graphs,
        )  # fmt: skip
        with Engine(config, log=lines.append) as engine:
            done = engine.generate(["a", "bc", "d", "e"], params)
            decode = engine.record().counters["graphs"]["decode"]
            assert set(decode["fallbacks"]) == (set() if graphs.decode == "whole" else {"off"})
            assert (decode["replays"] > 0) == (graphs.decode == "whole")
            return [item.text for item in done]

    found = answers(Speculation(algorithm="ngram", schedule=schedule, draft_tokens=3), how)
    jsonschema.validate(json.loads(found[0]), NESTED)
    assert found == answers(Speculation(schedule=schedule), how)
    assert lines.count("json_schema: #: x-vendor is ignored") == 2
    assert sum("matched on the host by llguidance" in line for line in lines) == 2
    sampled = [replace(params, temperature=1.0, seed=seed) for seed, params in enumerate(how)]
    for text in answers(Speculation(algorithm="ngram", schedule=schedule, draft_tokens=3), sampled)[::3]:
        jsonschema.validate(json.loads(text), NESTED)


def test_a_matcher_that_cannot_go_on_ends_its_request_alone(
    monkeypatch: pytest.MonkeyPatch, toy_engine: Callable[..., Engine]
) -> None:
    follow, stopped = HostMatcher.follow, list[HostMatcher]()

    def stop(matcher: HostMatcher, output: list[int]) -> None:
        follow(matcher, output)
        if len(output) == 3 and not stopped:
            stopped.append(matcher)
            matcher.error = "ParserTooComplex"

    monkeypatch.setattr(HostMatcher, "follow", stop)
    match_on_host(monkeypatch)
    how = [SamplingParams(regex=regex, max_new_tokens=9) for regex in ("[a-z]+", "[a-z]{9}", "[a-z]{1,9}")]
    bad, good, other = toy_engine(speculation=NGRAM).generate([[3, 4]] * 3, how)
    assert (bad.finish_reason, len(bad.token_ids)) == ("error", 3)
    assert bad.error == "llguidance cannot go on with its grammar: ParserTooComplex"
    assert {good.finish_reason, other.finish_reason} <= {"stop", "length"}


@pytest.mark.parametrize("drafter", ["ngram", "eagle-tree"])
def test_drafts_that_nothing_may_follow_end_no_answer(
    targets: Targets, monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    """No token has an e, so T to Z are dead ends: an answer that gets there is an error, as without drafts."""
    match_on_host(monkeypatch)
    params = SamplingParams(max_new_tokens=12, regex="(?:[@-S]|[T-Z]e|ab){3,9}", logit_bias={2: -2.0})
    prompts = targets.prompts("llama")

    def answers(drafter: str) -> list[tuple[Any, ...]]:
        done = targets.engine("llama", drafter, dtype="float32").generate(prompts, params)
        return [(item.token_ids, item.finish_reason, item.error) for item in done]

    found = answers(drafter)
    assert found == answers("none")
    assert {reason for _, reason, _ in found} > {"error"}


@pytest.mark.parametrize(("drafter", "on_host"), crossed(["model", "eagle-tree"], [False, True]))
def test_ranks_carry_grammars(targets: Targets, monkeypatch: pytest.MonkeyPatch, drafter: str, on_host: bool) -> None:
    if on_host:
        match_on_host(monkeypatch)
    params = SamplingParams(max_new_tokens=10, regex="(?:[@-S]{2}[T-d]|[T-d])+", temperature=0.8, seed=2)
    greedy = SamplingParams(max_new_tokens=10, regex="[@-d]{2}(?:[D-GL-Oab]|_)*")
    prompts, how = targets.prompts("llama"), [params, greedy] * 3
    if drafter == "model":  # the random numbers of sampled drafts are their own
        how = [greedy] * 6
    alone = targets.engine("llama", "none", dtype="float32").generate(prompts, how)
    thread_group(monkeypatch)
    engine = targets.engine("llama", drafter, "v2", dtype="float32", tensor_parallel=2)
    assert [item.token_ids for item in engine.generate(prompts, how)] == [item.token_ids for item in alone]


def test_tables_have_their_place_in_the_memory_plan(toy_engine: Callable[..., Engine]) -> None:
    """So that the first grammar of a job allocates nothing."""
    lines: list[str] = []
    engine = toy_engine(log=lines.append)
    before = engine.parts.worker.batch._tables
    size = f"{before.nbytes >> 20}.0 MiB"
    assert f"  grammars   {size} reserved for tables of regular expressions and JSON schemas" in lines
    engine.generate([[3]], SamplingParams(regex="[a-z]{4}", max_new_tokens=2))
    assert engine.parts.worker.batch._tables is before


def test_stop_strings_and_limits_end_an_answer_within_a_match(toy_engine: Callable[..., Engine]) -> None:
    engine = toy_engine(speculation=NGRAM)
    (whole,) = engine.generate([[3, 4]], SamplingParams(regex="[a-z]{6}", max_new_tokens=20))
    assert re.fullmatch("[a-z]{6}", whole.text)
    (stopped,) = engine.generate([[3, 4]], SamplingParams(regex="[a-z]{6}", max_new_tokens=20, stop=whole.text[3]))
    assert stopped.text == whole.text[: whole.text.index(whole.text[3])]
    (cut,) = engine.generate([[3, 4]], SamplingParams(regex="[a-z]{6}", max_new_tokens=2))
    assert cut.finish_reason == "length"
    assert whole.text.startswith(cut.text)


def test_grammar_prevails_over_min_tokens_and_bad_words(toy_engine: Callable[..., Engine]) -> None:
    params = SamplingParams(regex="cat|d{2,9}", min_tokens=8, bad_words=["d"], max_new_tokens=12, logprobs=True)
    (found,) = toy_engine(speculation=NGRAM).generate([[3, 4]], params)
    assert (found.text, found.finish_reason) == ("cat", "stop")
    (found,) = toy_engine().generate([[3, 4]], SamplingParams(regex="d{2,9}", min_tokens=8, max_new_tokens=12))
    assert found.text == "d" * max(len(found.token_ids) - 1, 8)
    assert found.finish_reason == "stop"


def test_logprobs_are_those_of_the_model(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    prompt = list(toy.prompts()[0])
    (found,) = toy_engine(speculation=NGRAM, dtype="float32").generate(
        [prompt], SamplingParams(regex="[x-z]{4}", max_new_tokens=8, logprobs=True)
    )
    (logits,) = toy.logits_of([prompt + found.token_ids])
    wanted = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(found.token_ids)[:, None])[:, 0]
    assert found.logprobs == pytest.approx(wanted.tolist(), abs=1e-3)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"regex": "("}, "regex='.': it cannot be parsed"),
        ({"regex": 3}, "regex=3: use a regular expression"),
        ({"regex": "(a|b)*a(a|b){16}"}, "regex=.*: its automaton has more than 16000 states"),
        ({"regex": "A"}, "regex='A': no sequence of the tokens of this vocabulary matches it"),
        ({"json_schema": {"oneOf": [{"multipleOf": 3}, {}]}}, "json_schema=.*: #/oneOf has a schema whose opposite"),
        ({"json_schema": {"contains": {}}}, "json_schema=.*: llguidance .* cannot compile it: Unimplemented keys"),
        ({"json_schema": "{"}, "json_schema='{': is not JSON"),
        ({"json_schema": 3}, "json_schema=3: use a JSON schema"),
        ({"json_schema": {"a": object()}}, "json_schema=.*: use a JSON schema"),
        ({"json_schema": {}, "regex": "a"}, "regex='a': there is a json_schema as well"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos=True: an end token ends"),
        ({"guided_json": {}}, "guided_json={}: use json_schema"),
        ({"response_format": {}}, "response_format={}: use json_schema or regex"),
    ],
)
def test_grammars_that_cannot_work_are_refused(
    toy_engine: Callable[..., Engine], params: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecbatchError, match=message):
        toy_engine().generate([[3]], SamplingParams(**{"max_new_tokens": 8} | params))


def test_a_table_without_room_is_refused(monkeypatch: pytest.MonkeyPatch, toy_engine: Callable[..., Engine]) -> None:
    monkeypatch.setattr("specbatch.engine.requests.prompt_reader.CELLS", 50)
    with pytest.raises(SpecbatchError, match=r"regex=.*: its table takes .* MiB; simplify it"):
        toy_engine().generate([[3]], SamplingParams(regex="[a-z]{9}", max_new_tokens=20))


@pytest.mark.slow
def test_answers_of_a_real_vocabulary_are_documents_of_the_schema() -> None:
    if not KNOWN_MODELS["smollm2-135m"].path.is_file():
        pytest.skip("specbatch models pull smollm2-135m")
    params = [
        SamplingParams(json_schema=SCHEMA, max_new_tokens=80, temperature=temperature, seed=1) for temperature in (0, 1)
    ]
    config = EngineConfig(model="smollm2-135m", device="cpu", max_running=2, max_model_len=256, speculation=NGRAM)
    with Engine(config) as engine:
        for item in engine.generate(["A person as JSON:"] * 2, params):
            assert item.finish_reason == "stop"
            jsonschema.validate(json.loads(item.text), SCHEMA)
