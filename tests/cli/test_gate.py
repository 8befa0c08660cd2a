"""`specbatch gate`: exit status, what is printed and written, and the policies and workflow in the docs."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "ci-gate.md"


def policy(folder: Path, text: str) -> Path:
    path = folder.parent / "policy.toml"
    path.write_text(text)
    return path


def test_times_of_a_resumed_job_fail(run, resumed):
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
def test_exit_status(run, swept, tmp_path, least, status):
    rules = policy(swept, f"[bounds]\naccept_length = {{at_least = {least}, worsens_at_most = 0.1}}")
    words = ("gate", swept / "v1", "--policy", rules, "--baseline", swept / "v2")
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
    ("text", "more", "message"),
    [
        ("[bounds]\nspeed = {at_least = 1}", (), "no such metric: speed"),
        ("[accuracy]", ("--baseline", "out/v2"), "holds no answers of specbatch eval"),
        ("[bounds]\naccept_length = {worsens_at_most = 0}", ("--baseline", "nowhere"), "no such file or folder"),
    ],
)
def test_without_a_verdict_the_exit_status_is_2_and_nothing_is_written(run, swept, tmp_path, text, more, message):
    words = ("gate", "out/v1/c1/r1", "--policy", policy(swept, text), *more)
    result = run(*words, "--output", tmp_path / "gate")
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "gate").exists()


def test_an_undecided_check_is_no_verdict_and_is_written(run, swept, tmp_path):
    for name, speeds in (("v1", (100.0, 106.0)), ("v2", (86.0, 77.0))):
        for repeat, speed in enumerate(speeds, 1):
            path = swept / name / f"c1/r{repeat}/record.json"
            record = json.loads(path.read_text())
            record["metrics"]["output_throughput"] = speed
            path.write_text(json.dumps(record))
    rules = policy(swept, "[bounds]\noutput_throughput = {worsens_at_most = 0.1}")
    words = ("gate", swept / "v2", "--policy", rules, "--baseline", swept / "v1", "--output", tmp_path / "gate")
    result = run(*words)
    assert (result.exit_code, result.stderr) == (2, "")
    assert "gate: no verdict (1 of 2 checks undecided)" in result.stdout
    assert "2 repeats cannot tell that from noise: with such values about" in " ".join(result.stdout.split())
    found = json.loads((tmp_path / "gate/gate.json").read_text())
    assert ([check["passed"] for check in found["checks"]], found["undecided"]) == ([True, None], 1)


# The docs


def blocks(language: str, page: Path = DOCS) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def test_policies_in_the_docs_are_valid(tmp_path):
    from specbatch.evals.gate.policy import load_policy

    found = [*blocks("toml"), *blocks("toml", ROOT / "README.md")]
    assert len(found) >= 2
    for text in found:
        (tmp_path / "policy.toml").write_text(text)
        load_policy(tmp_path / "policy.toml")


def test_workflow_in_the_docs_is_valid():
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


def test_every_rule_and_metric_is_documented():
    from specbatch.evals.gate.policy import Accuracy, Bound
    from specbatch.sweeps.report.compare import COMPARED

    text = DOCS.read_text()
    for name in (*Accuracy.model_fields, *Bound.model_fields, *COMPARED):
        assert f"`{name}`" in text, name


def test_dependencies_are_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["report"]]
    assert {"scipy", "pydantic"} <= {re.split("[<>=]", name)[0] for name in needed}
