"""The lines above a table that describe its workload."""

from __future__ import annotations

from specbatch.sweeps.workload.heading import sources_text


def test_texts_are_counted_by_what_they_end_in() -> None:
    found = sources_text(["a/x.py", "b/z.py", "a/y/z.py", "c/z.py"])
    assert found == "4 prompts, by what they end in: a (2), b, c"
    assert sources_text(["question 730", "question 713"]) == "2 prompts, by what they end in: question (2)"
