"""`specbatch doctor`: every feature has a reason."""

from __future__ import annotations

import json
import re

from specbatch.cli import doctor
from specbatch.engine import support
from specbatch.errors import SpecbatchError


def test_doctor_gives_a_reason_for_everything(run, monkeypatch, tmp_path):
    monkeypatch.setattr(support, "FAMILIES", {"Llama": "llama-3.2-1b", "LFM2": "lfm2-1.2b"})
    monkeypatch.setattr(support, "SETTINGS", dict(list(support.SETTINGS.items())[:3]))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("SPECBATCH_CACHE", str(tmp_path))
    found = json.loads(run("doctor", "--json").stdout)
    assert found["cache"] == str(tmp_path)
    assert all(row["why"] for row in found["features"])
    why = {row["feature"]: row for row in found["features"]}
    assert why["engine on the CPU"]["runs"]
    assert not why["model smollm2-135m"]["runs"]
    assert "specbatch models pull smollm2-135m" in why["model smollm2-135m"]["why"]
    assert "HF_HUB_OFFLINE" in why["models and data of the hub"]["why"]
    assert all(row["runs"] or (row["draft"], row["what"]) == ("uno", "LFM2") for row in found["families"])
    text = "\n\n".join(text(found) for _, text in doctor.SECTIONS)
    assert "| feature" in text
    assert re.search(r"\| LFM2 +\| yes +\| yes +\| yes ", text)
    number = re.search(r"\* no \((\d)\): --draft-topk=2: 'peagle' drafts chains only; use 1\n", text)
    assert number is not None
    assert re.search(rf"\| tree \(--draft-topk\) .*\| no \({number[1]}\) +(\| yes +)+\|\n", text)
    assert "A draft with recurrent layers" in text


def test_each_part_is_printed_when_it_is_found(run, monkeypatch):
    def fails():
        raise SpecbatchError("the second part")

    (environment, table), (_, features), _ = doctor.SECTIONS
    monkeypatch.setattr(doctor, "SECTIONS", ((environment, table), (fails, features)))
    result = run("doctor")
    assert "| processor" in result.stdout
    assert result.stderr == "error: the second part\n"
