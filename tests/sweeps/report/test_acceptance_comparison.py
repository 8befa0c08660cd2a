"""The same drafter in two engines: differences are found where there are some, and each cause that leaves a pattern is
named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from rival_servers import Rival, rival
from swept import saved, swept
from typer.testing import CliRunner

from specbatch.cli.app import app
from specbatch.core.completion import Completion, RequestMetrics
from specbatch.core.sampling_params import SamplingParams
from specbatch.errors import SpecbatchError
from specbatch.records.run_record import RunRecord
from specbatch.servers.engine import HttpEngine
from specbatch.servers.server import Server
from specbatch.servers.verifies import Drafting, Step, add_verifies
from specbatch.sweeps.report.acceptance_comparison import AcceptanceComparison, compare_engines

PROMPTS, TOKENS, DRAFTS = 24, 400, 3
Chance = Callable[[int, int], float]  # of draft j after so many tokens


def usual(draft: int, context: int) -> float:
    return (0.8, 0.7, 0.6)[draft]


def answer(
    index: int,
    chance: Chance,
    seed: str,
    *,
    steps: bool = True,
    spare: int = 0,
    tokens: int = TOKENS,
    after: float | None = None,
    prompt: int = 32,
) -> Completion:
    """An answer of so many tokens. spare: those at its end that are not drafted; after: the chance of later drafts."""
    random, left, found = Random(f"{seed} {index}"), tokens - 1, list[Step]()
    while left:
        right = 0
        while right < DRAFTS and random.random() < (
            chance(right, prompt + tokens - left) if after is None or right < left else after
        ):
            right += 1
        drafted = min(DRAFTS, max(left - 1 - spare, 0)) if spare else DRAFTS
        found.append(Step(drafted, min(right, drafted)))
        left -= min(1 + found[-1].accepted, left)
    metrics = RequestMetrics(prompt_tokens=prompt, output_tokens=tokens)
    right = [step.accepted for step in found]
    counts = tuple(right.count(place) for place in range(DRAFTS + 1))
    drafting = Drafting("SGLang", len(found), sum(right), DRAFTS * len(found), counts, tuple(found) if steps else ())
    add_verifies(metrics, drafting, max_tokens=tokens, ended_early=False)
    return Completion(index, [1], [], "", "length", metrics)


def record(name: str, chance: Chance = usual, *, texts: str = "same", prompts: str = "p", **how: Any) -> RunRecord:
    found = swept("v1", name=name, prompts_sha256=prompts, sampling=how.pop("sampling", None))
    found.config["speculation"] |= {"algorithm": how.pop("algorithm", "eagle3"), "draft": how.pop("draft", "org/head")}
    if name != "specbatch":
        found.config["server"] = f"server ({name}) at http://{name}, prompts as ids"
    seed = how.pop("seed", "drafts")
    count = how.pop("count", PROMPTS)
    lengths = how.pop("lengths", [32])
    done = [answer(index, chance, seed, prompt=lengths[index % len(lengths)], **how) for index in range(count)]
    found.requests = [one.as_row() | {"text_digest": f"{texts} {one.index}"} for one in done]
    found.metrics["verify_steps"] = sum(row["verify_steps"] for row in found.requests)
    return found


def compared(*records: RunRecord) -> AcceptanceComparison:
    return compare_engines([(Path(one.workload["name"]), one) for one in records])


def reasons(*records: RunRecord) -> list[str]:
    return next(iter(compared(*records).as_dict()["differences"].values()))["reasons"]


def lower(by: float, chance: Chance = usual) -> Chance:
    return lambda draft, context: by * chance(draft, context)


@pytest.mark.parametrize("seed", ["drafts", "others", "third", "fourth"])
@pytest.mark.parametrize("steps", [True, False])
def test_no_difference(seed: str, steps: bool) -> None:
    found = compared(record("specbatch"), record("sglang", seed=seed, steps=steps))
    assert found.notes[1] == "sglang and specbatch: no difference beyond chance."
    assert ("count also after the end" in found.notes[-1]) == (not steps)


CROSSED: Chance = lambda draft, context: (0.9, 0.25, 0.2)[draft]  # noqa: E731


def test_drafts_after_the_ends_of_short_answers_are_no_difference() -> None:
    """The same verifies, counted with and without them: they are hardly ever accepted."""
    how: dict[str, Any] = {"tokens": 9, "count": 200, "after": 0.0}
    assert reasons(record("specbatch", **how), record("sglang", steps=False, **how)) == ["no difference beyond chance"]


LATER: Chance = lambda draft, context: usual(draft, context) if draft == 0 else 0.5 * usual(draft, context)  # noqa: E731
GROWS: Chance = lambda draft, context: usual(draft, context) * (1 if context < 128 else 0.5)  # noqa: E731


@pytest.mark.parametrize(
    ("chance", "expected"),
    [
        (lower(0.6), "features of the target that are shifted"),
        (lower(0.05), "another mapping of the draft's reduced vocabulary"),
        (GROWS, "another rope theta or scaling"),
        (LATER, "the steps of the draft after its first one"),
    ],
)
@pytest.mark.parametrize("is_base", [False, True])
def test_patterns(chance: Chance, expected: str, is_base: bool) -> None:
    both = [record("specbatch"), record("vllm", chance, seed="others")]
    (text,) = reasons(*(reversed(both) if is_base else both))
    assert expected in text
    assert text.startswith("vllm")


@pytest.mark.parametrize("steps", [True, False])
@pytest.mark.parametrize("count", [24, 12])
def test_a_rope_theta_shows_in_prompts_of_many_lengths(steps: bool, count: int) -> None:
    """Few prompts in each power of two, and of a server that shows no steps the length of the prompt only: as vLLM and
    SGLang with a draft of another rope theta."""
    how: dict[str, Any] = {"lengths": (60, 110, 250, 400, 800, 1100, 1300), "tokens": 40, "count": count}
    falls: Chance = lambda draft, context: usual(draft, context) * (0.9 if context < 512 else 0.03)  # noqa: E731
    (text,) = reasons(record("specbatch", **how), record("vllm", falls, seed="others", steps=steps, **how))
    assert ("another rope theta or scaling" in text) == (count == 24), text


def test_what_cannot_be_told() -> None:
    assert "contexts are of one length" not in reasons(record("specbatch"), record("vllm", lower(0.6)))[0]
    sglang = record("sglang", lower(0.6), steps=False)
    (text,) = reasons(record("specbatch"), sglang)
    assert "contexts are of one length, so a rope theta is not excluded" in text
    for row in sglang.requests:
        row["untrimmed_histogram"] = []
    assert "differs; not explained by" in reasons(record("specbatch"), sglang)[0]
    few = [record(name, lower(factor)) for name, factor in (("specbatch", 1.0), ("vllm", 0.6))]
    for one in few:
        one.requests = one.requests[:9]
    assert reasons(*few) == ["not judged: fewer than 10 prompts"]


def test_small_differences_and_other_drafters_have_no_such_reason() -> None:
    (text,) = reasons(record("specbatch"), record("vllm", lower(0.97)))
    assert "which rounding in the draft may explain" in text
    texts = {
        algorithm: reasons(*(record(name, lower(by), algorithm=algorithm, draft=draft)
                             for name, by in (("specbatch", 1.0), ("vllm", 0.6))))[0]
        for algorithm, draft in (("ngram", None), ("standalone", "org/small"))
    }  # fmt: skip
    assert "other settings of the algorithm (ngram_max, ngram_min)" in texts["ngram"]
    assert "quantization or precision of the draft model" in texts["standalone"]


def test_fewer_drafts() -> None:
    (text,) = reasons(record("specbatch"), record("vllm", spare=2))
    assert (
        "tokens per verify, which are accepted as often, at most 2 verifies more for each of the equal answers" in text
    )
    assert text.startswith("vllm")
    # Without equal answers it cannot be seen where.
    (text,) = reasons(record("specbatch"), record("vllm", spare=2, texts="other"))
    assert text.endswith("which are accepted as often")


def test_prompts_sampling_answers_and_settings() -> None:
    assert reasons(record("specbatch"), record("vllm", prompts="q")) == [
        "other prompts: measure both with the same ones"
    ]
    warm = {"temperature": 0.7}
    found = reasons(record("specbatch", sampling=warm), record("vllm"))
    assert found == ["other sampling or lengths: sampling.temperature 0.7 and None"]
    both = [record("specbatch", sampling=warm), record("vllm", lower(0.6), sampling=warm)]
    assert "compare at temperature 0" in reasons(*both)[0]
    found = reasons(record("specbatch"), record("vllm", lower(0.6), texts="other"))
    assert found[0].endswith(", or the answers, of which 0 of 24 are the same")
    assert "features of the target" in found[0]
    longer = record("vllm", lower(0.6))
    longer.config["speculation"]["verification"] = "block"
    assert reasons(record("specbatch"), longer) == ["other settings: verification token and block"]


def test_only_equal_answers_are_compared_where_there_are_enough() -> None:
    vllm = record("vllm", lower(0.6))
    for row in vllm.requests[:12]:
        row["text_digest"] = "other"
    found = compared(record("specbatch"), vllm)
    assert found.notes[0] == "12 of 24 prompts, paired: those with the same answers."
    assert found.pairing.indices == tuple(range(12, 24))


def test_contexts_are_compared_over_prompts_whose_verifies_are_known_on_both_sides() -> None:
    """vLLM does not report verifies without drafts, so that answers with some have no contexts."""
    vllm = record("vllm")
    middle = sorted(row["accept_length"] for row in vllm.requests)[PROMPTS // 2]
    for row in vllm.requests:
        if row["accept_length"] < middle:
            row["acceptance"] |= {"verifies": [], "emitted": []}
    found = compared(record("specbatch"), vllm).differences[0]
    assert found.contexts
    assert all(change.before == change.after for change in found.contexts.values())


def test_accept_lengths_of_servers_that_count_more_verifies_are_not_judged() -> None:
    """As vLLM's counter of steps does, of which its answers do not show those without drafts."""
    vllm = record("vllm", lambda draft, context: 0.9 * usual(draft, context))
    vllm.metrics["verify_steps"] += 7
    text = "accept lengths are not judged: verifies without drafts are of no known request, 7 of vllm"
    assert reasons(record("specbatch", seed="others"), vllm)[0] == text
    assert reasons(record("specbatch"), vllm)[0] == text


def test_runs_of_one_engine_with_other_settings_are_refused() -> None:
    other = record("specbatch")
    other.config["speculation"]["draft_tokens"] = 2
    with pytest.raises(SpecbatchError, match=r"runs of specbatch with different settings \(draft_tokens 4 and 2\)"):
        compared(record("specbatch"), record("vllm"), other)
    other = record("specbatch")
    other.config["speculation"]["schedule"] = "v2"
    assert len(compared(record("specbatch"), record("vllm"), other).sides[0].records) == 2
    renamed = record("vllm")
    renamed.config["model"] = "served"
    assert "Assumed: smollm2-135m and served are the same model." in compared(record("specbatch"), renamed).notes


def test_a_position_with_more_accepted_drafts_is_no_reason_for_fewer() -> None:
    found = reasons(record("specbatch"), record("vllm", CROSSED, seed="others"))
    assert found[0].startswith("vllm accepts")
    assert "of draft 2 (where tried)" in found[0]


def test_servers_that_are_said_to_draft_and_report_nothing_are_refused() -> None:
    """A table of the other engine alone would look like an answer."""
    vllm = record("vllm")
    vllm.counters, vllm.metrics = {}, {"requests": PROMPTS}
    for row in vllm.requests:
        row |= {"verify_steps": 0, "emitted": 0, "acceptance": {}}
    with pytest.raises(SpecbatchError, match=r"vllm reports no verifies of single requests"):
        compared(record("specbatch"), vllm)


def test_other_drafters_are_refused() -> None:
    with pytest.raises(SpecbatchError, match=r"of different drafters; name runs of one drafter"):
        compared(record("specbatch"), record("vllm", draft="org/other"))
    found = compared(record("specbatch"), record("vllm", algorithm="none", draft=None))
    assert found.notes[-1] == "Assumed: vllm ran the same drafter; the records do not say which."


def test_command_compares_three_engines(tmp_path: Path) -> None:
    records = [record("specbatch"), record("vllm", lower(0.6)), record("sglang", steps=False)]
    folders = [str(saved(tmp_path / one.workload["name"], one)) for one in records]
    result = CliRunner().invoke(app, ["acceptance", *folders], env={"COLUMNS": "1000"})
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "Acceptance of eagle3 org/head in 3 engines, model smollm2-135m:" in text
    assert "| specbatch | vllm | difference (95% interval) | sglang | difference (95% interval) |" in text
    assert "* sglang and specbatch: no difference beyond chance." in text
    shown = json.loads(CliRunner().invoke(app, ["acceptance", *folders, "--json"]).stdout)
    assert shown["differences"]["vllm"]["accept_length"]["high"] < 0
    result = CliRunner().invoke(app, ["acceptance", *folders, "--output", str(tmp_path / "curve.json")])
    assert (result.exit_code, "takes runs of one engine" in result.output) == (2, True)


def test_servers_that_report_in_their_own_ways_are_the_same() -> None:
    """vLLM tells each verify, SGLang a histogram of each request, llama.cpp what each chunk has."""
    records = []
    for kind in ("vllm", "sglang", "llamacpp"):
        how = {"of_requests": "detailed"} if kind == "vllm" else {}
        with rival(Rival(kind, ((3, 2), (3, 0), (3, 3)), **how)) as address:
            engine = HttpEngine(Server(address, model="org/toy"), tokenizer=False)
            engine.reset_record()
            params = [SamplingParams(max_new_tokens=40 + index) for index in range(12)]
            engine.generate([[1, 2, 3]] * 12, params, concurrency=4)
            records.append((Path(kind), engine.record()))
    found = compare_engines(records)
    assert [one.label for one in found.sides] == ["vllm", "sglang", "llamacpp"]
    assert [reasons for one in found.as_dict()["differences"].values() for reasons in one["reasons"]] == [
        "no difference beyond chance"
    ] * 2
    vllm, sglang = (
        change for change in (found.differences[0].positions[0].before, found.differences[0].positions[0].after)
    )
    assert vllm == pytest.approx(sglang, abs=0.05)
