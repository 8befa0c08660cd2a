"""Advice from records: what is chosen, where speculation is switched off, the latency bound, and flags."""

from __future__ import annotations

from dataclasses import replace

import pytest
from swept import swept

from specbatch.config.engine_config import Speculation
from specbatch.records.run_record import RunRecord
from specbatch.sweeps.report.advice import accept_length_by_context, advice_json, advice_markdown, advise, headline
from specbatch.sweeps.report.engine_flags import flags_of

SPEEDS = {
    1: {"ngram 4": 1.5, "ngram 1": 1.2},
    8: {"ngram 4": 1.1, "ngram 1": 1.2},
    32: {"ngram 4": 0.7, "ngram 1": 1.0},
}
NOISE = (0.99, 1.0, 1.01)


def records(speeds=None, repeats: int = 3, share=None, **work) -> list[RunRecord]:
    """Repeats whose output tok/s are 100, times the speedup and noise that all of a round have. share: of requests that
    met the bound, by configuration."""
    found = []
    for size, ratios in (speeds or SPEEDS).items():
        for name, ratio in {"baseline": 1.0, **ratios}.items():
            for repeat in range(1, repeats + 1):
                one = swept(name, size, repeat, dataset="prompts.jsonl", **work)
                own = 1.0 if ratio == 1.0 and name == "baseline" else 1 + 0.004 * (-1) ** (repeat + ord(name[-1]))
                one.metrics["output_throughput"] = 100 * ratio * NOISE[repeat % 3] * own
                if share is not None:
                    one.metrics["slo_share"] = share.get(name, 1.0)
                    one.workload["slo"] = {"tpot_s": 0.03}
                found.append(one)
    return found


def test_the_fastest_is_chosen_where_it_pays_and_switched_off_where_it_does_not():
    advice = advise(records())
    assert advice.chosen == "ngram 4"
    assert advice.off_from == 32
    text = headline(advice)
    assert text.startswith("Use ngram 4: the baseline's tokens per second times 1.50 (")
    assert "Switch speculation off from concurrency 32 on" in text
    by_size = {one["concurrency"]: one for one in advice_json(advice)["points"] if one["configuration"] == "ngram 4"}
    assert [by_size[size]["pays"] for size in (1, 8, 32)] == [True, True, False]
    assert all(one["low"] < one["speedup"] < one["high"] for one in by_size.values())
    lines = advice_markdown(advice).splitlines()
    row = next(line for line in lines if line.startswith("| 32 "))
    assert "no speculation" in row
    assert "with ngram 1" in row, "the fastest of those that do not pay"


def test_nothing_is_advised_that_is_not_beyond_its_interval():
    advice = advise(records({1: {"ngram 4": 1.001}, 8: {"ngram 4": 0.9}}))
    assert (advice.chosen, advice.off_from) == (None, None)
    assert headline(advice) == ("Use no speculation at concurrency 1 and 8: none is shown to beat the baseline.")
    assert advice_json(advice)["flags"] == {}
    once = advise(records({1: {"ngram 4": 1.9}}, repeats=1))
    assert "one repeat does not show a speedup; use --repeats 3" in headline(once)


def test_more_candidates_need_more_evidence():
    """A speedup that is shown by itself is not among twenty: one in twenty intervals misses by chance."""
    ratios = {"ngram 4": 1.016}
    assert advise(records({1: ratios})).chosen == "ngram 4"
    many = {1: ratios | {f"other {n}": 1.001 for n in range(20)}}
    assert advise(records(many)).chosen is None


def test_only_what_meets_the_latency_bound_is_advised():
    late = advise(records(share={"ngram 4": 0.9}))
    assert late.chosen == "ngram 1"
    text = advice_markdown(late)
    assert "miss the bound: ngram 4" in text
    assert "Latency bound: TPOT up to 0.03 s, met by at least 95% of the requests." in text
    only = advise(records({1: {"ngram 4": 0.9}}, share={"baseline": 0.5}))
    assert only.chosen == "ngram 4", "slower, but the only one that meets the bound"
    assert "Nothing met" not in headline(late) + headline(only)
    none = advise(records({1: {"ngram 4": 1.5}}, share={"baseline": 0.5, "ngram 4": 0.6}))
    assert none.chosen is None
    assert headline(none).endswith("Nothing met the latency bound at concurrency 1.")


def test_candidates_that_are_as_good_are_named():
    advice = advise(records({1: {"ngram 4": 1.5, "ngram 1": 1.499}}))
    assert "not shown to be slower: ngram" in advice_markdown(advice)


def test_context_from_which_on_it_does_not_pay():
    """12 prompts, whose verifies emit 3 tokens up to 1,023 tokens of context and 1 beyond. Break-even is 2."""
    found = records({6: {"ngram 4": 1.5}})
    for record in found:
        if record.drafts:
            for place, row in enumerate(record.requests):
                few = [[512, 10, 30 + place % 3], [1024, 10, 10 + place % 2]]
                row["acceptance"] = {**row["acceptance"], "context": few}
            record.counters["acceptance"]["context"] = [[512, 120, 372], [1024, 120, 126]]
            record.metrics["accept_length"] = 3.0
            record.counters["steps_by_rows"] = {"6": [40, 0.96]}
    drafting = [record for record in found if record.drafts]
    (low, first, _), (high, second, spread) = accept_length_by_context(drafting)
    assert (low, high) == (512, 1024)
    assert (first, second) == (pytest.approx(3.1), pytest.approx(1.05))
    assert spread.low < 1.05 < spread.high
    advice = advise(found)
    assert advice.context is not None
    assert advice.context[0] == 1024
    assert "It does not pay after 1,024 tokens of context (accept length 1.05 (" in headline(advice)


def test_servers_are_told_the_accept_length_of_fewer_drafts():
    found = records({1: {"vllm": 1.5, "sglang": 1.2}})
    for record in found:
        if record.workload["configuration"] == "vllm":
            record.config["server"] = "server"
            record.counters["acceptance"] |= {"drafted": [10, 10], "tried": [10, 8], "accepted": [8, 4]}
        if record.workload["configuration"] == "sglang":
            record.config["server"] = "server"
            del record.counters["acceptance"]
            record.counters["server_acceptance"] = {"verifies": 10, "accepted": [5, 2]}
    text = advice_markdown(advise(found))
    rows = {line.split("|")[1].strip(): line.split("|")[2:4] for line in text.splitlines() if line.startswith("| ")}
    assert [cell.strip() for cell in rows["vllm"]] == ["1.80 2.20", ""]
    assert [cell.strip() for cell in rows["sglang"]] == ["1.50 1.70", "drafts after the end included"]


def test_random_prompts_are_warned_of():
    assert "RANDOM PROMPTS" not in advice_markdown(advise(records()))
    assert "RANDOM PROMPTS: the prompts are random ids" in advice_markdown(
        advise([replace(one, workload={**one.workload, "dataset": "random"}) for one in records()])
    )
    text = advice_markdown(advise(records(prompt_loss=11.0, random_prompt_loss=11.9)))
    assert "RANDOM PROMPTS: the prompts look like random ids: the model's loss on them is 11.0 nats per token" in text
    assert "RANDOM PROMPTS" not in advice_markdown(advise(records(prompt_loss=4.0, random_prompt_loss=11.9)))


@pytest.mark.parametrize(
    ("speculation", "vllm", "sglang"),
    [
        (
            Speculation("eagle3", draft="heads/x", draft_tokens=3),
            '{"method": "eagle3", "model": "heads/x", "num_speculative_tokens": 3, '
            '"num_speculative_tokens_per_batch_size": [[1, 31, 3], [32, 65536, 0]]}',
            "--speculative-algorithm EAGLE3 --speculative-draft-model-path heads/x --speculative-num-steps 3 "
            "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
        ),
        (
            Speculation("ngram", draft_tokens=4),
            '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4, '
            '"num_speculative_tokens_per_batch_size": [[1, 31, 4], [32, 65536, 0]]}',
            "--speculative-algorithm NGRAM --speculative-num-draft-tokens 5",
        ),
        (Speculation("dflash", draft="d", draft_tokens=7), '"dflash"', "DFLASH --speculative-draft-model-path d"),
        (Speculation("standalone", draft="self:skip=1-2"), "", ""),
        (Speculation("dflash2", draft="d"), "", ""),
        (Speculation("eagle3", draft="d", draft_steps=3, draft_topk=2, draft_tokens=6), "", ""),
    ],
)
def test_flags_of_other_engines(speculation, vllm, sglang):
    record = swept("v1")
    record.config["speculation"] = vars(speculation)
    found = flags_of(record, 32)
    assert found["specbatch"].command.startswith("specbatch generate ")
    for engine, expected in (("vLLM", vllm), ("SGLang", sglang)):
        assert expected in found[engine].command
        assert bool(found[engine].command) == bool(expected)
        assert expected or found[engine].remark
    assert "num_speculative_tokens_per_batch_size" not in flags_of(record, None)["vLLM"].command
