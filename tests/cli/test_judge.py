"""`specbatch compare` and `specbatch gate`: exit status, what is printed and written, and the workflow in the docs."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest

SMALL = ("--device", "cpu", "--input-len", 6, "--output-len", 5, "--prompts-per-concurrency", 12)
ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "ci-gate.md"


@pytest.fixture
def folder(run, tmp_path):
    """A sweep: out/baseline, out/v1, out/v2 at concurrency 1."""
    result = run("sweep", "--concurrency", "1", "--repeats", 2, "--output", tmp_path / "out", *SMALL)
    assert result.exit_code == 0, result.output
    return tmp_path / "out"


def policy(folder: Path, text: str) -> Path:
    path = folder.parent / "policy.toml"
    path.write_text(text)
    return path


def test_compare_prints_a_table_and_writes_three_files(run, folder, tmp_path):
    result = run("compare", folder / "baseline", folder / "v1", "--output", tmp_path / "new")
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["compare.json", "summary.csv", "summary.md"]
    assert result.stdout.rstrip() == (tmp_path / "new/summary.md").read_text().rstrip()
    assert "* differs: speculation.algorithm: none -> ngram" in result.stdout
    assert re.search(r"accept length *\| 1.000 *\| 2.000 *\| \+1.000 *\| \+100.0% *\|", result.stdout)
    (line,) = run("compare", folder / "baseline", folder / "v1", "--json").stdout.splitlines()
    assert json.loads(line) == json.loads((tmp_path / "new/compare.json").read_text())
    assert run("compare", folder / "baseline", folder / "v1", "--output", tmp_path / "new").exit_code == 2


def test_compare_of_a_run_with_itself_shows_no_difference(run, folder):
    rows = json.loads(run("compare", folder, folder, "--json").stdout)["rows"]
    assert {row["configuration"] for row in rows} == {"baseline", "v1", "v2"}
    assert {row["verdict"] for row in rows} == {"no difference shown"}


def test_compare_refuses_in_one_line(run, folder, tmp_path):
    other = tmp_path / "other"
    longer = (*SMALL, "--input-len", 7)
    run("sweep", "--concurrency", "1", "--configs", "v1", "--output", other, *longer)
    for words, said in (((folder, other), "input_len 6 and 7"), ((folder, tmp_path / "x"), "holds no record.json")):
        result = run("compare", *words)
        assert (result.exit_code, result.stdout) == (2, "")
        assert said in result.stderr
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1


@pytest.fixture
def resumed(run, engine, jsonl, tmp_path):
    """Of 12 prompts a whole job in a.jsonl, and one in b.jsonl that was cut short behind 5 and went on; with drafts."""
    prompts = [{"prompt_token_ids": [number]} for number in range(12)]

    def generate(name, *words):
        words = (*words, "--spec", "v1", "--temperature", 1)
        return run("generate", jsonl(*prompts), "-o", tmp_path / name, "--max-new-tokens", 5, *words)

    assert generate("a.jsonl").exit_code == 0
    engine.interrupt_after = 5
    assert generate("b.jsonl").exit_code == 130
    engine.interrupt_after = None
    assert generate("b.jsonl").exit_code == 0
    return tmp_path


def test_a_resumed_job_is_judged_by_all_its_prompts_and_not_by_its_times(run, resumed):
    out = resumed / "b.jsonl"
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    rows[2]["token_ids"][-1] += 1
    for row in rows[7:]:  # those of the first run
        row["accept_length"], row["verify_steps"] = 1.0, 4
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for before, after, side in (("a.jsonl", "b.jsonl", "after"), ("b.jsonl", "a.jsonl", "before")):
        body = json.loads(run("compare", resumed / before, resumed / after, "--json").stdout)
        found = {row["metric"]: row for row in body["rows"]}
        accept, throughput = found["accept length"], found["output tok/s"]
        assert accept[side] == pytest.approx(12 * 4 / (7 * 2 + 5 * 4))
        assert accept["over"] == "12 prompts, paired"
        assert accept["verdict"] == {"after": "regression", "before": "better"}[side]
        for metric, row in found.items():
            assert (row[side] is None) == (metric != "accept length")
        assert (throughput["verdict"], throughput["over"]) == ("not judged", "not measured")
        (said,) = (note for note in body["notes"] if note.startswith("RESUMED"))
        assert f"{out}: 5 of 12 answers come from earlier, interrupted runs" in said
        assert "ANSWERS: 11 of 12 have the same tokens; others by index: 2" in body["notes"]
        assert not any(note.startswith("INCOMPLETE") for note in body["notes"])
    whole = json.loads(run("compare", resumed / "a.jsonl", resumed / "a.jsonl", "--json").stdout)
    assert "ANSWERS: 12 of 12 have the same tokens" in whole["notes"]
    assert not any(note.startswith("RESUMED") for note in whole["notes"])
    assert all(row["after"] is not None for row in whole["rows"])


def test_a_gate_knows_no_times_of_a_resumed_job(run, resumed):
    rules = resumed / "policy.toml"
    rules.write_text("[bounds]\naccept_length = {at_least = 2.0}\noutput_throughput = {at_least = 0.1}")
    for name, status, passed in (("a.jsonl", 0, True), ("b.jsonl", 1, False)):
        result = run("gate", resumed / name, "--policy", rules, "--json")
        assert result.exit_code == status
        checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
        assert checks["requests finished"]["found"] == "12"
        assert checks["accept_length"]["passed"]
        assert checks["output_throughput"]["passed"] == passed
        assert ("5 of 12 answers come from earlier" in checks["output_throughput"]["detail"]) != passed


@pytest.mark.parametrize(("least", "status"), [(2.0, 0), (2.1, 1)])
def test_gate_exits_with_its_verdict(run, folder, tmp_path, least, status):
    rules = policy(folder, f"[bounds]\naccept_length = {{at_least = {least}, worsens_at_most = 0.1}}")
    words = ("gate", folder / "v1", "--policy", rules, "--baseline", folder / "v2")
    result = run(*words, "--output", tmp_path / "gate")
    assert result.exit_code == status, result.output
    assert result.stderr == ""
    assert result.stdout.rstrip() == (tmp_path / "gate/summary.md").read_text().rstrip()
    assert ("gate: passed (3 checks)" if status == 0 else "gate: FAILED (1 of 3 checks)") in result.stdout
    suites = ElementTree.parse(tmp_path / "gate/junit.xml").getroot()
    assert (suites.get("tests"), suites.get("failures")) == ("3", str(status))
    shown = run(*words, "--json")
    assert shown.exit_code == status
    assert json.loads(shown.stdout) == json.loads((tmp_path / "gate/gate.json").read_text())


@pytest.mark.parametrize(
    ("text", "more", "said"),
    [
        ("[bounds]\nspeed = {at_least = 1}", (), "no metric is called speed"),
        ("[accuracy]", ("--baseline", "out/v2"), "holds no answers of specbatch eval"),
        ("[accuracy]", (), "name its record with --baseline"),
        ("[bounds]\naccept_length = {at_least = 1}", ("--baseline", "out/v2"), "leave it out"),
        ("[bounds]\naccept_length = {worsens_at_most = 0}", ("--baseline", "nowhere"), "holds no record.json"),
    ],
)
def test_gate_without_a_verdict_exits_with_2_and_writes_nothing(run, folder, tmp_path, text, more, said):
    words = ("gate", "out/v1/c1/r1", "--policy", policy(folder, text), *more)
    result = run(*words, "--output", tmp_path / "gate")
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "gate").exists()


def test_gate_needs_a_policy(run, folder):
    assert run("gate", folder).exit_code == 2


def test_gate_of_graphs_that_never_ran(run, folder):
    for file in folder.glob("v1/*/*/record.json"):
        body = json.loads(file.read_text())
        body["config"]["graphs"]["decode"] = "whole"
        file.write_text(json.dumps(body))
    result = run("gate", folder / "v1", "--policy", policy(folder, "[bounds]\naccept_length = {at_least = 1}"))
    assert result.exit_code == 1
    assert re.search(r"decode graphs replayed *\| 0 *\| > 0 *\| - *\| \*\*FAILED\*\*", result.stdout)


def test_judging_loads_no_engine(run, folder):
    rules = policy(folder, "[bounds]\naccept_length = {at_least = 1}")
    lines = [["compare", str(folder), str(folder)], ["gate", str(folder), "--policy", str(rules)]]
    code = (
        "import sys; from specbatch.cli.app import app; from typer.testing import CliRunner;"
        f"results = [CliRunner().invoke(app, words) for words in {lines!r}];"
        "assert all(result.exit_code == 0 for result in results), [result.output for result in results];"
        "print([name for name in ('torch', 'transformers', 'lm_eval', 'datasets') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.stdout.strip() == "[]", result.stderr


# The docs


def blocks(language: str, page: Path = DOCS) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def test_the_policies_of_the_docs_are_policies(tmp_path):
    from specbatch.evals.gate.policy import load_policy

    found = [*blocks("toml"), *blocks("toml", ROOT / "README.md")]
    assert len(found) >= 2
    for text in found:
        (tmp_path / "policy.toml").write_text(text)
        load_policy(tmp_path / "policy.toml")


def test_the_workflow_of_the_docs_is_one_and_its_commands_are_ours():
    import yaml
    from typer.main import get_command

    from specbatch.cli.app import app

    (text,) = blocks("yaml")
    workflow = yaml.safe_load(text)
    (job,) = workflow["jobs"].values()
    lines = [line for step in job["steps"] for line in step.get("run", "").replace("\\\n", " ").splitlines()]
    ours = [shlex.split(line) for line in lines if line.strip().startswith("specbatch ")]
    assert {words[1] for words in ours} == {"models", "eval", "gate"}
    commands = get_command(app).commands
    for _, command, *words in ours:
        known = {name for parameter in commands[command].params for name in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known
    always = [step for step in job["steps"] if "GITHUB_STEP_SUMMARY" in step.get("run", "")]
    assert [step["if"] for step in always] == ["always()"]


def test_every_rule_and_metric_stands_in_the_docs():
    from specbatch.evals.gate.policy import Accuracy, Bound
    from specbatch.sweeps.compare import COMPARED

    text = DOCS.read_text()
    for name in (*Accuracy.model_fields, *Bound.model_fields, *COMPARED):
        assert f"`{name}`" in text, name


def test_the_dependencies_are_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"scipy", "pydantic"} <= {re.split("[<>=]", name)[0] for name in project["dependencies"]}
