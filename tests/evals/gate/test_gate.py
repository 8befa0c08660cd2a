"""The gate: verdicts of rules, requirements of every run, and its files."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from made_runs import make_record, make_report, metrics_of
from scipy import stats
from swept import saved

from specbatch.config.engine_config import EngineConfig, Graphs
from specbatch.config.speculation import Speculation
from specbatch.errors import SpecbatchError
from specbatch.evals.gate.checks import Check, Level, PendingCheck, judged
from specbatch.evals.gate.gate import GateResult, run_gate
from specbatch.evals.gate.report import junit, markdown, save
from specbatch.evals.report import EvalReport
from specbatch.records.archive import pack
from specbatch.records.mcnemar import Changes, changes, detectable_drop
from specbatch.sweeps.report.compare import compare

RULES = '[accuracy]\nfilter = "loose"\n'


@pytest.fixture
def put(tmp_path: Path) -> Any:
    def write(name: str, report: EvalReport) -> Path:
        (tmp_path / name).mkdir(parents=True)
        report.save(tmp_path / name)
        return tmp_path / name

    return write


def check(result: GateResult, name: str) -> Any:
    (found,) = (item for item in result.checks if item.name == name)
    return found


# Accuracy


@pytest.mark.parametrize(
    ("lost", "gained", "passed"),
    [(4, 0, True), (5, 0, False), (0, 20, True), (7, 1, False), (6, 1, True), (9, 3, True), (10, 3, False)],
)
def test_accuracy_must_not_fall(put, policy, lost, gained, passed):
    before = "1" * 20 + "0" * 20
    after = "0" * lost + "1" * (20 - lost) + "1" * gained + "0" * (20 - gained)
    result = run_gate(policy(RULES), put("new", make_report(after)), put("old", make_report(before)))
    p = stats.binomtest(lost, lost + gained, alternative="greater").pvalue
    found = check(result, "accuracy loose match has not fallen")
    assert found.passed == passed == (p >= 0.05)
    (test,) = result.tests
    assert (test.lost, test.gained) == (list(range(lost)), list(range(20, 20 + gained)))
    assert (test.questions, test.before, test.p_value) == (40, 0.5, pytest.approx(p))
    assert test.after == (20 - lost + gained) / 40
    assert test.detectable_drop == detectable_drop(40, (lost + gained) / 80, alpha=0.05, power=0.8)
    assert result.passed == passed
    assert f"p = {p:.4f}" in markdown(result)


def test_alpha_comes_from_the_policy(put, policy):
    old, new = put("old", make_report("1" * 20)), put("new", make_report("0" * 5 + "1" * 15))
    for name in ("requests.jsonl", "summary.md", "summary.csv"):
        (old / name).unlink()  # the documentation does not commit these
    result = run_gate(policy(RULES + "alpha = 0.03125"), new, old)
    assert (result.passed, result.tests[0].p_value) == (True, 0.03125), "p may equal alpha"
    assert not run_gate(policy(RULES + "alpha = 0.0313"), new, old).passed


def test_rule_names_its_filter(put, policy):
    old, new = put("old", make_report("1" * 20)), put("new", make_report("0" * 9 + "1" * 11))
    assert not run_gate(policy(RULES), new, old).passed
    assert run_gate(policy('[accuracy]\nfilter = "strict"'), new, old).passed
    for text in ("[accuracy]", '[accuracy]\nmetric = "match"', '[accuracy]\nfilter = "flexible"'):
        with pytest.raises(SpecbatchError, match='sums has filter = "loose", metric = "match"; filter = "strict"'):
            run_gate(policy(text), new, old)


def test_floor_unparsed_and_sensitivity(put, policy):
    old, new = put("old", make_report("1100" * 5)), put("new", make_report("1100" * 5, unparsed=0.05))
    result = run_gate(policy(RULES + "at_least = 0.5\ndetects = 0.34"), new, old)
    assert {item.name for item in result.failed} == {"unparsed loose", "smallest detectable drop"}
    assert result.tests[0].detectable_drop == 0.35  # seven of twenty
    assert run_gate(policy(RULES + "unparsed_at_most = 0.05\ndetects = 0.35"), new, old).passed
    result = run_gate(policy(RULES + "at_least = 0.51\nunparsed_at_most = 1"), new, old)
    assert [item.name for item in result.failed] == ["accuracy loose match"]
    tiny = run_gate(policy(RULES), put("four", make_report("1110")), put("vier", make_report("1110")))
    assert "With so few questions no drop can be detected" in markdown(tiny)
    tiny = run_gate(policy(RULES + "detects = 1"), tiny.run, tiny.baseline)
    assert check(tiny, "smallest detectable drop").found == "none"
    assert not tiny.passed


def test_without_a_test_no_baseline_is_needed(put, policy):
    new = put("new", make_report("1100"))
    rules = policy(RULES + "may_fall = true\nat_least = 0.5")
    assert run_gate(rules, new).passed
    assert run_gate(rules, new).tests == []
    with pytest.raises(SpecbatchError, match="no rule of the policy compares"):
        run_gate(rules, new, new)
    with pytest.raises(
        SpecbatchError, match=r"policy=.*may_fall = false in \[accuracy\], the default, compares with a baseline"
    ):
        run_gate(policy(RULES), new)


def test_questions_pair_by_number_and_prompt(put, policy):
    old, new = make_report("1100"), make_report("1100")
    new.questions[1:3] = reversed(new.questions[1:3])  # the order of the file is ignored
    assert run_gate(policy(RULES), put("new", new), put("old", old)).tests[0].lost == []
    for number, spoil in enumerate([lambda rows: rows[2].update(prompt_hash="x"), lambda rows: rows.pop(2)]):
        other = make_report("1100")
        spoil(other.questions)
        with pytest.raises(SpecbatchError, match="prompt of question 2 differs"):
            changes(old, other, "loose", "match")
        with pytest.raises(SpecbatchError, match=r"prompt of question 2 differs or is missing in one run$"):
            run_gate(policy(RULES), put(f"other {number}", other), put(f"again {number}", old))


def test_runs_without_a_verdict_are_refused(put, policy, tmp_path):
    old = put("old", make_report("1100"))
    for name, report, message in (
        ("task", make_report("1100", task="gsm8k"), "task sums and gsm8k"),
        ("prompts", make_report("1100", prompts_sha256="other"), "prompts_sha256 same and other"),
        ("model", make_report("1100", config=EngineConfig("toy")), "model smollm2-135m and toy"),
        ("simulated", make_report("1100", config=EngineConfig(
            speculation=Speculation("ngram", simulate_accept_length=2.0))), "acceptance was simulated"),
    ):  # fmt: skip
        with pytest.raises(SpecbatchError, match=message):
            run_gate(policy(RULES), put(name, report), old)
    for rules in (RULES, "[answers]\nequal = true\n"):
        with pytest.raises(SpecbatchError, match=r"^baseline=.*acceptance was simulated"):
            run_gate(policy(rules), old, tmp_path / "simulated")
    loss = make_report("1100")
    loss.scores[0] = replace(loss.scores[0], better="lower")
    loss.record.workload |= loss.settings()
    with pytest.raises(SpecbatchError, match=r"lower is better; \[accuracy\] needs a metric for which"):
        run_gate(policy(RULES), put("loss", loss), old)
    graded = make_report("1100")
    graded.questions[0]["scores"]["loose"]["match"] = 0.4
    with pytest.raises(SpecbatchError, match="is not 0 or 1 for every question"):
        run_gate(policy(RULES), put("graded", graded), old)
    bare = put("bare", make_report("1100"))
    (bare / "questions.jsonl").unlink()
    with pytest.raises(SpecbatchError, match="holds no answers"):
        run_gate(policy(RULES), bare, old)
    (bare / "questions.jsonl").write_text("{")
    with pytest.raises(SpecbatchError, match=r"questions\.jsonl:1': is not JSON"):
        run_gate(policy(RULES), bare, old)
    (tmp_path / "two").mkdir()
    put("two/1", make_report("1100"))
    put("two/2", make_report("1100"))
    with pytest.raises(SpecbatchError, match="holds 2 runs, and the rules"):
        run_gate(policy(RULES), tmp_path / "two", old)


# Bounds


@pytest.mark.parametrize(
    ("rule", "passed"),
    [
        ("accept_length = {at_least = 2.0}", True),
        ("accept_length = {at_least = 2.001}", False),
        ("mean_ttft_s = {at_most = 0.1}", True),
        ("mean_ttft_s = {at_most = 0.099}", False),
        ("output_throughput = {at_least = 220}", True),
        ("output_throughput = {at_least = 221}", False),
        ("device_idle_share = {at_most = 1}", False),  # not measured
    ],
)
def test_absolute_bounds(put, policy, rule, passed):
    result = run_gate(policy(f"[bounds]\n{rule}"), put("new", make_report("1" * 40)))
    assert result.passed == passed


@pytest.mark.parametrize(
    ("metric", "old", "new", "share", "passed"),
    [
        ("accept_length", 2.0, 1.9, 0.05, True),
        ("accept_length", 2.0, 1.89, 0.05, False),
        ("accept_length", 2.0, 9.0, 0.0, True),
        ("p99_ttft_s", 0.5, 0.55, 0.1, True),
        ("p99_ttft_s", 0.5, 0.56, 0.1, False),
        ("p99_ttft_s", 0.5, 0.01, 0.0, True),
        ("mean_tpot_s", 0.02, 0.02, 0.0, True),
        ("output_throughput", 100.0, 94.9, 0.05, False),
        ("output_throughput", None, 94.9, 0.05, False),
        ("output_throughput", 100.0, None, 0.05, False),
    ],
)
def test_bounds_relative_to_the_baseline(put, policy, metric, old, new, share, passed):
    before, after = make_report("1100"), make_report("1100")
    before.record.metrics[metric], after.record.metrics[metric] = old, new
    rules = policy(f"[bounds]\n{metric} = {{worsens_at_most = {share}}}")
    found = check(run_gate(rules, put("new", after), put("old", before)), f"{metric} against the baseline")
    assert found.passed == passed


@pytest.mark.parametrize(
    ("speeds", "share", "passed", "verdict", "shown"),
    [
        ((97.0, 100.0, 91.0), 0.0, None, "undecided", "96 (0.85-1.08 of the baseline's, undecided)"),
        ((97.4, 97.6, 98.2), 0.02, None, "loses", "97.7333 (0.97-0.99 of the baseline's, loses; undecided about 0.98)"),
        ((98.4, 97.6, 98.2), 0.02, True, "loses", "98.0667 (0.97-0.99 of the baseline's, loses)"),
        ((90.0, 90.1, 89.9), 0.2, True, "loses", "90 (0.90-0.90 of the baseline's, loses)"),
        ((90.0, 90.1, 89.9), 0.02, False, "loses", "90 (0.90-0.90 of the baseline's, loses)"),
        ((110.0, 110.2, 109.9), 0.0, True, "pays", "110.033 (1.10-1.10 of the baseline's, pays)"),
        ((97.0,), 0.02, False, "one repeat", "97 (one repeat)"),
    ],
)
def test_relative_bounds_have_the_verdict_of_compare(tmp_path, policy, speeds, share, passed, verdict, shown):
    """A value beyond a bound that the interval cannot tell it from is no verdict; with one repeat the value decides."""
    for name, values in (("old", [100.0, 100.2, 99.8][: len(speeds)]), ("new", speeds)):
        records = [make_record([metrics_of()] * 4, concurrency=4, repeat=n) for n in range(1, len(values) + 1)]
        for record, value in zip(records, values, strict=True):
            record.metrics["output_throughput"] = value
        saved(tmp_path / name, *records)
    rules = policy(f"[bounds]\noutput_throughput = {{worsens_at_most = {share}}}")
    result = run_gate(rules, tmp_path / "new", tmp_path / "old")
    item = check(result, "output_throughput against the baseline")
    assert (item.passed, item.found) == (passed, shown)
    (row,) = [row for row in compare(tmp_path / "old", tmp_path / "new").rows if row.metric == "output_throughput"]
    assert row.verdict == verdict


def points(folder: Path, *speeds: tuple[float, ...], created: str = "2030-01-01T00:00:00+00:00") -> Path:
    """Points v1, v2, ... with these throughputs, one per repeat."""
    for number, values in enumerate(speeds, 1):
        for repeat, value in enumerate(values, 1):
            made = make_record([metrics_of()] * 4, configuration=f"v{number}", repeat=repeat, created=created)
            made.metrics["output_throughput"] = value
            saved(folder, made)
    return folder


BOUND = "[bounds]\noutput_throughput = {worsens_at_most = 0.10}\n"


def test_a_clear_loss_of_two_repeats_is_no_verdict_and_names_the_repeats_that_would_be(tmp_path, policy):
    old, new = points(tmp_path / "old", (100.0, 106.0)), points(tmp_path / "new", (77.0, 86.0))
    result = run_gate(policy(BOUND), new, old)
    (item,) = result.undecided
    assert (result.passed, result.failed, result.exit_status) == (False, [], 2)
    assert (item.passed, item.verdict) == (None, "**undecided**")
    assert "2 repeats cannot tell that from noise: with such values about 4 repeats would" in item.detail
    many = points(tmp_path / "old3", (100.0, 106.0, 102.0)), points(tmp_path / "new3", (77.0, 86.0, 81.0))
    assert run_gate(policy(BOUND), *reversed(many)).exit_status == 1
    text = markdown(result)
    assert text.startswith("## specbatch gate: no verdict (1 of 2 checks undecided)\n")
    assert "about 4 repeats would" in text
    (suite,) = ElementTree.fromstring(junit(result))
    assert (suite.get("failures"), suite.get("errors")) == ("0", "1")
    assert [case[0].tag for case in suite if len(case)] == ["error"]
    assert result.as_dict()["undecided"] == 1


def test_no_number_of_repeats_is_named_where_the_ratio_keeps_the_bound(tmp_path, policy):
    """The mean is 11% lower, the geometric mean is not: more of these values would never fail."""
    old, new = points(tmp_path / "old", (60.0, 100.0, 140.0)), points(tmp_path / "new" / "x", (89.0, 88.0, 89.5))
    (item,) = run_gate(policy(BOUND), new, old).undecided
    assert item.detail == "worse than allowed, but 3 repeats cannot tell that from noise"


def test_a_value_within_the_bound_passes_whatever_the_noise(tmp_path, policy):
    old, new = points(tmp_path / "old", (100.0, 140.0)), points(tmp_path / "new", (150.0, 89.0))
    assert run_gate(policy(BOUND), new, old).passed


def test_alpha_is_that_of_all_points_and_metrics(tmp_path, policy):
    """p = 0.019 fails alone, not among six tests; a clear loss among them fails still."""
    slow, same = (86.7, 88.0, 85.9), (100.0, 101.0, 99.0)
    old = points(tmp_path / "old", *[same] * 6)
    one = run_gate(policy(BOUND), points(tmp_path / "one", slow) / "v1", points(tmp_path / "same", same) / "v1")
    assert [item.passed for item in one.checks] == [True, False]
    strict = run_gate(policy(f"alpha = 0.01\n{BOUND}"), tmp_path / "one" / "v1", tmp_path / "same" / "v1")
    assert [item.passed for item in strict.checks] == [True, None]
    six = run_gate(policy(BOUND), points(tmp_path / "six", slow, *[same] * 5), old)
    assert [(item.point, item.passed) for item in six.checks if item.passed is not True] == [("v1 concurrency 4", None)]
    clear = run_gate(policy(BOUND), points(tmp_path / "clear", (50.0, 50.1, 50.2), *[same] * 5), old)
    (item,) = clear.failed
    assert item.detail.endswith("after Holm's correction for 6 tests, alpha 0.05")


def test_accuracy_and_bounds_share_alpha(put, policy):
    """Five lost answers are p = 1/32 alone, and 1/16 with one other test."""
    before, after = make_report("1" * 20 + "0" * 20), make_report("0" * 5 + "1" * 15 + "0" * 20)
    old, new = put("old", before), put("new", after)
    assert not run_gate(policy(RULES), new, old).passed
    both = run_gate(policy(RULES + "[bounds]\naccept_length = {worsens_at_most = 0.1}"), new, old)
    assert both.passed
    (test,) = both.tests
    assert (test.p_value, test.adjusted_p_value, test.tests) == (1 / 32, 1 / 16, 2)
    assert test.detectable_drop == detectable_drop(40, 5 / 80, alpha=0.025, power=0.8)
    assert "p = 0.0312, 0.0625 for 2 tests (Holm), alpha 0.05." in test.text


def test_gates_without_a_change_fail_as_often_as_alpha_says():
    """300 gates of 6 points with 100 questions each, whose answers change by chance (without a correction 20% fail)."""
    draw, fails = np.random.default_rng(1), 0

    def as_check(level: Level) -> list[Check]:
        return [Check("", "", not level.rejects, "", "")]

    for _ in range(300):
        counts = draw.multinomial(100, [0.1, 0.1, 0.8], 6)
        found = [Changes(100, 50, tuple(range(lost)), tuple(range(gained))) for lost, gained, _ in counts.tolist()]
        tests = [PendingCheck(one.p_fallen(), as_check) for one in found]
        fails += not all(check.passed for check in judged([*tests], 0.05))
    assert 0 < fails / 300 <= 0.05


def test_a_verdict_on_runs_that_were_not_interleaved_is_marked(tmp_path, policy):
    old, same = points(tmp_path / "old", (100.0, 101.0, 99.0)), points(tmp_path / "same", (50.0, 51.0, 50.5))
    late = points(tmp_path / "late", (50.0, 51.0, 50.5), created="2030-01-02T00:00:00+00:00")
    (item,) = run_gate(policy(BOUND), late, old).failed
    assert "of the baseline's, not interleaved)" in item.found
    assert item.detail.startswith("not interleaved: the runs of one side came before those of the other")
    (item,) = run_gate(policy(BOUND), same, old).failed
    assert "interleaved" not in item.found + item.detail


def test_rates_of_other_drafts_are_refused(tmp_path, policy):
    old, new = points(tmp_path / "old", (100.0,)), tmp_path / "new"
    made = make_record([metrics_of()] * 4, config=EngineConfig(speculation=Speculation("standalone", draft="x/y")))
    saved(new, made)
    rule = policy("[bounds]\naccept_rate = {worsens_at_most = 0.1}")
    with pytest.raises(SpecbatchError, match=r"worsens_at_most of accept_rate.*use accept_length"):
        run_gate(rule, new, old)
    assert run_gate(policy("[bounds]\naccept_length = {worsens_at_most = 0.1}"), new, old).passed


def test_undecided_prompts_are_counted(tmp_path, policy):
    """A lower accept length of 12 prompts that vary a lot."""
    folders = []
    for name, emitted in (("old", range(14, 38, 2)), ("new", range(12, 36, 2))):
        rows = [metrics_of(emitted=count) for count in (emitted if name == "old" else reversed(emitted))]
        folders.append(saved(tmp_path / name, make_record(rows)))
    (item,) = run_gate(policy("[bounds]\naccept_length = {worsens_at_most = 0}"), *reversed(folders)).undecided
    assert re.search(r"12 prompts cannot tell that from noise: with such values about \d+ prompts would", item.detail)


def test_times_of_another_device_are_refused(put, policy):
    new = make_report("1100")
    new.record.hardware["cpu"] = "slide rule"
    old, after = put("old", make_report("1100")), put("new", new)
    with pytest.raises(SpecbatchError, match="mean_ttft_s compares on one device only; measure the baseline on slide"):
        run_gate(policy("[bounds]\nmean_ttft_s = {worsens_at_most = 0.5}"), after, old)
    assert run_gate(
        policy("[bounds]\naccept_length = {worsens_at_most = 0.5}\nmean_ttft_s = {at_most = 9}"), after, old
    ).passed


# Requirements of every run


def replays(report: EvalReport, **counts: int) -> EvalReport:
    report.record.config["graphs"] = asdict(Graphs(decode="whole", prefill="piecewise"))
    graphs = {name: {"replays": count, "fallbacks": {}, "padded": 0} for name, count in counts.items()}
    report.record.counters["graphs"] = graphs
    return report


def test_requested_graphs_must_be_replayed(put, policy):
    rules = policy("[bounds]\naccept_length = {at_least = 1}")
    good = replays(make_report("1100"), decode=7, target_prefill=1, draft_prefill=2)
    assert run_gate(rules, put("good", good)).passed
    bad = replays(make_report("1100"), decode=7, target_prefill=0, draft_prefill=2)
    assert [item.name for item in run_gate(rules, put("bad", bad)).failed] == ["target prefill graphs replayed"]
    none = replays(make_report("1100"))
    assert [item.name for item in run_gate(rules, put("none", none)).failed] == [
        "decode graphs replayed", "prefill graphs replayed",
    ]  # fmt: skip
    for name, counts in (("first", (0, 7)), ("second", (7, 0))):  # one of two repeats without a replay
        for repeat, count in enumerate(counts, 1):
            made = replays(make_report("1100"), decode=count, target_prefill=1, draft_prefill=1)
            folder = put(f"{name}/{repeat}", made).parent
        found = [(item.name, item.found) for item in run_gate(rules, folder).failed]
        assert found == [("decode graphs replayed", "0")]
    off = run_gate(rules, put("off", make_report("1100")))
    assert [item.name for item in off.checks] == ["requests finished", "accept_length"]


def test_archives_are_read_like_folders(put, policy, tmp_path):
    old, worse = put("old", make_report("1" * 20 + "0" * 20)), put("worse", make_report("0" * 10 + "1" * 10 + "0" * 20))
    packed = [tmp_path / f"{folder.name}.tar.xz" for folder in (old, worse)]
    for folder, archive in zip((old, worse), packed, strict=True):
        pack(folder, archive)
    for rules in (RULES, "[answers]\nequal = true\n"):
        if rules != RULES:
            for folder in (old, worse):
                rows = [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()]
                rows = [row | {"token_ids": [int(row["scores"]["loose"]["match"])]} for row in rows]
                (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
                pack(folder, tmp_path / f"{folder.name}.tar.xz")
        for before, after in product(
            (old, packed[0]), ((old, True), (packed[0], True), (worse, False), (packed[1], False))
        ):
            assert run_gate(policy(rules), after[0], before).passed == after[1]


def test_folders_inside_an_archive(tmp_path, policy):
    for name, right in (("v1", "1" * 20), ("v2", "0" * 9 + "1" * 11)):
        report = make_report(right, configuration=name, concurrency=4, repeat=1, place=0)
        (tmp_path / "grid" / name / "c4/r1").mkdir(parents=True)
        report.save(tmp_path / "grid" / name / "c4/r1")
    pack(tmp_path / "grid", archive := tmp_path / "records.tar.xz")
    assert run_gate(policy(RULES), archive, archive).passed
    assert not run_gate(policy(RULES), archive / "v2", archive / "v1").passed
    assert run_gate(policy(RULES), archive / "v1", tmp_path / "grid/v2").passed


def test_an_archive_of_an_interrupted_sweep_fails(tmp_path, policy):
    run = saved(tmp_path / "run", make_record([metrics_of()] * 4))
    plan = {"configurations": {"v1": {}, "v2": {}}, "concurrency": [4], "repeats": 1}
    (run / "sweep.json").write_text(json.dumps(plan))
    pack(run, tmp_path / "run.tar.xz")
    rules = policy("[bounds]\noutput_throughput = { at_least = 1 }")
    for path in (run, tmp_path / "run.tar.xz"):
        (found,) = run_gate(rules, path).failed
        assert (found.name, found.point, found.found) == ("measured", "v2 concurrency 4", "1 missing")


@pytest.mark.parametrize(
    ("detects", "detail"),
    [
        (0.05, "about 398 questions would detect a drop of 0.05"),
        (0.00001, "no number of questions would detect a drop of 1e-05"),
    ],
)
def test_questions_that_a_drop_needs(put, policy, detects, detail):
    old, new = put("old", make_report("1" * 20 + "0" * 20)), put("new", make_report("1" * 18 + "0011" + "0" * 18))
    item = check(run_gate(policy(f"{RULES}detects = {detects}"), new, old), "smallest detectable drop")
    assert item.detail == f"{detail} if the same share of answers changes by chance"


def test_unfinished_requests_fail(put, policy):
    rules = policy("[bounds]\naccept_length = {at_least = 1}")
    report = make_report("1100")
    report.record.metrics["requests"] = 3
    result = run_gate(rules, put("new", report))
    assert [(item.name, item.found, item.allowed) for item in result.failed] == [("requests finished", "3", "all 4")]


def sweep(folder: Path, *concurrency: int, failed: Sequence[int] = ()) -> Path:
    records = [make_record([metrics_of()] * 4, concurrency=number) for number in concurrency]
    for record in records:
        if record.workload["concurrency"] in failed:
            record.metrics, record.caps, record.requests = {}, {}, []
            record.workload["error"] = "no memory"
    return saved(folder, *records)


def test_every_point_is_checked_and_none_may_be_missing(tmp_path, policy):
    rules = policy("[bounds]\naccept_length = {worsens_at_most = 0.1}")
    old, less, more = (sweep(tmp_path / name, *sizes) for name, sizes in (("a", (1, 4)), ("b", (4,)), ("c", (1, 4, 8))))
    assert {item.point for item in run_gate(rules, old, old).checks} == {"concurrency 1", "concurrency 4"}
    (missing,) = run_gate(rules, less, old).failed
    assert (missing.name, missing.point, missing.found) == ("measured", "concurrency 1", "missing")
    with pytest.raises(SpecbatchError, match="lacks concurrency 8"):
        run_gate(rules, more, old)
    broken = sweep(tmp_path / "d", 1, 4, failed=[4])
    result = run_gate(rules, broken, old)
    assert [(item.name, item.point) for item in result.failed] == [("measured", "concurrency 4")]
    assert "measured at concurrency 4: no memory" in markdown(result)


# Files


def test_interrupted_sweep_fails(tmp_path, policy):
    rules = policy("[bounds]\noutput_throughput = { at_least = 1 }")
    records = (
        make_record([metrics_of()] * 12, configuration=name, repeat=repeat)
        for name, repeat in (("v1", 1), ("v1", 2), ("v2", 1))
    )
    run = saved(tmp_path / "run", *records)
    plan = {"configurations": {"v1": {}, "v2": {}}, "concurrency": [4], "repeats": 2}
    (run / "sweep.json").write_text(json.dumps(plan))
    (found,) = run_gate(rules, run).failed
    assert (found.name, found.point, found.found) == ("measured", "v2 concurrency 4", "1 missing")
    assert "measured at v2 concurrency 4: interrupted or failed" in markdown(run_gate(rules, run))
    assert run_gate(rules, run / "v1").passed
    notes = compare(run / "v1", run / "v2").notes
    assert f"UNFINISHED: {run / 'v2'} v2 concurrency 4: its sweep was interrupted and lacks 1 of its repeats" in notes
    for text in ("{", "[]", "{}"):
        (run / "sweep.json").write_text(text)
        with pytest.raises(
            SpecbatchError, match=r"sweep\.json': (is not JSON|configurations is missing|use an object)"
        ):
            run_gate(rules, run)


def test_files(put, policy, tmp_path):
    old, new = put("old", make_report("1" * 30 + "0")), put("new", make_report("0" * 25 + "1" * 6))
    result = run_gate(policy(RULES + "at_least = 0.1\n[bounds]\nmean_ttft_s = {at_most = 0.05}"), new, old)
    (tmp_path / "out").mkdir()
    save(result, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["gate.json", "junit.xml", "summary.md"]

    text = (tmp_path / "out/summary.md").read_text()
    assert text.startswith("## specbatch gate: FAILED (2 of 5 checks)\n")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line]
    assert cells[0] == ["check", "run", "allowed", "baseline", "verdict"]
    assert ["mean_ttft_s", "0.1", "<= 0.05", "0.1", "**FAILED**"] in cells
    assert "Questions lost: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19 ...\n" in text
    assert "Questions gained: 30\n" in text
    assert "31 questions, 25 lost and 1 gained (0.9677 -> 0.1935); exact McNemar test, one-sided" in text

    suites = ElementTree.parse(tmp_path / "out/junit.xml").getroot()
    (suite,) = suites
    counts = {"tests": "5", "failures": "2", "errors": "0"}
    assert suites.attrib == counts  # no others in the schema of Jenkins (junit-10.xsd)
    assert suite.attrib == {"name": "specbatch gate", **counts, "skipped": "0"}
    assert [case.get("name") for case in suite] == [item.name for item in result.checks]
    failures = {case.get("name"): case[0].get("message") for case in suite if len(case)}
    assert failures["mean_ttft_s"] == "0.1; allowed: <= 0.05; baseline: 0.1"

    body = json.loads((tmp_path / "out/gate.json").read_text())
    assert (body["schema"], body["passed"], body["run"], body["baseline"]) == (1, False, str(new), str(old))
    assert set(body["checks"][0]) == {"name", "point", "passed", "found", "allowed", "baseline", "detail"}
    assert body["accuracy"][0]["lost"] == list(range(25))


def test_odd_characters_survive(tmp_path, put, policy):
    result = run_gate(policy("[bounds]\naccept_length = {at_least = 1}"), sweep(tmp_path / "a", 1, failed=[1]))
    (item,) = result.checks
    object.__setattr__(item, "point", 'v1 | <"&\x00\x1b>')
    object.__setattr__(item, "detail", "\ud800 broken")
    (suite,) = ElementTree.fromstring(junit(result))
    assert suite[0].get("classname") == 'specbatch.gate.v1 | <"&??>'
    assert suite[0][0].text == "? broken"
    assert "v1 \\| <" in markdown(result)
