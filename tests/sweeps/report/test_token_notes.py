"""Notes about whether configurations generated the same answers."""

from __future__ import annotations

from sweep_tables import pair, record, simulated, text_of


def test_answers_that_differ_are_counted_for_each_configuration():
    """Tokens of engines of any algorithm, and texts where one side is a server."""
    records = [record(name, repeat, 10.0) for repeat in (1, 2) for name in ("baseline", "v1", "v2")]
    answers = {"baseline": "abc", "v1": "abX", "v2": "aYX"}
    for one in records:
        name = one.workload["configuration"]
        one.config |= {"server": "s"} if name == "v2" else {}
        kinds = ("text_digest",) if name == "v2" else ("text_digest", "token_digest")
        one.requests = [
            {"index": place, "finish_reason": "stop", **dict.fromkeys(kinds, answer)}
            for place, answer in enumerate(answers[name])
        ]
        one.workload["output_sha256"] = answers[name] + str("server" in one.config)
    assert (
        "TOKENS DIFFER: configurations generated other answers than baseline to the same greedy prompts: "
        "at concurrency 4 v1 (1 of 3), v2 (2 of 3) (expected only below FP32" in text_of(records)
    )
    for one in records:
        one.config["load_format"] = "dummy"  # the server's random weights are other ones
    assert "at concurrency 4 v1 (1 of 3) (expected" in text_of(records)


def test_simulated_output_is_not_compared():
    records = pair(output_sha256="other")
    simulated(records[1], 6.35)
    text = text_of(records)
    assert "TOKENS DIFFER" not in text
    assert "same output tokens" not in text
    assert "ngram without a match, --draft-tokens auto) accept fewer, so the mean reached" in text


def test_sampling_is_stated_and_may_change_tokens():
    records = pair(output_sha256="other")
    counts = {"drafted": [4], "tried": [4], "accepted": [2], "context": [[8, 4, 6]]}
    records[1].counters = {"acceptance": counts, "emitted_histogram": [0, 2, 2]}
    assert "Acceptance, greedy:\n\n| concurrency" in text_of(records)
    for made in records:
        made.workload["sampling"] = {"temperature": 0.6, "top_p": 0.95, "top_k": 0, "min_p": 0.0}
    text = text_of(records)
    assert "Acceptance, temperature 0.6, top-p 0.95:" in text
    assert "output exactly 4, temperature 0.6, top-p 0.95, seed 0" in text
    assert "TOKENS DIFFER" not in text
    assert "Configurations generated different tokens from the same seeds, with the same distribution" in text
