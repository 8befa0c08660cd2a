"""The result of a sweep in sentences: the one that a report opens with, and those below its table."""

from __future__ import annotations

import math

import pytest
from swept import swept

from specbatch.records.run_record import RunRecord
from specbatch.records.verdicts import LOSES, NOT_INTERLEAVED, ONE_REPEAT, PAYS, UNDECIDED, Speedup
from specbatch.sweeps.report.points import speedups_of
from specbatch.sweeps.report.sentences import conclusion, headline, power_sentence, precision_sentences


def at(name: str, concurrency: int, *speeds: float) -> list[RunRecord]:
    """One record per repeat, with these tokens per second."""
    found = [swept(name, concurrency, repeat) for repeat in range(1, len(speeds) + 1)]
    for record, speed in zip(found, speeds, strict=True):
        record.metrics["output_throughput"] = speed
    return found


BASE = [*at("baseline", 1, 100, 101, 99), *at("baseline", 8, 100, 101, 99), *at("baseline", 32, 100, 101, 99)]


def test_largest_shown_speedup_and_the_other_verdicts_of_that_configuration() -> None:
    mine = [*at("v2", 1, 110, 90, 104), *at("v2", 8, 182, 183.5, 180.5), *at("v2", 32, 80, 81, 79)]
    other = at("v1", 32, 300, 20, 400)  # larger, but undecided
    assert headline(BASE + mine + other) == (
        "v2 generates 1.82 (1.81-1.83) times the baseline's tokens per second at concurrency 8; it is undecided at 1 "
        "and loses at 32."
    )
    assert headline([*BASE, *mine[:6], *at("v2", 32, 150, 152, 148)]).endswith(
        "it also pays at 32 and is undecided at 1."
    )


def test_nothing_that_pays() -> None:
    mine = [*at("v2", 1, 90, 91, 89), *at("v2", 8, 80, 81, 79)]
    assert headline(BASE + mine) == (
        "No configuration is shown to generate more tokens per second than the baseline; v2 comes closest, with 0.90 "
        "(0.90-0.90) times the baseline's tokens per second at concurrency 1 (loses); it loses at 8."
    )


def test_losses_of_other_configurations_are_named() -> None:
    """As the only thing that was shown, and beside what pays."""
    slow = [*at("v1", 1, 97, 103, 100), *at("v1", 8, 90, 91, 89), *at("v1", 32, 80, 81, 79)]
    vague = [*at("v2", 1, 110, 90, 104), *at("v2", 8, 110, 90, 104), *at("v2", 32, 110, 90, 104)]
    assert headline(BASE + slow + vague).endswith("v1 loses at 8 (0.90-0.90) and 32 (0.80-0.80).")
    assert headline(BASE + slow[3:] + at("v2", 8, 182, 183.5, 180.5)) == (
        "v2 generates 1.82 (1.81-1.83) times the baseline's tokens per second at concurrency 8; v1 loses at 8 "
        "(0.90-0.90) and 32 (0.80-0.80)."
    )


def test_speedup_over_another_base_names_it() -> None:
    """The graphs alone bring 1.5."""
    plain, drafting = at("baseline+piecewise", 1, 150, 151, 149), at("v2+piecewise", 1, 270, 271, 269)
    for record in plain + drafting:
        record.config["graphs"]["prefill"] = "piecewise"
    for record in plain:
        record.config["speculation"] = at("baseline", 1, 1)[0].config["speculation"]
    assert headline(BASE + plain + drafting) == (
        "v2+piecewise generates 1.80 (1.79-1.81) times baseline+piecewise's tokens per second at concurrency 1."
    )
    for record, speed in zip(plain, (90, 110, 100), strict=True):
        record.metrics["output_throughput"] = speed
    for record in drafting:
        record.metrics["output_throughput"] = 50.0
    assert headline(BASE + plain + drafting).startswith(
        "No configuration is shown to generate more tokens per second than the one that it is compared with; "
    )


@pytest.mark.parametrize(
    ("records", "sentence"),
    [
        (
            [*at("one", 4, 100), *at("two", 4, 150)],
            "two generates 1.50 times one's tokens per second at concurrency 4, in one repeat, which does not show how "
            "much that varies.",
        ),
        (
            at("alone", 4, 1234.5),
            "alone generates 1,234 tokens per second at concurrency 4; there is no other configuration to compare it "
            "with.",
        ),
    ],
)
def test_one_repeat_and_one_configuration(records, sentence) -> None:
    assert headline(records) == sentence


def test_simulated_acceptance_and_random_weights_are_named() -> None:
    made = swept("v1", simulate=2.4)
    assert headline([made]).endswith("Acceptance was simulated: this is the speed of the steps, not of a real draft.")
    made.config["load_format"] = "dummy"
    assert " Acceptance was simulated and weights are random: this is" in headline([made])
    plain = swept("v1")
    plain.config["load_format"] = "dummy"
    assert headline([plain]).endswith("with. Weights are random.")


def test_failed_points_only() -> None:
    failed = swept("v1", error="out of memory")
    failed.metrics = {}
    assert headline([failed]) == "Nothing was measured."


def test_faster_slower_and_no_difference() -> None:
    found = conclusion(
        {
            (1, "v1"): Speedup(1.83, 1.77, 1.85, PAYS, 3),
            (1, "v2"): Speedup(0.8, 0.7, 0.9, LOSES, 3),
            (4, "v1"): Speedup(1.02, 0.99, 1.05, UNDECIDED, 3),
            (4, "v2+piecewise"): Speedup(1.2, 1.1, 1.3, PAYS, 3),
        },
        {"v1": "baseline", "v2": "baseline", "v2+piecewise": "baseline+piecewise"},
    )
    assert found == [
        "Concurrency 1, output tok/s: v1 is 1.83 (1.77-1.85) times the baseline, v2 is 0.80 (0.70-0.90) times the "
        "baseline.",
        "Concurrency 4, output tok/s: no difference is shown between v1 and the baseline (0.99-1.05 times), "
        "v2+piecewise is 1.20 (1.10-1.30) times baseline+piecewise.",
    ]


def test_runs_that_were_not_interleaved_are_marked() -> None:
    found = conclusion({(1, "v2"): Speedup(1.5, 1.4, 1.6, NOT_INTERLEAVED, 3)}, {"v2": "baseline"})
    assert found == ["Concurrency 1, output tok/s: v2 is 1.50 (1.40-1.60) times the baseline (not interleaved)."]


def test_unknown_precision_is_not_within_what_was_wanted() -> None:
    (found,) = precision_sentences({(1, "v1"): 0.01, (1, "v2"): math.inf}, 0.02)
    assert "STILL NOT WITHIN ±2%: v1 ±1%, v2 unknown;" in found


def test_one_repeat_shows_no_interval() -> None:
    found = conclusion({(1, "v2"): Speedup(1.5, None, None, ONE_REPEAT, 1)}, {"v2": "v1"})
    assert found[0] == "Concurrency 1, output tok/s: v2 is 1.50 times v1."
    assert "--repeats 3" in found[1]


def test_the_last_sentence_says_how_small_a_gain_would_have_been_seen() -> None:
    exact, vague = at("v1", 1, 150, 151, 149), at("v2", 1, 110, 90, 104)
    one = speedups_of(BASE[:3] + exact)
    assert conclusion(one, {"v1": "baseline"})[-1] == "detectable (80% power): gains of 1.0%."
    both = speedups_of(BASE[:3] + exact + vague)
    assert [*power_sentence(both.values())] == ["detectable (80% power): gains of 1.0% to 40.9%."]
    assert [*power_sentence([Speedup(1.5, None, None, ONE_REPEAT, 1)])] == []


def test_a_single_configuration_has_no_conclusion() -> None:
    assert conclusion({}, {}) == []
