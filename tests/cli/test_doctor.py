"""`specbatch doctor`: every feature has a reason."""

from __future__ import annotations

import json


def test_doctor_gives_a_reason_for_everything(run, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("SPECBATCH_CACHE", str(tmp_path))
    found = json.loads(run("doctor", "--json").stdout)
    assert found["cache"] == str(tmp_path)
    assert all(row["why"] for row in found["features"])
    why = {row["feature"]: row for row in found["features"]}
    assert why["engine on the CPU"]["runs"]
    assert "algorithm mtp" in why
    assert not {"algorithm none", "algorithm nextn"} & why.keys(), "the baseline and another name are no algorithms"
    assert not why["model smollm2-135m"]["runs"]
    assert "specbatch models pull smollm2-135m" in why["model smollm2-135m"]["why"]
    assert "HF_HUB_OFFLINE" in why["models and data of the hub"]["why"]
    assert "| feature" in run("doctor").stdout
