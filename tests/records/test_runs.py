"""Runs on disk: their points, and refused folders and pairs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from made_runs import make_record, make_report, metrics_of
from swept import saved

from specbatch.config.engine_config import EngineConfig
from specbatch.config.speculation import Speculation
from specbatch.errors import SpecbatchError
from specbatch.jobs.output_files import read_output
from specbatch.records.answers import load_answers
from specbatch.records.runs import PointKey, load_run
from specbatch.sweeps.report.compare import compare


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts_sha256": "other"}, "prompts_sha256 same and other"),
        ({"prompts": 3}, "prompts 12 and 3"),
        ({"output_len": 9}, "output_len 4 and 9"),
        ({"command": "check"}, "command None and check"),
        ({"config": EngineConfig(model="toy")}, "model smollm2-135m and toy"),
        ({"config": EngineConfig(load_format="dummy")}, "load_format auto and dummy"),
    ],
)
def test_runs_of_different_models_or_workloads_are_refused(tmp_path, change, message):
    old = saved(tmp_path / "a", make_record([metrics_of()] * 12))
    new = saved(tmp_path / "b", make_record([metrics_of()] * 12, **change))
    with pytest.raises(SpecbatchError, match=message) as error:
        compare(old, new)
    assert "\n" not in str(error.value)
    assert "at v1" not in str(error.value)
    assert "concurrency 4" in str(error.value)


def test_nested_settings_that_differ_are_named(tmp_path):
    old, new = (
        make_record([metrics_of()], sampling={"temperature": 0.0, "max_new_tokens": count, "stop": []})
        for count in (16, 128)
    )
    with pytest.raises(
        SpecbatchError, match=r"differ at .*: sampling\.max_new_tokens 16 and 128; compare .* sampling$"
    ):
        compare(saved(tmp_path / "a", old), saved(tmp_path / "b", new))


def test_random_weights_of_another_seed_are_another_model(tmp_path):
    a, b = (make_record([metrics_of()], config=EngineConfig(load_format="dummy", seed=seed)) for seed in (1, 2))
    with pytest.raises(SpecbatchError, match="seed of the weights 1 and 2"):
        compare(saved(tmp_path / "a", a), saved(tmp_path / "b", b))
    a.config["load_format"] = b.config["load_format"] = "auto"
    assert compare(saved(tmp_path / "c", a), saved(tmp_path / "d", b)).differs["d"]["seed"] == ["1 -> 2"]


def test_runs_without_a_common_point_are_refused(tmp_path):
    old = saved(tmp_path / "a", make_record([metrics_of()], concurrency=1))
    new = saved(tmp_path / "b", make_record([metrics_of()], concurrency=2))
    with pytest.raises(SpecbatchError, match="no point in common: concurrency 1, and concurrency 2"):
        compare(old, new)


def test_folder_of_different_runs_is_refused(tmp_path):
    saved(tmp_path / "a", make_record([metrics_of()]))
    saved(tmp_path / "b", make_record([metrics_of()], config=EngineConfig(speculation=Speculation("ngram", "v2"))))
    with pytest.raises(SpecbatchError, match=r"speculation\.schedule v1 and v2"):
        load_run("before", tmp_path, read_output)
    saved(tmp_path / "c" / "1", make_record([metrics_of()]))
    saved(tmp_path / "c" / "2", make_record([metrics_of()], prompts_sha256="other"))
    with pytest.raises(SpecbatchError, match="prompts_sha256 same and other"):
        load_run("before", tmp_path / "c", read_output)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "use an object"),
        ("{}", "config is missing (8 more mistakes)"),
        ('{"schema": 2}', "has schema 2 and this version reads 1"),
    ],
)
def test_damaged_record_is_refused_in_one_line(tmp_path, text, message):
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(SpecbatchError, match=rf"^before='.*record\.json': {re.escape(message)}") as error:
        load_run("before", tmp_path, read_output)
    assert "\n" not in str(error.value)


def test_no_record_and_another_schema_are_refused(tmp_path):
    with pytest.raises(SpecbatchError, match=r"holds no record\.json"):
        load_run("before", tmp_path, read_output)
    with pytest.raises(SpecbatchError, match="no such file or folder"):
        load_run("before", tmp_path / "nowhere", read_output)
    record = make_record([metrics_of()])
    record.schema = 2
    with pytest.raises(SpecbatchError, match="schema 2 and this version reads 1"):
        load_run("before", saved(tmp_path, record), read_output)


def test_points_of_a_bench(tmp_path):
    for section in ("decode", "verify"):
        record = make_record([metrics_of()] * 10, section=section, concurrency=1, output_len=4)
        record.metrics["step_s"] = 0.004
        folder = tmp_path / section / "v1" / "c1" / "r1"
        folder.mkdir(parents=True)
        record.save(folder)
    (tmp_path / "machine.json").write_text("{}")
    found = [PointKey("decode", "v1", 1), PointKey("verify", "v1", 1)]
    assert list(load_run("before", tmp_path, read_output).points) == found
    row, _ = (row for row in compare(tmp_path, tmp_path).rows if row.metric == "step_s")
    assert (row.section, row.before) == ("decode", pytest.approx(0.004))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "record.json",
            {"metrics": {"requests": "4"}},
            r"record\.json': metrics\.requests=.4.: use a number; ",
        ),
        ("record.json", {"metrics": {"requests": -1}}, "metrics: requests should not be negative"),
        ("record.json", {"config": {}}, r"config\.model is missing"),
        ("record.json", {"counters": {"graphs": {"decode": {}}}}, r"counters\.graphs\.decode\.replays is missing"),
        ("record.json", {"counters": {"late_launches": -1}}, r"counters\.late_launches=-1: use at least 0"),
        ("record.json", {"counters": {"iterations": 2}}, "iteration_s should be given with iterations"),
        (
            "record.json",
            {"counters": {"device_steps": 2, "device_s": 1.0}},
            "device_idle_s should be given with device_steps",
        ),
        ("requests.jsonl", {"corpus_drafted": 1.5}, r"requests\.jsonl:1': corpus_drafted=1\.5: use a whole number"),
        ("requests.jsonl", {"e2e_s": -1.0}, r"requests\.jsonl:1': e2e_s=-1\.0: use at least 0"),
        ("requests.jsonl", {"index": True}, r"requests\.jsonl:1': index=true: use a whole number"),
        ("requests.jsonl", {"finish_reason": None}, "finish_reason should be given"),
        ("questions.jsonl", {"doc_id": []}, r"questions\.jsonl:1': doc_id=\[\]: use a whole number"),
        ("questions.jsonl", {"finish_reason": 3}, "finish_reason=3: use a string"),
    ],
)
def test_edited_file_is_refused_with_field_and_value(
    tmp_path: Path, name: str, change: dict[str, object], message: str
) -> None:
    make_report("1100").save(tmp_path)
    first, *others = (
        (tmp_path / name).read_text().split("\n") if name != "record.json" else [(tmp_path / name).read_text()]
    )
    (tmp_path / name).write_text("\n".join([json.dumps(json.loads(first) | change), *others]))
    with pytest.raises(SpecbatchError, match=message) as error:
        load_answers("before", tmp_path)
    assert str(error.value).endswith("; move it away or run it again")
