"""Requests on the host: stop conditions, text, timings, counts."""

from __future__ import annotations

import itertools
from functools import cache, partial
from typing import Any

import pytest
from crossed import crossed
from examples import examples
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from specbatch.core.acceptance import Acceptance
from specbatch.core.completion import Completion
from specbatch.core.output_text import Decode, IncrementalText, OutputText
from specbatch.core.request import Logprobs, Request
from specbatch.core.sampling_params import SamplingParams
from specbatch.text.tokenizer import Tokenizer

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


def expected(tokens: list[int], params: SamplingParams, decode: Decode = decode) -> tuple[list[int], str, str]:
    """Tokens, finish reason and text, computed in the plainest way: each time from the text of all tokens."""
    ends = {*params.stop_token_ids} | (set() if params.ignore_eos else {EOS})
    for count in range(1, len(tokens) + 1):
        kept = tokens[:count]
        if kept[-1] in ends:
            return kept, "stop", decode(kept[:-1] if params.skip_special_tokens else kept)
        text = decode(kept)
        cuts = [text.find(stop) for stop in params.stop if stop in text]
        if cuts:
            return kept, "stop", text[: min(cuts)]
        if count == params.max_new_tokens:
            return kept, "length", text
    return tokens, "abort", decode(tokens)


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


@examples(100)
@example([2, 3, 4], [3], {"max_new_tokens": 3, "stop": ("bab",)})  # the stop is within the limit
@example([2, 3, 4], [3], {"max_new_tokens": 2, "stop": ("bab",)})  # the stop is after the limit
@example([2, 3, 4, 0], [4], {"stop": ("b",), "stop_token_ids": (3,), "skip_special_tokens": False})
@example([5, 4], [2], {"stop": ("a a", " ")})  # the earliest of several
@example([2] * 50 + [3, 3] + [2] * 9, [7], {"stop": ("bb",)})
@example([2, 6, 7], [3], {"stop": ("a\ufffd",)})  # before the character is complete
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


@pytest.mark.parametrize(
    ("tokens", "least", "text", "reason"),
    [
        ([2, 6], 2, "a\ufffd", "length"),  # within the least tokens
        ([2, 6, 3], 2, "a\ufffdb", "length"),
        ([2, 6, 7], 2, "a", "stop"),  # the last token completes it
        ([2, 6, 7, 6], 3, "aé", "stop"),
    ],
)
def test_least_tokens_have_no_stop_string(tokens: list[int], least: int, text: str, reason: str) -> None:
    found = run(tokens, max_new_tokens=len(tokens), min_tokens=least, stop=("é", "\ufffd"))
    assert (found.text, found.finish_reason, found.token_ids) == (text, reason, tokens)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a b", "a"),
        ("<b> a </b> c d", None),
        ("  <b>a </b> c d", None),  # spaces before the reasoning
        ("a<b> c", None),
        ("a <b>", "a"),
        ("<bc> d", "<bc>"),  # begins like reasoning
        (" \n a b", ""),  # may have become reasoning
    ],
)
def test_stop_strings_do_not_end_reasoning(text: str, shown: str | None) -> None:
    letters = "".join(sorted(set(text)))
    params = SamplingParams(stop=(" ",), reasoning=("<b>", "[b]"))
    how: dict[str, Any] = {"end_tokens": frozenset(), "submitted": 0.0, "streams_text": True}
    request, texts = Request(0, [0], params, decode=lambda ids: "".join(letters[at] for at in ids), **how), []
    for letter in text:
        if not request.finished:
            request.append([letters.index(letter)], 1.0)
            texts += [] if request.finished else [request.new_text()]
    assert request.finish_reason == (None if shown is None or shown == text else "stop")
    request.finish_reason = request.finish_reason or "abort"
    done = request.completion(1.0)
    assert done.text == (text if shown is None else shown)
    assert "".join([*texts, request.new_text(done)]) == done.text


def test_rows_state_the_seed() -> None:
    assert run([2]).as_row()["seed"] is None
    assert run([2], seed=0).as_row()["seed"] == 0


# -- text -----------------------------------------------------------------------------------------------------------

_LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
_FALLBACK = ["▁", "▁a", "b", "é", "\ufffd", *(f"<0x{byte:02X}>" for byte in [*b"\n a", *"é。😀".encode(), 0xFF])]
_AFTER = [decoders.ByteFallback(), decoders.Fuse()]
_BACKENDS: dict[str, tuple[list[str], Any]] = {
    "llama 2": (_FALLBACK, [decoders.Replace("▁", " "), *_AFTER, decoders.Strip(" ", 1, 0)]),
    "gemma": (_FALLBACK, [decoders.Replace("▁", " "), *_AFTER]),
    "metaspace": (_FALLBACK, [decoders.Metaspace(), *_AFTER]),
    "byte-level": ([_LETTERS[at] for at in range(0, 256, 12)] + [*"Ã©ðŁĺĢ", "Ġa", "ĺĢb"], [decoders.ByteLevel()]),
    "WordPiece": (["a", "##b", "'", "s", ".", "##é"], [decoders.WordPiece()]),
    "BPE with ends of words": (["a</w>", "b", "é</w>", "c"], [decoders.BPEDecoder()]),
}


@cache
def tokenizer(name: str) -> Tokenizer:
    """Small; ids 0 and 1 are special tokens, 2 and 3 added ones."""
    words, steps = _BACKENDS[name]
    words = ["</s>", "<|end|>", "<tool>", "▁tool▁", *dict.fromkeys(words)]
    backend = Backend(models.BPE({word: place for place, word in enumerate(words)}, []))
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(word, special=True) for word in words[:2]])
    backend.add_tokens([AddedToken(word) for word in words[2:4]])
    return Tokenizer(backend, name=name)


def token_lists(name: str) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, tokenizer(name).vocab_size), max_size=14)  # the last one is no token


def bytes_of(*texts: str) -> list[int]:
    """Byte tokens of "llama 2"; text in <> is a token as it is."""
    names = (name for text in texts for name in ([text] if len(text) > 3 else map("<0x{:02X}>".format, text.encode())))
    return [tokenizer("llama 2").vocabulary().index(name) for name in names]


@pytest.mark.parametrize(("name", "skips"), crossed(_BACKENDS, [True, False]))
@examples(60, quick=60)  # rare tokens
@given(st.data())
def test_text_of_growing_tokens_is_that_of_all(name: str, skips: bool, data: st.DataObject) -> None:
    tokens = data.draw(token_lists(name))
    decode = partial(tokenizer(name).decode, skip_special_tokens=skips)
    text, settled = IncrementalText(decode, tokenizer(name).byte_tokens), [""]
    for count, token in enumerate(tokens, 1):
        text.push(token)
        settled.append(text.settled)
        assert text.text == decode(tokens[:count])
    assert all(text.text.startswith(earlier) for earlier in settled)
    assert settled == sorted(settled, key=len)


STOPS = [
    "é",
    "。",
    "😀",
    "a",
    "aé",
    "éa",
    "\n",
    " ",
    "b",
    "ba",
    "\ufffd",
    "\ufffda",
    "\ufffd\ufffd",
    "</s>",
    "<|end|>b",
]


@pytest.mark.parametrize("name", ["llama 2", "byte-level"])
@examples(150)
@given(st.data())
def test_answers_and_streams_end_where_the_whole_text_has_a_stop_string(name: str, data: st.DataObject) -> None:
    """For any split into steps: in a speculative step of several tokens, those after the stop are not kept."""
    tokens, lengths = data.draw(token_lists(name)), data.draw(st.lists(st.integers(1, 5), min_size=14))
    params = data.draw(
        st.builds(
            SamplingParams,
            max_new_tokens=st.integers(1, 14),
            stop=st.lists(st.sampled_from(STOPS), max_size=3),
            skip_special_tokens=st.booleans(),
        )
    )
    decode = partial(tokenizer(name).decode, skip_special_tokens=params.skip_special_tokens)
    wanted = expected(tokens, params, decode)
    for streams in (True, False):
        rest, texts = list(tokens), []
        request = Request(
            0, [0], params, end_tokens=frozenset({EOS}), decode=decode, submitted=0.0, streams_text=streams,
            byte_tokens=tokenizer(name).byte_tokens,
        )  # fmt: skip
        for length in lengths:
            if rest and not request.finished:
                request.append(rest[:length], 1.0)
                rest = rest[length:]
                texts += [request.new_text()] if streams and not request.finished else []
        request.finish_reason = request.finish_reason or "abort"
        done = request.completion(1.0)
        assert (done.token_ids, done.finish_reason, done.text) == wanted
        assert not streams or "".join([*texts, request.new_text(done)]) == done.text


def settled_after_each(tokens: list[int], name: str = "llama 2") -> list[str]:
    text, found = IncrementalText(tokenizer(name).decode, tokenizer(name).byte_tokens), [0]
    for token in tokens:
        text.push(token)
        found.append(len(text.settled))
    return [text.text[start:end] for start, end in itertools.pairwise(found)]


def test_half_characters_are_held_back() -> None:
    text, settled = IncrementalText(decode), []
    for token in [2, 6, 7, 8, 9, 3]:
        text.push(token)
        settled.append(text.settled)
    assert settled == ["a", "a", "aé", "aéb", "aéb😀", "aéb😀b"]


def test_runs_of_byte_tokens_are_held_back() -> None:
    assert settled_after_each(bytes_of("é", "a", "<tool>")) == ["", "", "", "éa<tool>"]
    assert settled_after_each(bytes_of("é", "</s>", "é", "<tool>")) == ["", "", "", "", "", "éé<tool>"]  # left out


def test_decoding_sees_the_previous_token() -> None:
    def words(tokens: list[int]) -> str:  # as in sentencepiece: the first word loses its space
        return "".join(f" w{token}" for token in tokens).removeprefix(" ")

    text = IncrementalText(words)
    for token in (1, 2, 3):
        text.push(token)
    assert text.text == "w1 w2 w3"


def test_a_run_of_byte_tokens_is_decoded_only_where_a_stop_string_may_end() -> None:
    calls = 0

    def watch(tokens: list[int]) -> str:
        nonlocal calls
        calls += 1
        return tokenizer("llama 2").decode(tokens)

    output = OutputText(watch, ["\n", "Question:"], byte_tokens=tokenizer("llama 2").byte_tokens)
    assert not any(output.push(token) for token in bytes_of("é。") * 20)
    assert calls == 0
    assert output.push(*bytes_of("\n"))
    assert output.whole() == "é。" * 20


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
    request.finish_reason = "length"
    found = request.completion(3.0).metrics
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
