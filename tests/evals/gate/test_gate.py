"""The gate: verdicts of rules, requirements of every run, and its files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from made_runs import make_record, make_report, metrics_of
from scipy import stats
from swept import saved

from specbatch.config import EngineConfig, Graphs, Speculation
from specbatch.errors import SpecbatchError
from specbatch.evals.gate.gate import GateResult, run_gate
from specbatch.evals.gate.report import junit, markdown, save
from specbatch.evals.report import EvalReport
from specbatch.records.mcnemar import changes, detectable_drop
from specbatch.sweeps.compare import compare

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
        with pytest.raises(SpecbatchError, match="cannot be paired: question 2 and 0 more"):
            changes(old, other, "loose", "match")
        with pytest.raises(SpecbatchError, match="cannot be paired: question 2"):
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
        ((97.0, 100.0, 91.0), 0.0, True, "undecided", "96 (0.85-1.08 of the baseline's, undecided)"),
        ((97.4, 97.6, 98.2), 0.02, True, "loses", "97.7333 (0.97-0.99 of the baseline's, loses; undecided about 0.98)"),
        ((90.0, 90.1, 89.9), 0.2, True, "loses", "90 (0.90-0.90 of the baseline's, loses)"),
        ((90.0, 90.1, 89.9), 0.02, False, "loses", "90 (0.90-0.90 of the baseline's, loses)"),
        ((110.0, 110.2, 109.9), 0.0, True, "pays", "110.033 (1.10-1.10 of the baseline's, pays)"),
        ((97.0,), 0.02, False, "one repeat", "97 (one repeat)"),
    ],
)
def test_relative_bounds_have_the_verdict_of_compare(tmp_path, policy, speeds, share, passed, verdict, shown):
    """A change that the interval cannot tell from the bound does not fail; with one repeat the value decides."""
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
