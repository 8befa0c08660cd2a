"""Requests on the host: stop conditions, text, timings, counts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from specbatch.core.acceptance import Acceptance
from specbatch.core.output_text import IncrementalText
from specbatch.core.request import Completion, Logprobs, Request, RequestMetrics, SamplingParams

EOS, OTHER_END = 0, 1
PIECES = [b"", b"", b"a", b"b", b"ab", b"ba ", b"\xc3", b"\xa9", b"b\xf0\x9f", b"\x98\x80", "ß".encode(), b"\n\n"]
LETTERS = {"a": 2, "b": 3, "ab": 4, "ba ": 5, "\n\n": 11}


def decode(tokens: list[int]) -> str:
    return b"".join(PIECES[token] for token in tokens).decode(errors="replace")


def make(**params: Any) -> Request:
    params = {"max_new_tokens": 100} | params
    return Request(3, [5, 6, 7], SamplingParams(**params), end_tokens=frozenset({EOS}), decode=decode, submitted=10.0)


def run(tokens: list[int], split: list[int] | None = None, **params: Any) -> Completion:
    """Feed tokens in runs of the given lengths (one by one without) until the request ends."""
    request = make(**params)
    lengths = itertools.chain(split or [], itertools.repeat(1))
    now, at = 11.0, 0
    while at < len(tokens) and not request.finished:
        part = tokens[at : at + next(lengths)]
        request.append(part, now, Logprobs([float(-token) for token in part]))
        at, now = at + len(part), now + 1
    if not request.finished:
        request.finish_reason = "abort"
    return request.completion(now)


def expected(tokens: list[int], params: SamplingParams) -> tuple[list[int], str, str]:
    """Tokens, finish reason and text, computed in the plainest way."""
    ends = {*params.stop_token_ids} | (set() if params.ignore_eos else {EOS})
    for count in range(1, len(tokens) + 1):
        kept = tokens[:count]
        if kept[-1] in ends:
            whole, shown = decode(kept[:-1]), decode(kept)
            text = ended(kept[:-1], "stop", params)[1]
            return kept, "stop", text if len(text) < len(whole) or params.skip_special_tokens else shown
        text = decode(kept).rstrip("\ufffd")
        cuts = [text.find(stop) for stop in params.stop if stop in text]
        if cuts:
            return kept, "stop", text[: min(cuts)]
        if count == params.max_new_tokens:
            return (kept, *ended(kept, "length", params))
    return (tokens, *ended(tokens, "abort", params))


def ended(tokens: list[int], reason: str, params: SamplingParams) -> tuple[str, str]:
    """Finish reason and text of an output that no stop ended before its last character."""
    text = decode(tokens)
    cuts = [text.find(stop) for stop in params.stop if stop in text]
    return ("stop" if cuts and reason == "length" else reason), text[: min(cuts, default=None)]


# -- stop conditions -----------------------------------------------------------------------------------------------


def test_append_returns_the_number_of_kept_tokens() -> None:
    request = make(max_new_tokens=5, stop_token_ids=(3,))
    assert request.append([2, 2], 1.0) == 2
    assert not request.finished
    assert request.append([2, 3, 2, 2], 2.0) == 2
    assert request.finished
    assert request.output == [2, 2, 2, 3]
    assert make(max_new_tokens=3).append([2, 2, 2, 2, 2], 1.0) == 3


PARAMS = st.fixed_dictionaries(
    {
        "max_new_tokens": st.integers(1, 12),
        "ignore_eos": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "stop_token_ids": st.sampled_from([(), (1,), (2,), (1, 9)]),
        "stop": st.lists(
            st.sampled_from(["a", "ba", "aba", "é", "aé", "éa", "😀a", "b", " ", "\n\n", "bb", "\ufffd", "a\ufffd"]),
            max_size=2,
        ),
    }
)


@settings(max_examples=100)
@example([2, 3, 4], [3], {"max_new_tokens": 3, "stop": ("bab",)})  # the stop is within the limit
@example([2, 3, 4], [3], {"max_new_tokens": 2, "stop": ("bab",)})  # the stop is after the limit
@example([2, 3, 4, 0], [4], {"stop": ("b",), "stop_token_ids": (3,), "skip_special_tokens": False})
@example([5, 4], [2], {"stop": ("a a", " ")})  # the earliest of several
@example([2] * 50 + [3, 3] + [2] * 9, [7], {"stop": ("bb",)})
@example([2, 6], [2], {"max_new_tokens": 2, "stop": ("a\ufffd",)})  # only the end of the output completes it
@example([2, 6, 0], [3], {"stop": ("\ufffd",), "skip_special_tokens": False})
@given(st.lists(st.integers(0, 11), min_size=1, max_size=16), st.lists(st.integers(1, 6), max_size=8), PARAMS)
def test_request_ends_at_the_first_stop_or_at_the_limit(
    tokens: list[int], split: list[int], params: dict[str, Any]
) -> None:
    """For any split into steps."""
    wanted = expected(tokens, SamplingParams(**{"max_new_tokens": 100} | params))
    for lengths in (split, None):
        found = run(tokens, lengths, logprobs=True, **params)
        assert (found.token_ids, found.finish_reason, found.text) == wanted
        assert found.logprobs == [float(-token) for token in found.token_ids]


def test_logprobs_are_off_by_default() -> None:
    assert run([2, 3]).logprobs is None


@pytest.mark.parametrize("ends", [[], [EOS]])
@pytest.mark.parametrize("skips", [True, False])
def test_stop_string_in_text_that_was_held_back(ends: list[int], skips: bool) -> None:
    tokens, texts = [2, 3, 6, *ends], []
    params = SamplingParams(max_new_tokens=len(tokens), stop=("b\ufffd",), skip_special_tokens=skips)
    how: dict[str, Any] = {"end_tokens": frozenset({EOS}), "decode": decode, "submitted": 10.0, "streams_text": True}
    request = Request(3, [5], params, **how)
    for token in tokens:
        request.append([token], 11.0)
        done = request.completion(12.0) if request.finished else None
        texts.append(request.new_text(done))
    assert done is not None
    assert (done.text, done.finish_reason, done.token_ids) == ("a", "stop", tokens)
    assert "".join(texts) == "a"


def test_held_back_text_within_the_least_tokens_has_no_stop_string() -> None:
    found = run([2, 6], max_new_tokens=2, min_tokens=2, stop=("\ufffd",))
    assert (found.text, found.finish_reason) == ("a\ufffd", "length")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a b", "a"),
        ("<b> a </b> c d", None),
        ("  <b>a </b> c d", None),  # spaces before the reasoning
        ("a<b> c", None),
        ("a <b>", "a"),
        ("<bc> d", "<bc>"),  # begins like reasoning
    ],
)
def test_stop_strings_do_not_end_reasoning(text: str, shown: str | None) -> None:
    letters = "".join(sorted(set(text)))
    params = SamplingParams(stop=(" ",), reasoning=("<b>", "[b]"))
    request = Request(
        0, [0], params, end_tokens=frozenset(), decode=lambda ids: "".join(letters[at] for at in ids), submitted=0.0
    )
    for letter in text:
        if not request.finished:
            request.append([letters.index(letter)], 1.0)
    assert request.finish_reason == (None if shown is None or shown == text else "stop")
    request.finish_reason = request.finish_reason or "abort"
    assert request.completion(1.0).text == (text if shown is None else shown)


def test_repr_is_short() -> None:
    metrics = RequestMetrics(itl_s=[0.0123456] * 400, emitted_histogram=[1, 2])
    done = Completion(0, [1] * 900, [4] * 400, "abc", "stop", metrics, logprobs=[-1.0] * 400)
    done.top_logprobs = [dict.fromkeys(range(20), -2.0)] * 400
    assert len(repr(done)) < 1500
    assert repr(metrics).startswith("RequestMetrics(prompt_tokens=0, ")
    assert "emitted_histogram=[1, 2], " in repr(metrics)
    assert "itl_s=[0.0123456, 0.0123456, 0.0123456, 0.0123456, 0.0123456, 0.0123456, ...]" in repr(done)
    assert "text='abc', finish_reason='stop'" in repr(done)


def test_rows_state_the_seed() -> None:
    assert run([2]).as_row()["seed"] is None
    assert run([2], seed=0).as_row()["seed"] == 0


# -- text -----------------------------------------------------------------------------------------------------------


def test_half_characters_are_held_back() -> None:
    text = IncrementalText(decode)
    assert [text.push(token) for token in [2, 6, 7, 8, 9, 3]] == ["a", "", "é", "b", "😀", "b"]
    assert text.text == "aéb😀b"


def test_invalid_bytes_are_returned_with_the_next_text() -> None:
    text = IncrementalText(decode)
    assert [text.push(token) for token in [7, 6, 2, 7]] == ["", "", "\ufffd\ufffda", ""]


@given(st.lists(st.integers(0, 11), max_size=20))
def test_pushed_text_is_the_text(tokens: list[int]) -> None:
    text = IncrementalText(decode)
    pushed = "".join(text.push(token) for token in tokens)
    assert pushed == text.text == decode(tokens).rstrip("\ufffd")


def test_decoding_sees_the_previous_token() -> None:
    def words(tokens: list[int]) -> str:  # as in sentencepiece: the first word loses its space
        return "".join(f" w{token}" for token in tokens).removeprefix(" ")

    text = IncrementalText(words)
    assert [text.push(token) for token in (1, 2, 3)] == ["w1", " w2", " w3"]


def test_characters_in_byte_tokens() -> None:
    def fallback(tokens: list[int]) -> str:  # as in sentencepiece: a group of byte tokens is whole or not at all
        data = bytes(tokens)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(data)

    text = IncrementalText(fallback)
    assert [text.push(token) for token in "éß".encode()] == ["", "é", "", "ß"]


def test_text_of_a_stream_stays_where_the_decoder_takes_it_back() -> None:
    backend = Tokenizer(models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokens, texts = [0xC3, 0xA9, 0xC3], []
    assert backend.decode(tokens) == "\ufffd" * 3
    how: dict[str, Any] = {"end_tokens": frozenset(), "decode": backend.decode, "submitted": 0.0, "streams_text": True}
    request = Request(0, [0], SamplingParams(max_new_tokens=3), **how)
    for token in tokens:
        request.append([token], 1.0)
        done = request.completion(1.0) if request.finished else None
        texts.append(request.new_text(done))
    assert done is not None
    assert "".join(texts) == done.text
    assert texts[1] == "é"


@pytest.mark.parametrize(("rest", "reason"), [([EOS], "stop"), ([], "stop"), ([9, 2], "stop")])
def test_stop_string_before_half_a_character_counts_at_once(rest: list[int], reason: str) -> None:
    found = run([2, 8, *rest], stop="ab", max_new_tokens=2)
    assert (found.token_ids, found.text, found.finish_reason) == ([2, 8], "", reason)


def test_only_the_newest_tokens_are_decoded_again() -> None:
    longest = 0

    def watch(tokens: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return decode(tokens)

    text = IncrementalText(watch)
    for token in [2, 3, 4, 6, 7, 10] * 20:
        text.push(token)
    assert longest <= 4


# -- timings and counts ---------------------------------------------------------------------------------------------


def test_timings_follow_their_definitions() -> None:
    request = make()
    request.admitted = 12.0
    request.append([2], 14.0)
    request.append([2, 3, 2], 17.0)
    request.append([2], 19.0)
    request.finish_reason = "length"
    found = request.completion(99.0).metrics
    assert (found.queue_s, found.ttft_s, found.e2e_s) == (2.0, 4.0, 9.0)
    assert found.tpot_s == pytest.approx(5.0 / 4)
    assert list(found.itl_s) == [1.0, 1.0, 1.0, 2.0]
    assert (found.prompt_tokens, found.output_tokens) == (3, 5)
    assert sum(found.itl_s) == pytest.approx(found.e2e_s - found.ttft_s)


def test_single_token_has_no_inter_token_latency() -> None:
    request = make(max_new_tokens=1)
    request.append([2], 14.0)
    found = request.completion(99.0).metrics
    assert (found.ttft_s, found.tpot_s, list(found.itl_s), found.e2e_s) == (4.0, None, [], 4.0)


def test_request_that_never_ran_has_queue_time_only() -> None:
    request = make()
    request.finish_reason = "abort"
    found = request.completion(25.0)
    assert (found.metrics.queue_s, found.metrics.e2e_s, found.metrics.ttft_s) == (15.0, 15.0, None)
    assert (found.token_ids, found.text, found.metrics.accept_length) == ([], "", None)


def test_timestamps_may_be_zero() -> None:
    request = Request(0, [1], SamplingParams(max_new_tokens=1), end_tokens=frozenset(), decode=decode, submitted=-2.0)
    request.admitted = -1.0
    request.append([2], 0.0)
    found = request.completion(5.0).metrics
    assert (found.ttft_s, found.e2e_s, found.queue_s) == (2.0, 2.0, 1.0)


def test_verify_counts_kept_tokens() -> None:
    request = make(max_new_tokens=7)
    request.append([2], 1.0)
    for tokens, accepted in (([2, 2, 2], 2), ([2], 0), ([2, 2, 2, 2], 3)):  # the last is trimmed to two
        request.count_verify(request.append(tokens, 2.0), drafted=4, accepted=accepted, depth=4)
    found = request.completion(3.0).metrics
    assert (found.verify_steps, found.emitted, found.drafted, found.accepted) == (3, 6, 9, 4)
    assert found.emitted_histogram == [0, 1, 1, 1, 0, 0]
    assert found.accept_length == 2.0
    assert found.emitted == found.output_tokens - 1
    # After 4, 7 and 8 tokens there was room for 6, 3 and 2; drafts past that are ignored.
    assert found.acceptance == Acceptance(
        drafted=[0, 0, 1, 1, 1], accepted=[1, 0, 2], exhausted=[0, 0, 1], verifies=[0, 0, 2, 1], emitted=[0, 0, 4, 2]
    )


def test_verify_without_kept_tokens_is_ignored() -> None:
    request = make()
    request.count_verify(0, drafted=4, accepted=2, depth=4)
    request.finish_reason = "abort"
    found = request.completion(3.0).metrics
    assert (found.verify_steps, found.drafted, found.accepted, found.emitted_histogram) == (0, 0, 0, [])
    assert found.acceptance == Acceptance()


def test_draft_counts_at_its_depth() -> None:
    request = make()
    request.append([2], 1.0)
    request.count_verify(request.append([2, 2], 2.0), drafted=12, accepted=1, depth=3)  # a tree of 12
    found = request.metrics
    assert (found.drafted, found.emitted_histogram) == (12, [0, 0, 1, 0, 0])
    assert found.acceptance.as_counters()["drafted"] == [1, 1, 1]
    assert found.acceptance.as_counters()["tried"] == [1, 1, 0]


def test_drafts_after_a_stop_are_ignored() -> None:
    request = make()
    request.append([2], 1.0)
    request.count_verify(request.append([2, EOS, 2, 2], 2.0), drafted=4, accepted=3, depth=4)
    found = request.completion(3.0).metrics
    assert found.acceptance.as_counters()["drafted"] == [1, 1]
    assert found.acceptance.as_counters()["accepted"] == [1, 1]
    assert (found.drafted, found.accepted) == (2, 2)


def test_tree_levels_after_a_stop_count_as_not_drafted() -> None:
    request = make()
    request.append([2], 1.0)
    request.count_verify(request.append([2, EOS, 2], 2.0), drafted=12, accepted=2, depth=3)
    found = request.completion(3.0).metrics
    assert (found.drafted, found.accepted) == (11, 2)
    assert found.acceptance.as_counters()["drafted"] == [1, 1]


def test_row_of_a_completion_has_numbers_and_no_tokens() -> None:
    row = run([2, 3, 0]).as_row()
    assert (row["index"], row["finish_reason"], row["output_tokens"]) == (3, "stop", 3)
    assert not {"text", "token_ids", "prompt_token_ids"} & set(row)
