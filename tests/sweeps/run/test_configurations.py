"""Configurations by name and by file, the points of a folder, and unfinished points."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import pytest

from specbatch.cli.configs import configured
from specbatch.cli.options import EngineOptions
from specbatch.config.engine_config import EngineConfig
from specbatch.config.speculation import Speculation
from specbatch.errors import SpecbatchError
from specbatch.records.run_record import RunRecord
from specbatch.records.sweep_plan import PLAN, Point, check_plan, plan_of, points, save, unfinished
from specbatch.servers.server import Server
from specbatch.sweeps.run.benchmark import SweepOptions
from specbatch.sweeps.run.configurations import by_model, named, read_grid
from specbatch.sweeps.workload.workloads import Workload

TOML = """
[baseline]
spec = "off"
[eagle]
algorithm = "eagle3"
draft = "head"
draft-tokens = [1, 3]
kv_dtype = ["auto", "fp8"]
"""
YAML = """
baseline: {spec: off}
eagle: {algorithm: eagle3, draft: head, draft-tokens: [1, 3], kv_dtype: [auto, fp8]}
"""
OPTIONS = SweepOptions((1, 2), 2, Workload(input_len=4, output_len=3))


@pytest.mark.parametrize(("suffix", "text"), [(".toml", TOML), (".yaml", YAML), (".yml", YAML)])
def test_lists_make_all_combinations(tmp_path: Path, suffix: str, text: str) -> None:
    path = tmp_path / f"grid{suffix}"
    path.write_text(text)
    found = read_grid(path)
    assert list(found) == ["baseline"] + [
        f"eagle draft-tokens={n} kv_dtype={kind}" for n in (1, 3) for kind in ("auto", "fp8")
    ]
    assert found["eagle draft-tokens=3 kv_dtype=fp8"] == {
        "algorithm": "eagle3", "draft": "head", "draft_tokens": 3, "kv_dtype": "fp8"
    }  # fmt: skip


def test_names_have_booleans_as_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    path.write_text("[one]\ndeterministic = [true, false]\n")
    assert list(read_grid(path)) == ["one deterministic=true", "one deterministic=false"]


def test_file_overrides_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    path.write_text(TOML)
    asked = EngineOptions(device="cpu", seed=7, draft_tokens="5", page_size=8)
    found = configured(asked, str(path), concurrency=3, prefix_cache=False)
    assert found["baseline"].speculation.algorithm == "none"
    config = found["eagle draft-tokens=1 kv_dtype=fp8"]
    assert (config.speculation.draft_tokens, config.kv_dtype) == (1, "fp8")
    assert {(one.seed, one.page_size, one.max_running) for one in found.values()} == {(7, 8, 3)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no configurations"),
        ("x = 3", "write a table of options"),
        ("[a", "not TOML"),
        ('[a]\nspecs = "v1"', "a: specs': is no option of an engine; did you mean spec?"),
        ("[a]\ndraft-token = 3", "a: draft-token': is no option of an engine; did you mean draft-tokens"),
        ("[a]\nzzz = 3", "a: zzz': is no option of an engine; use one of model, "),
        ("[a]\ndraft-tokens = true", "a: draft-tokens=true': this is not a value of that option"),
        ('[a]\ndraft-tokens = "many"', "draft-tokens='many': use a whole number, or auto"),
        ('[a]\npage_size = "big"', 'a: page-size="big"\': this is not a value of that option'),
        ("[a]\nfp8_activations = 'no'", 'fp8-activations="no"\': use true or false'),
        ("[a]\nprefix-cache = 3", "prefix-cache=3': use true or false"),
        ("[a]\npage_size = 8\npage-size = 16", "a.page-size': is given twice"),
        ("[a]\npage_size = []", "or a list of them"),
        ("[a.b]\nc = 3", "or a list of them"),
        ("[a]\npage_size = [8, 8]", "name each value of a list once"),
        ('["a/b"]\nspec = "v1"', "a configuration name must be printable, must not contain / or"),
        ('["a|b"]\nspec = "v1"', "must not contain / or |"),
        ('[a]\ndraft = ["heads/a/b", "heads/a_b"]', "a draft=heads/a/b has a folder of that name, too"),
        ('["a spec=v1"]\nspec = "v2"\n[a]\nspec = ["v1", "v2"]', "a spec=v1 has a folder of that name, too"),
        (f'[a]\ndraft = ["{"x" * 255}", "y"]', "too long for a folder's name"),
        ('[a]\nspec = "v3"', "spec='v3': use one of"),
    ],
)
def test_refused_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "grid.toml"
    path.write_text(text)
    with pytest.raises(SpecbatchError) as refused:
        configured(EngineOptions(device="cpu"), str(path))
    assert message in str(refused.value)
    assert f"{path}" in str(refused.value)


def test_true_and_false_are_yamls_only_booleans(tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text("a: {prefix_cache: true}\nb: {prefix_cache: False}\nno: {spec: off, ngram-max: 3, draft: yes}")
    assert read_grid(path) == {
        "a": {"prefix_cache": True}, "b": {"prefix_cache": False}, "no": {"spec": "off", "ngram_max": 3, "draft": "yes"}
    }  # fmt: skip


def test_missing_file_and_bad_yaml_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("a: [")
    for name, message in (("none.yaml", r"cannot be read \(No such file or directory\)"), ("bad.yaml", "not YAML")):
        with pytest.raises(SpecbatchError, match=message):
            read_grid(tmp_path / name)


def test_models_have_different_names() -> None:
    toy = EngineConfig(model="toy", load_format="dummy")
    drafting = replace(toy, speculation=Speculation("ngram"))
    assert by_model({"a": toy, "b": drafting}) == {"toy": {"a": toy, "b": drafting}}
    others = {"a": toy, "c": replace(toy, model="x/toy"), "d": replace(toy, seed=1)}
    assert [list(found) for found in by_model(others).values()] == [["a"], ["c"], ["d"]]
    assert list(by_model(others)) == ["toy-1", "toy-2", "toy-3"]


def test_each_model_of_a_list_has_its_baseline(tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    both = 'model = ["toy", "x/other"]\nload-format = ["dummy", "auto"]'
    path.write_text(f'[baseline]\nspec = "off"\n{both}\n[v2]\n{both}\nspec = "v2"\ndraft-tokens = [1, 3]\n')
    found = by_model(configured(EngineOptions(device="cpu"), str(path)))
    names = ["baseline", "v2 draft-tokens=1", "v2 draft-tokens=3"]
    assert [list(ours) for ours in found.values()] == [names] * 4
    assert {one.model for one in found["other-3"].values()} == {"x/other"}


def test_several_models_of_the_command_line_have_all_configurations(tmp_path: Path) -> None:
    """But for tables that name their own."""
    asked = EngineOptions(device="cpu", model="toy,x/other")
    assert {name: [*ours] for name, ours in by_model(configured(asked, "baseline,v2")).items()} == {
        "toy": ["baseline", "v2"], "other": ["baseline", "v2"]
    }  # fmt: skip
    path = tmp_path / "grid.toml"
    path.write_text('[baseline]\nspec = "off"\n[v2]\nspec = "v2"\nmodel = "toy"\n')
    found = by_model(configured(asked, str(path)))
    assert {name: [*ours] for name, ours in found.items()} == {"toy": ["baseline", "v2"], "other": ["baseline"]}
    (folder := tmp_path / "one,two").mkdir()
    [model] = by_model(configured(asked.having(model=str(folder)), "baseline")).values()
    assert model["baseline"].model == str(folder)


def record() -> RunRecord:
    return RunRecord({}, {}, {}, {}, [], {})


@pytest.mark.parametrize("repeats", [2, 3, 4, 7])
def test_a_steady_drift_slows_no_configuration_more_than_another(repeats: int) -> None:
    """Every pair of configurations runs in both orders, in consecutive rounds."""
    order = [(p.configuration, p.repeat) for p in points("abc", SweepOptions((2,), repeats, OPTIONS.workload))]
    assert order[:6] == [("a", 1), ("b", 1), ("c", 1), ("c", 2), ("b", 2), ("a", 2)]
    for one, other in combinations("abc", 2):
        delays = [order.index((other, repeat)) - order.index((one, repeat)) for repeat in range(1, repeats + 1)]
        assert delays == [delays[0] * (-1) ** round for round in range(repeats)]


def test_unfinished_points_of_a_folder(tmp_path: Path) -> None:
    tmp_path = tmp_path / "out"  # its parent is looked at, too
    tmp_path.mkdir()
    configs = named(EngineConfig(speculation=Speculation("ngram")), ("baseline", "v2"))
    every = list(points(configs, OPTIONS))
    assert [(p.configuration, p.concurrency, p.repeat) for p in every[:5]] == [
        ("baseline", 1, 1), ("v2", 1, 1), ("v2", 1, 2), ("baseline", 1, 2), ("baseline", 2, 1)
    ]  # fmt: skip
    plan = plan_of(configs, OPTIONS)
    check_plan(tmp_path, plan)
    assert not (tmp_path / PLAN).exists()  # nothing has finished
    save(tmp_path, plan, every[1], record())
    assert [point for point in every if point.is_finished(tmp_path)] == [every[1]]
    where = json.loads((tmp_path / "v2/c1/r1/record.json").read_text())["workload"]
    assert where == {"configuration": "v2", "place": 1, "concurrency": 1, "repeat": 1}
    check_plan(tmp_path, plan)
    left = [point for point in every if point != every[1]]
    assert {*unfinished(tmp_path)} == {*unfinished(tmp_path.parent)} == {*left}
    assert unfinished(tmp_path / "v2") == [point for point in left if point.configuration == "v2"]
    assert unfinished(tmp_path / "v2/c1") == [every[2]]
    assert unfinished(tmp_path / "v2/c1/r1") == unfinished(tmp_path / "out.jsonl") == []
    (tmp_path / "other").mkdir()
    save(tmp_path / "other", plan_of(configs, replace(OPTIONS, repeats=1)), every[0], record())
    assert len(unfinished(tmp_path)) == 7 + 3  # the sweeps of two models


@pytest.mark.parametrize(
    ("options", "pages", "message"),
    [
        ({"repeats": 3}, {}, r"repeats \(2 there, 3 now\)"),
        ({"workload": Workload(input_len=5, output_len=3)}, {}, r"input_len \(4 there, 5 now\)"),
        ({"concurrency": (1,)}, {}, r"concurrency \(\[1, 2\] there, \[1\] now\)"),
        ({}, {"baseline": None}, r"configurations \(baseline, v2 there, v2 now\)"),
        ({}, {"v2": 32}, r"page_size \(16 there, 32 now\)"),
        ({}, {"baseline": 32, "v2": 32}, r"another page_size \(16 there, 32 now\);"),  # once for all
    ],
)
def test_folder_of_another_sweep_is_refused(
    tmp_path: Path, options: dict[str, Any], pages: dict[str, int | None], message: str
) -> None:
    """pages: the page size of a configuration, or None for a configuration that is left out."""
    configs = named(EngineConfig(speculation=Speculation("ngram")), ("baseline", "v2"))
    for point in islice(points(configs, OPTIONS), 2):
        save(tmp_path, plan_of(configs, OPTIONS), point, record())
    now = {name: replace(config, page_size=pages.get(name, 16) or 16) for name, config in configs.items()}
    now = {name: config for name, config in now.items() if pages.get(name, 16) is not None}
    with pytest.raises(SpecbatchError, match=message):
        check_plan(tmp_path, plan_of(now, replace(OPTIONS, **options)))


def test_unreadable_plan_is_refused(tmp_path: Path) -> None:
    (tmp_path / PLAN).write_text("{")
    with pytest.raises(SpecbatchError, match=r"sweep\.json': is not JSON .*; name a new folder"):
        check_plan(tmp_path, plan_of(named(EngineConfig(), ("baseline",)), OPTIONS))


def server(url: str) -> Server:
    return Server(url)


def test_a_configuration_that_was_not_measured_can_be_corrected(tmp_path: Path) -> None:
    ours = named(EngineConfig(), ("baseline",))
    wrong, right = (plan_of(ours | {"vllm": server(url)}, OPTIONS) for url in ("http://h:1", "http://h:2"))
    every = list(points([*ours, "vllm"], OPTIONS))
    save(tmp_path, wrong, every[0], record())
    failed = record()
    failed.workload["error"] = "no answer"
    save(tmp_path, wrong, every[1], failed)
    check_plan(tmp_path, right)
    assert json.loads((tmp_path / PLAN).read_text()) == wrong, "nothing was measured with the other one"
    save(tmp_path, right, every[0], record())
    assert json.loads((tmp_path / PLAN).read_text()) == right
    assert not every[1].is_finished(tmp_path), "what failed is of the wrong address"
    assert every[0].is_finished(tmp_path)
    save(tmp_path, right, every[1], record())
    with pytest.raises(SpecbatchError, match="another"):
        check_plan(tmp_path, wrong)
    with pytest.raises(SpecbatchError, match="choice of configurations"):
        check_plan(tmp_path, plan_of(ours, OPTIONS))


def test_all_configurations_can_change_where_nothing_was_measured(tmp_path: Path) -> None:
    first, second = (plan_of({name: server(f"http://{name}:1")}, OPTIONS) for name in ("a", "b"))
    (failed := record()).workload["error"] = "no answer"
    save(tmp_path, first, Point("a", 0, 1, 1), failed)
    check_plan(tmp_path, second)
    with pytest.raises(SpecbatchError, match=r"repeats \(2 there, 3 now\)"):
        check_plan(tmp_path, second | {"repeats": 3})
    save(tmp_path, second, Point("b", 0, 1, 1), record())
    assert [path.parent.parent.parent.name for path in tmp_path.rglob("record.json")] == ["b"]
