"""`specbatch doctor`: every feature has a reason."""

from __future__ import annotations

import json
import re

from specbatch.cli.doctor import report
from specbatch.engine import support


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
    assert all(row["runs"] for row in found["families"])
    text = report(found)
    assert "| feature" in text
    assert re.search(r"\| LFM2 +\| yes +\| yes +\| yes ", text)
    assert re.search(r"\| tree \(--draft-topk\) .*\| no \(1\) +\| yes +\| yes +\| yes +\| yes +\|\n", text)
    assert "A draft with recurrent layers" in text
    assert "* no (1): draft_topk=2: 'peagle' drafts chains only; use 1\n" in text
