"""Where drafts are accepted: counts against a count one by one, the cells of tables, the warning, whole runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbatch import Engine, SamplingParams, Speculation
from specbatch.core.acceptance import Acceptance
from specbatch.records.low_acceptance import LowAcceptanceWarning
from specbatch.records.markdown import acceptance_cells, acceptance_table
from specbatch.records.metrics import ACCEPTANCE


@st.composite
def verify(draw: st.DrawFn) -> dict[str, int]:
    """What a request books: the limit cuts behind `room` tokens, a stop may cut before."""
    drafted = draw(st.integers(0, 5))
    accepted = draw(st.integers(0, drafted))
    room = draw(st.integers(1, 8))
    kept = draw(st.integers(1, min(accepted + 1, room)))
    return {"context": draw(st.integers(1, 70)), "room": room, "kept": kept, "drafted": drafted, "accepted": accepted}


def naive(verifies: list[dict[str, int]]) -> dict[str, Any]:
    """Draft by draft. Unknown is a draft that the limit leaves no room for, or that lies behind a cut."""
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
def test_counts_are_those_of_a_count_one_by_one(verifies: list[dict[str, int]], split: int) -> None:
    parts = Acceptance(), Acceptance()
    for place, one in enumerate(verifies):
        parts[place < split].count(**one)
    total = parts[0]
    total += parts[1]
    found, wanted = total.as_counters(), naive(verifies)
    assert found == wanted
    assert total.first == ((wanted["drafted"] or [0])[0], (wanted["accepted"] or [0])[0])


def counted(*verifies: tuple[int, int]) -> dict[str, Any]:
    """The counters of a run from (drafted, accepted), with room for everything, all behind 40 tokens."""
    total, left = Acceptance(), [0] * 5
    for drafted, accepted in verifies:
        total.count(context=40, room=99, kept=accepted + 1, drafted=drafted, accepted=accepted)
        left[accepted + 1] += 1
    return {"acceptance": total.as_counters(), "emitted_histogram": left}


def test_reached_and_accepted_where_tried_are_different_shares() -> None:
    # 8 verifies drafted: draft 1 right in 4, draft 2 in 2 of these, draft 3 in 1 of these. 2 had nothing to draft.
    run = counted((3, 0), (3, 0), (3, 0), (3, 0), (3, 1), (3, 1), (3, 2), (3, 3), (0, 0), (0, 0))
    assert acceptance_cells([run]) == ["10", "50 25 12", "50 50 50", "60 20 10 10", "32+: 1.70"]


def test_a_short_draft_is_in_no_share_of_the_drafts_it_lacks() -> None:
    shown = acceptance_cells([counted((1, 1), (1, 1), (1, 1), (2, 1), (2, 2))])
    assert shown is not None
    assert shown[1:3] == ["100 50", "100 50"]


def test_repeats_are_one_run() -> None:
    shown = acceptance_cells([counted((2, 2)), counted((1, 0), (2, 0), (2, 1))])
    assert shown == ["4", "50 33", "50 50", "50 25 25 0", "32+: 1.75"]


def test_what_drafted_nothing_has_no_row() -> None:
    assert acceptance_cells([counted((0, 0))]) is None
    assert acceptance_cells([{}]) is None  # a record from before these counters
    assert acceptance_table({("x",): [counted((0, 0))]}, ("name",)) == ""
    shown = acceptance_table({("plain",): [counted((0, 0))], ("v1",): [counted((2, 1))]}, ("name",))
    assert all(title in shown for title in ("name", *ACCEPTANCE))
    assert "v1" in shown
    assert "plain" not in shown


# -- the warning ------------------------------------------------------------------------------------------------------


def seen(*requests: tuple[int, int]) -> list[str]:
    """What is said of requests that drafted so many times, and were right at the first draft so many times."""
    said: list[str] = []
    watch = LowAcceptanceWarning("the moon", said.append)
    for drafted, right in requests:
        counts = Acceptance()
        for number in range(drafted):
            counts.count(context=9, room=9, kept=1 + (number < right), drafted=3, accepted=int(number < right))
        counts.count(context=9, room=9, kept=1, drafted=0, accepted=0)
        watch.add(counts)
    return said


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
def test_it_warns_once_there_is_enough_to_go_by(requests: list[tuple[int, int]], lines: int) -> None:
    said = seen(*requests)
    assert len(said) == lines
    if said:
        assert "likely causes: the moon" in said[0]
        assert said[0].count("\n") == 1


LONG = SamplingParams(max_new_tokens=40, ignore_eos=True)
ALIEN = {"algorithm": "standalone", "draft": "toy-2", "draft_tokens": 3}  # a draft with other weights


def warnings(toy: Any, toy_engine: Callable[..., Engine], speculation: Speculation) -> list[str]:
    lines: list[str] = []
    prompts = [list(prompt) for prompt in toy.prompts()[:8]]
    with toy_engine(load_format="auto", log=lines.append, speculation=speculation) as engine:
        for _ in range(2):
            engine.generate(prompts, LONG)
            engine.reset_record()
    return [line for line in lines if "low acceptance" in line]


@pytest.mark.parametrize("schedule", ["v1", "v2"])
def test_a_draft_of_another_target_is_named_on_the_log_once(toy: Any, toy_engine: Any, schedule: str) -> None:
    (line,) = warnings(toy, toy_engine, Speculation(schedule=schedule, **ALIEN))
    assert "no pair" in line


def test_a_fitting_draft_and_a_simulated_one_are_not_warned_of(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    fitting = Speculation("standalone", draft="toy", draft_tokens=3)
    assert warnings(toy, toy_engine, fitting) == []
    assert warnings(toy, toy_engine, Speculation(simulate_accept_length=1.0, **ALIEN)) == []


# -- whole runs -------------------------------------------------------------------------------------------------------


def test_a_run_is_counted_as_its_tokens_say(toy: Any, toy_engine: Callable[..., Engine]) -> None:
    """A draft of the same weights accepts all: what is counted then follows from lengths alone."""
    prompts = [list(prompt) for prompt in toy.prompts()[:8]]
    found = []
    for schedule in ("v1", "v2"):
        engine = toy_engine(speculation=Speculation("standalone", schedule, draft="toy", draft_tokens=3))
        engine.generate(prompts, SamplingParams(max_new_tokens=8, ignore_eos=True))
        found.append(engine.record())
    for record in found:
        # The first token is the prompt's; of the other 7 the first verify leaves 4, the second 3: its third draft is
        # the last token that there is room for.
        assert record.counters["acceptance"]["drafted"] == [16, 16, 16]
        assert record.counters["acceptance"]["tried"] == [16, 16, 16]
        assert record.counters["acceptance"]["accepted"] == [16, 16, 16]
        assert record.metrics["first_draft_accept_rate"] == 1.0
        wanted: dict[int, list[int]] = {}
        for prompt in prompts:
            for context, left in ((len(prompt) + 1, 4), (len(prompt) + 5, 3)):
                bucket = wanted.setdefault(1 << (context.bit_length() - 1), [0, 0])
                bucket[0] += 1
                bucket[1] += left
        assert record.counters["acceptance"]["context"] == [[start, *sums] for start, sums in sorted(wanted.items())]


@pytest.mark.parametrize("draft", [{"algorithm": "ngram", "ngram_min": 1}, ALIEN])
def test_counters_of_a_run_agree_with_its_metrics(toy: Any, toy_engine: Any, draft: dict[str, Any]) -> None:
    found = []
    for schedule in ("v1", "v2"):
        engine = toy_engine(speculation=Speculation(schedule=schedule, **draft))
        # Of so few tokens verifies are cut off at the limit, often behind drafts that were right.
        params = SamplingParams(max_new_tokens=11, ignore_eos=True)
        engine.generate([list(prompt) for prompt in toy.prompts()[:12]], params)
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
