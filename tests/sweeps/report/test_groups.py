"""Tables by category and by turn: over the requests of all repeats, changes from the first turn by conversation."""

from __future__ import annotations

from typing import Any

from sweep_tables import record, text_of

from specbatch.records.run_record import RunRecord
from specbatch.sweeps.report.groups import categories

COUNTS = {"verify_steps": 10, "accepted": 5, "drafted": 20, "ttft_s": 0.25, "tpot_s": 0.01}


def made(requests: list[dict[str, Any]], repeat: int = 1, name: str = "v1", prompts: int = 2) -> RunRecord:
    found = record(name, repeat, 20.0, prompts=prompts)
    usual = {"output_tokens": 10, "prompt_tokens": 30, "finish_reason": "stop", "emitted": 20, **COUNTS}
    found.requests = [usual | {"index": index} | own for index, own in enumerate(requests)]
    return found


def cells(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|") and set(line) - set("|-")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_categories_have_their_own_table_over_all_repeats() -> None:
    rows: list[dict[str, Any]] = [{"category": "math"}, {"category": "coding", "emitted": 35, "prompt_tokens": 50}]
    nothing = dict.fromkeys((*COUNTS, "emitted"), 0) | {"category": "math", "ttft_s": None, "tpot_s": None}
    records = [made(rows), made(rows, 2), made([nothing], name="baseline")]
    (headings, *found) = cells(categories(records))
    assert headings[2:7] == ["category", "requests", "input tokens", "output tokens", "accept length (95% interval)"]
    assert found == [
        ["4", "v1", "math", "2", "30", "20", "2.000", "0.250", "250.0", "10.00"],
        ["4", "v1", "coding", "2", "50", "20", "3.500", "0.250", "250.0", "10.00"],
        ["4", "baseline", "math", "1", "30", "10", "-", "-", "-", "-"],
    ]
    assert categories(records) in text_of(records)
    assert categories([made([{}])]) == ""


def test_change_by_turn_is_of_the_conversations_that_have_it() -> None:
    """Two of 14 conversations end after the first turn. The others lose 0.2 or 0.3 tokens."""
    first = [{"turn": 1, "emitted": 20 + index} for index in range(14)]
    second = [{"turn": 2, "emitted": 18 + index - index % 2, "prompt_tokens": 90} for index in range(12)]
    rows = cells(categories([made(first + second, prompts=14), made(first + second, 2, prompts=14)]))
    assert rows[0][-2:] == ["change from turn 1 (95% interval)", "detectable (80% power)"]
    assert rows[1][2:5] + rows[1][-2:] == ["1", "28", "30", "-", "-"]
    assert rows[2][2:5] == ["2", "24", "90"]
    change, _, interval = rows[2][-2].partition(" ")
    assert (change, interval) == ("-0.250", "(-0.28 to -0.22)")
    assert 0.03 < float(rows[2][-1]) < 0.05


def test_three_turns_and_more_have_short_tables() -> None:
    rows = [{"turn": turn, "emitted": 20 + turn, "tpot_s": turn / 1000} for turn in (1, 2, 3) for _ in range(2)]
    short = cells(categories([made(rows, prompts=6)]).rpartition("\n\n|")[0])
    assert short == [
        ["requests", "config", "1", "2", "3"],
        ["4", "v1", "2.100", "2.200", "2.300"],
        ["requests", "config", "1", "2", "3"],
        ["4", "v1", "1.00", "2.00", "3.00"],
    ]
    assert "By turn" not in categories([made(rows[:4], prompts=4)]), "two turns are short enough"
