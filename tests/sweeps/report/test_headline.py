"""The sentence that a report opens with."""

from __future__ import annotations

import pytest
from swept import swept

from specbatch.records.run_record import RunRecord
from specbatch.sweeps.report.sentences import headline


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
