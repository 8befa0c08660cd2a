"""Acceptance counters by draft position, their table, the low-acceptance warning, and the counters of whole runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbatch import Engine, SamplingParams, Speculation
from specbatch.core.acceptance import Acceptance
from specbatch.records.low_acceptance import LowAcceptanceWarning
from specbatch.records.markdown import DENOMINATORS, acceptance_cells, acceptance_table, denominators_note
from specbatch.records.metrics import ACCEPTANCE


@st.composite
def verify(draw: st.DrawFn) -> dict[str, int]:
    """Arguments of `Acceptance.count`: the limit cuts after `room` tokens, a stop may cut before."""
    drafted = draw(st.integers(0, 5))
    accepted = draw(st.integers(0, drafted))
    room = draw(st.integers(1, 8))
    kept = draw(st.integers(1, min(accepted + 1, room)))
    return {"context": draw(st.integers(1, 70)), "room": room, "kept": kept, "drafted": drafted, "accepted": accepted}


def naive(verifies: list[dict[str, int]]) -> dict[str, Any]:
    """Counts draft by draft. A draft past the limit or past a cut is unknown."""
    drafted, tried, accepted = ([0] * 5 for _ in range(3))
    for one in verifies:
        cut = one["kept"] <= one["accepted"]
        for place in range(one["drafted"]):
            if place >= one["room"] or (cut and place >= one["kept"]):
                break
            drafted[place] += 1
            tried[place] += all(before < one["accepted"] for before in range(place))
            accepted[place] += place < one["accepted"]
    count = max((place + 1 for place, amount in enumerate(drafted) if amount), default=0)
    starts = sorted({2 ** (len(f"{one['context']:b}") - 1) for one in verifies})
    here = [[one for one in verifies if start <= one["context"] < 2 * start] for start in starts]
    buckets = [[start, len(row), sum(x["kept"] for x in row)] for start, row in zip(starts, here, strict=True)]
    return {"drafted": drafted[:count], "tried": tried[:count], "accepted": accepted[:count], "context": buckets}


@given(st.lists(verify(), max_size=12), st.integers(0, 12))
def test_counts_match_a_draft_by_draft_count(verifies: list[dict[str, int]], split: int) -> None:
    parts = Acceptance(), Acceptance()
    for place, one in enumerate(verifies):
        parts[place < split].count(**one)
    total = parts[0]
    total += parts[1]
    found, wanted = total.as_counters(), naive(verifies)
    assert found == wanted
    assert total.first == ((wanted["drafted"] or [0])[0], (wanted["accepted"] or [0])[0])


def counted(*verifies: tuple[int, int]) -> dict[str, Any]:
    """The counters of a run from (drafted, accepted), with room for everything, all after 40 tokens."""
    total, left = Acceptance(), [0] * 5
    for drafted, accepted in verifies:
        total.count(context=40, room=99, kept=accepted + 1, drafted=drafted, accepted=accepted)
        left[accepted + 1] += 1
    return {"acceptance": total.as_counters(), "emitted_histogram": left}


TEN = [(3, 0)] * 4 + [(3, 1), (3, 1), (3, 2), (3, 3), (0, 0), (0, 0)]  # two had nothing to draft


@pytest.mark.parametrize(
    ("runs", "cells"),
    [
        # Of 8 verifies draft 1 is accepted in 4, draft 2 in 2 of these, draft 3 in 1 of these.
        ([TEN], ["10", "50 25 12", "50 50 50", "60 20 10 10", "32+: 1.70"]),
        # A position counts only the verifies that drafted it.
        ([[(1, 1), (1, 1), (1, 1), (2, 1), (2, 2)]], ["5", "100 50", "100 50", "0 80 20 0", "32+: 2.20"]),
        # Repeats are added up.
        ([[(2, 2)], [(1, 0), (2, 0), (2, 1)]], ["4", "50 33", "50 50", "50 25 25 0", "32+: 1.75"]),
        ([[(0, 0)]], None),
    ],
)
def test_cells(runs: list[list[tuple[int, int]]], cells: list[str] | None) -> None:
    assert acceptance_cells([counted(*run) for run in runs]) == cells


def test_runs_without_drafts_have_no_row() -> None:
    assert acceptance_cells([{}]) is None  # a record from before these counters
    assert acceptance_table({("x",): [counted((0, 0))]}, ("name",)) == ""
    shown = acceptance_table({("plain",): [counted((0, 0))], ("v1",): [counted((2, 1))]}, ("name",))
    assert all(title in shown for title in ("name", *ACCEPTANCE))
    assert "v1" in shown
    assert "plain" not in shown


@pytest.mark.parametrize(
    ("runs", "note"),
    [
        ([TEN], DENOMINATORS),  # two without a draft
        ([[(3, 1)] * 6 + [(1, 1)] * 4], DENOMINATORS),  # draft length auto: of different lengths
        ([[(3, 1)] * 9 + [(1, 1)]], DENOMINATORS),  # the end of an answer
        ([[(2, 2)] * 5], ""),
        ([[(0, 0)]], ""),
        ([{}], ""),
    ],
)
def test_shares_of_different_verifies_are_noted(runs: list[Any], note: str) -> None:
    counters = [run if isinstance(run, dict) else counted(*run) for run in runs]
    assert denominators_note(counters) == note
    below = acceptance_table({(): iter(counters)}).splitlines()[-1:]  # an iterator can be read once only
    assert (below == [note]) == bool(note)


# -- the warning ------------------------------------------------------------------------------------------------------


def warned(*requests: tuple[int, int]) -> list[str]:
    """The warnings about requests given as (verifies with drafts, accepted first drafts)."""
    found: list[str] = []
    watch = LowAcceptanceWarning("the moon", found.append)
    for drafted, right in requests:
        counts = Acceptance()
        for number in range(drafted):
            counts.count(context=9, room=9, kept=1 + (number < right), drafted=3, accepted=int(number < right))
        counts.count(context=9, room=9, kept=1, drafted=0, accepted=0)
        watch.add(counts)
    return found


@pytest.mark.parametrize(
    ("requests", "lines"),
    [
        ([(199, 0)], 0),
        ([(200, 39)], 1),
        ([(200, 40)], 0),
        ([(150, 0), (50, 0)], 1),
        ([(150, 100), (50, 0)], 0),
        ([(300, 0), (300, 0)], 1),  # once
    ],
)
def test_low_acceptance_is_reported_once(requests: list[tuple[int, int]], lines: int) -> None:
    found = warned(*requests)
    assert len(found) == lines
    if found:
        assert "likely causes: the moon" in found[0]
        assert found[0].count("\n") == 1


LONG = SamplingParams(max_new_tokens=20, ignore_eos=True)
ALIEN = {"algorithm": "standalone", "draft": "toy-2", "draft_tokens": 3}  # a draft with other weights


@pytest.mark.parametrize(
    ("speculation", "warns"),
    [
        (Speculation(schedule="v2", **ALIEN), True),
        pytest.param(Speculation(schedule="v1", **ALIEN), True, marks=pytest.mark.slow),
        (Speculation("standalone", draft="toy", draft_tokens=3), False),
        pytest.param(Speculation(simulate_accept_length=1.0, **ALIEN), False, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_engine_warns_once_of_an_unfitting_draft(
    toy: Any, toy_engine: Callable[..., Engine], speculation: Speculation, warns: bool
) -> None:
    lines: list[str] = []
    with toy_engine(load_format="auto", log=lines.append, speculation=speculation) as engine:
        for _ in range(2):
            engine.generate([list(prompt) for prompt in toy.prompts()[:12]], LONG)
            engine.reset_record()
    found = [line for line in lines if "low acceptance" in line]
    assert len(found) == warns
    assert all("no pair" in line for line in found)


# -- whole runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["v1", "v2"])
def test_counters_follow_from_lengths_if_all_is_accepted(
    toy: Any, toy_engine: Callable[..., Engine], schedule: str
) -> None:
    """A draft of the same weights has every draft accepted."""
    prompts = [list(prompt) for prompt in toy.prompts()[:8]]
    engine = toy_engine(speculation=Speculation("standalone", schedule, draft="toy", draft_tokens=3))
    engine.generate(prompts, SamplingParams(max_new_tokens=8, ignore_eos=True))
    record = engine.record()
    # The first token is the prompt's; of the other 7 the first verify emits 4, the second 3: its third draft is the
    # last token that there is room for.
    for name in ("drafted", "tried", "accepted"):
        assert record.counters["acceptance"][name] == [16, 16, 16]
    assert record.metrics["first_draft_accept_rate"] == 1.0
    wanted: dict[int, list[int]] = {}
    for prompt in prompts:
        for context, emitted in ((len(prompt) + 1, 4), (len(prompt) + 5, 3)):
            bucket = wanted.setdefault(1 << (context.bit_length() - 1), [0, 0])
            bucket[0] += 1
            bucket[1] += emitted
    assert record.counters["acceptance"]["context"] == [[start, *sums] for start, sums in sorted(wanted.items())]


@pytest.mark.parametrize("draft", [{"algorithm": "ngram", "ngram_min": 1}, ALIEN])
def test_counters_of_a_run_agree_with_its_metrics(toy: Any, toy_engine: Any, draft: dict[str, Any]) -> None:
    found = []
    for schedule in ("v1", "v2"):
        engine = toy_engine(speculation=Speculation(schedule=schedule, **draft))
        # With so few tokens the limit often cuts verifies off, also after accepted drafts.
        params = SamplingParams(max_new_tokens=11, ignore_eos=True)
        engine.generate([list(prompt) for prompt in toy.prompts()[8:16]], params)
        record = engine.record()
        counts, metrics = record.counters["acceptance"], record.metrics
        assert metrics["drafted_tokens"] == sum(counts["drafted"])
        assert metrics["accept_rate"] == sum(counts["accepted"]) / sum(counts["drafted"])
        assert sum(counts["accepted"]) == metrics["accepted_tokens"] > 0
        assert counts["tried"][0] == counts["drafted"][0]
        pairs = zip(counts["tried"][1:], counts["accepted"], strict=False)
        assert all(tried <= accepted for tried, accepted in pairs)  # less where the limit leaves no room for it
        assert sum(verifies for _, verifies, _ in counts["context"]) == metrics["verify_steps"]
        assert sum(emitted for *_, emitted in counts["context"]) / metrics["verify_steps"] == metrics["accept_length"]
        assert metrics["first_draft_accept_rate"] == counts["accepted"][0] / counts["drafted"][0]
        found.append(counts)
    assert found[0] == found[1]
