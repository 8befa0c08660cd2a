"""Cases in the form of MaskBench: what is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specbatch import SpecbatchError
from specbatch.sweeps.microbench.maskbench import tables

CASES: dict[str, tuple[Any, list[tuple[Any, bool]]]] = {
    "device": ({"type": "array", "items": {"type": "integer"}}, [([1, 2], True), (["a"], False)]),
    "host": ({"type": "array", "items": {"$ref": "#"}}, [([[], [[]]], True), ([1], False)]),
    "closed": ({"type": "object", "properties": {"a": {"const": 1}}}, [({"a": 1, "b": 2}, True), ({"a": 1}, True)]),
    "lenient": ({"type": "string"}, [("as if this were wrong", False)]),
    "refused": ({"contains": {}}, [([1], True)]),
}


def test_what_is_counted(tmp_path: Path) -> None:
    for name, (schema, tests) in CASES.items():
        case = {"schema": schema, "tests": [{"data": data, "valid": valid} for data, valid in tests]}
        (tmp_path / f"{name}.json").write_text(json.dumps(case))
    (tmp_path / "broken.json").write_text("{")
    counted, listed = tables(tmp_path, sample=0, failures=True)
    ours, theirs = counted.measured()
    assert {name: ours[name] for name in ("compiled", "right", "on the device")} == {
        "compiled": 4, "right": 2, "on the device": 3
    }  # fmt: skip
    assert (ours["valid refused"], ours["invalid accepted"]) == ("1 of 4", "1 of 3")
    assert (theirs["right"], theirs["on the device"]) == (3, 0)
    rows = [(row["engine"], row["schema"]) for row in listed.measured()]
    assert rows == [
        ("specbatch", "broken"), ("specbatch", "closed"), ("specbatch", "lenient"), ("specbatch", "refused"),
        ("llguidance", "broken"), ("llguidance", "lenient"), ("llguidance", "refused"),
    ]  # fmt: skip
    drawn = [next(iter(tables(tmp_path, sample=2, seed=seed))).measured()[0]["compiled"] for seed in range(9)]
    assert set(drawn) <= {0, 1, 2}
    assert len(set(drawn)) > 1


def test_a_folder_without_cases(tmp_path: Path) -> None:
    with pytest.raises(SpecbatchError, match="it has no JSON files; use maskbench/data"):
        next(iter(tables(tmp_path)))
