"""Verifies of the answers of servers: what this engine would have counted, from what each server reports."""

from __future__ import annotations

import json
import random
from itertools import cycle
from pathlib import Path

import pytest

from specbatch.core.completion import RequestMetrics
from specbatch.core.request import Request
from specbatch.core.sampling_params import SamplingParams
from specbatch.servers.answer import Answer
from specbatch.servers.client import Failed
from specbatch.servers.verifies import Drafting, Progress, Step, Timings, add_verifies, of_llamacpp

ANSWERS = Path(__file__).parents[1] / "kit" / "llamacpp_answers.json"  # of xllamacpp 2026.10.11549
PROMPT, END, DEPTH = [5, 6, 7], 1, 4
COUNTS = ("verify_steps", "emitted", "drafted", "accepted", "accept_length", "emitted_histogram", "acceptance")


def counted(metrics: RequestMetrics) -> dict[str, object]:
    return {name: getattr(metrics, name) for name in COUNTS}


def run(steps: list[Step], most: int, stop: int | None) -> tuple[RequestMetrics, list[Step], int]:
    """What this engine counts of an answer of at most `most` tokens, of which number `stop` ends it; the verifies that
    it took of `steps`, which repeat, and its tokens."""
    params = SamplingParams(max_new_tokens=most)
    request = Request(0, PROMPT, params, end_tokens=frozenset({END}), decode=lambda ids: "", submitted=0.0)
    request.append([9], 1.0)
    done = []
    for step in cycle(steps):
        if request.finished:
            break
        first = request.generated
        kept = request.append([END if first + n == stop else 9 for n in range(1 + step.accepted)], 2.0)
        request.count_verify(kept, step.drafted, step.accepted, DEPTH)
        done.append(step)
    return request.completion(3.0).metrics, done, request.generated


def of_vllm(steps: list[Step], tokens: int, most: int, detailed: bool = True) -> RequestMetrics:
    drafting = [step for step in steps if step.drafted]
    found = {
        "num_spec_steps": len(drafting),
        "num_accepted_draft_tokens": sum(step.accepted for step in drafting),
        "num_draft_tokens": sum(step.drafted for step in drafting),
        "acceptance_histogram": [sum(step.accepted == n for step in drafting) for n in range(DEPTH + 1)],
    }
    if detailed:
        found |= {f"per_step_{name}": [getattr(step, name) for step in drafting] for name in ("accepted", "drafted")}
    answer = Answer(0, PROMPT, 0.0, most)
    answer.take({"choices": [{"text": "a", "finish_reason": "stop"}], "usage": {"completion_tokens": tokens}}, 1.0)
    answer.take({"choices": [], "metrics": {"speculative_decoding": found}}, 2.0)
    return answer.completion().metrics


def of_llama(steps: list[Step], tokens: int, most: int) -> RequestMetrics:
    """One event for each token, as its server sends them."""
    answer = Answer(0, PROMPT, 0.0, most)
    sent, drafted, accepted = 1, 0, 0
    chunks = [Progress(1, 0, 0)]
    for step in steps:
        drafted, accepted = drafted + step.drafted, accepted + step.accepted
        for _ in range(min(1 + step.accepted, tokens - sent)):
            sent += 1
            chunks.append(Progress(sent, drafted, accepted))
    for n, (count, proposed, right) in enumerate([*chunks, chunks[-1]]):
        timings = {"predicted_n": count} | ({"draft_n": proposed, "draft_n_accepted": right} if proposed else {})
        reason = {"usage": {"completion_tokens": tokens}} if n == len(chunks) else {}
        choice = {"text": "" if reason else "a", "finish_reason": "stop" if reason else None}
        answer.take({"choices": [choice], "timings": timings, **reason}, 1.0)
    return answer.completion().metrics


@pytest.mark.parametrize("drafts_always", [True, False])
def test_servers_count_as_this_engine_does(drafts_always):
    draw = random.Random(7)
    for _ in range(200):
        lengths = [DEPTH] + [DEPTH if drafts_always else draw.randint(0, DEPTH) for _ in range(12)]
        steps = [Step(length, draw.randint(0, length)) for length in lengths]
        most, stop = draw.randint(2, 40), draw.choice((None, draw.randint(2, 30)))
        expected, done, tokens = run(steps, most, stop)
        assert counted(of_llama(done, tokens, most)) == counted(expected)
        found = of_vllm(done, tokens, most)
        if drafts_always:
            assert counted(found) == counted(expected)
        else:  # verifies without drafts have no place, and may hide what was trimmed
            assert found.verify_steps <= expected.verify_steps
            assert expected.verify_steps - found.verify_steps <= done[-1].accepted
        short = of_vllm(done, tokens, most, detailed=False)
        assert (short.verify_steps, short.emitted, short.drafted) == (found.verify_steps, tokens - 1, 0)


def test_verifies_without_drafts_are_seen_by_the_number_of_tokens():
    """Tokens of 1 (prefill), 1 (no draft), 3 and 1 of 4: the context of the verifies with drafts is not known."""
    found = of_vllm([Step(0, 0), Step(3, 2), Step(3, 0)], 6, 20)
    assert (found.verify_steps, found.drafted, found.accepted) == (3, 6, 2)
    assert found.emitted_histogram == [0, 2, 0, 1, 0]
    assert found.acceptance.as_counters() == {
        "drafted": [2] * 3,
        "tried": [2, 1, 1],
        "accepted": [1, 1, 0],
        "context": [],
    }


def test_real_answer_of_llamacpp_that_a_stop_string_ended():
    """The draft is the model itself: tokens of 1 (prefill), four times 4, and 1 of 4, whose other 3 came after the
    stop."""
    answer = taken("draft, stop", prompt=14)
    assert answer.drafting == Timings(15, 15, (Step(3, 3),) * 5)
    found = answer.completion().metrics
    assert (found.output_tokens, found.verify_steps, found.emitted, found.accept_length) == (18, 5, 17, 17 / 5)
    assert (found.drafted, found.accepted) == (13, 13), "of the last verify, one draft: the others came after the stop"
    assert found.emitted_histogram == [0, 1, 0, 0, 4]


def test_real_answer_of_llamacpp_with_verifies_without_drafts():
    """N-gram lookup that found nothing for the first 19 tokens, and once again later."""
    answer = taken("ngram, limit", prompt=5)
    steps = (Step(0, 0),) * 19 + (Step(4, 4),) * 2 + (Step(4, 1),) + (Step(0, 0),) * 2 + (Step(4, 4),) + (Step(0, 0),)
    assert answer.drafting == Timings(16, 13, steps)
    found = answer.completion().metrics
    assert (found.verify_steps, found.emitted, found.drafted, found.accepted) == (26, 39, 16, 13)
    assert found.acceptance.as_counters()["drafted"] == [4] * 4


def taken(name: str, prompt: int) -> Answer:
    answer = Answer(0, [5] * prompt, 0.0, 40)
    for chunk in json.loads(ANSWERS.read_text())[name]:
        answer.take(chunk, 1.0)
    answer.check()
    return answer


@pytest.mark.parametrize(
    "chunks",
    [
        [(1, 0, 0), (3, 3, 1)],  # a character of two tokens: of one verify, or of two
        [(1, 0, 0), (2, 3, 2), (3, 6, 3)],  # a verify before the one before has ended
        [(2, 0, 0), (3, 3, 1)],  # a first character of two tokens
        [(1, 0, 0), (2, 3, 4)],
        [(1, 0, 0), (2, 3, 2), (1, 3, 2)],
        [(1, 0, 0), (2, 10**6, 10**6)],
    ],
)
def test_chunks_that_do_not_show_the_verifies(chunks):
    found = of_llamacpp([Progress(*chunk) for chunk in chunks])
    assert found == Timings(*chunks[-1][1:])


def test_counts_of_something_else_are_not_used():
    """More tokens were trimmed than the last verify accepted."""
    assert of_vllm([Step(4, 4), Step(4, 1)], 3, 20).verify_steps == 0
    answer = Answer(0, PROMPT, 0.0, 20)
    with pytest.raises(Failed, match=r"metrics has per_step_drafted that is not a list"):
        answer.take({"choices": [], "metrics": {"speculative_decoding": {"per_step_drafted": 7}}}, 1.0)
    with pytest.raises(Failed, match=r"metrics has num_spec_steps=-1, which is not a count"):
        answer.take({"choices": [], "metrics": {"speculative_decoding": {"num_spec_steps": -1}}}, 1.0)


@pytest.mark.parametrize(
    ("histogram", "verifies", "proposed", "counts"),
    [
        ((3,), 3, 9, [3, 0, 0, 0]),  # of SGLang 0.5.23, where no draft was accepted
        ((2, 1), 3, 9, [2, 1, 0, 0]),
        ((0, 0, 0, 3), 3, 9, [0, 0, 0, 3]),
        ((2, 1), 3, 8, []),
        ((2,), 3, 9, []),
        ((1, 0, 0, 2), 3, 6, []),
    ],
)
def test_histograms_end_with_the_most_drafts_that_were_accepted(histogram, verifies, proposed, counts):
    metrics = RequestMetrics(prompt_tokens=5, output_tokens=4)
    accepted = sum(place * count for place, count in enumerate(histogram))
    add_verifies(metrics, Drafting("SGLang", verifies, accepted, proposed, histogram), max_tokens=9, ended_early=True)
    assert metrics.untrimmed_histogram == counts


class Ends:
    """Reasoning that token 8 ends."""

    last = frozenset({8})

    def ends(self, tokens, start):
        return tokens[-1] == 8

    def is_open(self, prompt, output):
        return True


@pytest.mark.parametrize("reasoned", [1, 4, 7, 20])
def test_parts_of_servers_count_as_this_engine_does(reasoned):
    """Of 20 tokens so many are reasoning."""
    steps = [Step(4, 4), Step(4, 0), Step(4, 2), Step(4, 1), Step(4, 4), Step(4, 3)]
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    request = Request(0, PROMPT, params, end_tokens=frozenset(), decode=lambda ids: "", submitted=0.0, reasoning=Ends())
    tokens = [8 if n == reasoned else 9 for n in range(1, 21)]
    request.append(tokens[:1], 1.0)
    for step in steps:
        at = request.generated
        request.count_verify(request.append(tokens[at : at + 1 + step.accepted], 2.0), 4, step.accepted, DEPTH)
    own = request.completion(3.0).metrics
    found = {f"per_step_{name}": [getattr(step, name) for step in steps] for name in ("accepted", "drafted")}
    found |= {"num_spec_steps": 6, "num_accepted_draft_tokens": 14, "num_draft_tokens": 24}
    answer = Answer(0, PROMPT, 0.0, 20)
    usage = {"completion_tokens": 20, "completion_tokens_details": {"reasoning_tokens": reasoned}}
    answer.take({"choices": [{"delta": {"content": "a"}, "finish_reason": "length"}], "usage": usage}, 1.0)
    answer.take({"choices": [], "metrics": {"speculative_decoding": found}}, 2.0)
    theirs = answer.completion().metrics
    for part in ("reasoning", "answer"):
        for name in ("verifies", "emitted", "drafted", "accepted"):
            assert getattr(theirs, f"{part}_{name}") == getattr(own, f"{part}_{name}"), (part, name)
    assert theirs.reasoning_tokens == own.reasoning_tokens == reasoned
    assert theirs.reasoning_emitted + theirs.answer_emitted == 19


@pytest.mark.parametrize(
    ("usages", "tokens"),
    [
        ([1, 4, 9], 4),  # in each chunk: what had arrived with the last chunk of reasoning
        ([None, None, 9], 0),
        ([None, None, {"completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 5}}], 5),
        ([None, None, {"completion_tokens": 9, "reasoning_tokens": 5}], 5),  # SGLang
        ([1, 4, {"completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 0}}], 4),
        ([1, 4, {"completion_tokens": 9, "completion_tokens_details": None}], 4),
    ],
)
def test_reasoning_tokens_of_a_server(usages, tokens):
    answer = Answer(0, PROMPT, 0.0, 20)
    deltas = [{"reasoning": "a"}, {"reasoning_content": "b"}, {"content": "c"}]
    for delta, usage in zip(deltas, usages, strict=True):
        reason = "stop" if "content" in delta else None
        counts = {"completion_tokens": usage} if isinstance(usage, int) else usage
        answer.take({"choices": [{"delta": delta, "finish_reason": reason}], "usage": counts}, 1.0)
    answer.check()
    assert answer.completion().metrics.reasoning_tokens == tokens


def test_more_reasoning_than_tokens_is_refused():
    with pytest.raises(Failed, match="usage has 9 reasoning_tokens of 5 completion_tokens"):
        Answer(0, PROMPT, 0.0, 20).take({"usage": {"completion_tokens": 5, "reasoning_tokens": 9}}, 1.0)
