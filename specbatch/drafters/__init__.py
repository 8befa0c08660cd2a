"""Drafters by name. A new algorithm is one file in this folder and one line here; nothing is imported until used.

Each module has `plan(target, config, log) -> DraftPlan` (see `base`).
"""

from __future__ import annotations

ALGORITHMS: dict[str, str] = {
    "none": "specbatch.drafters.base",
    "ngram": "specbatch.drafters.ngram",
    "standalone": "specbatch.drafters.standalone",
    "eagle": "specbatch.drafters.eagle",
    "eagle3": "specbatch.drafters.eagle3",
    "mtp": "specbatch.drafters.mtp",
    "nextn": "specbatch.drafters.mtp",
}
# What `draft` must name; the others take none.
DRAFTS: dict[str, str] = {
    "standalone": "a draft model or 'self:skip=FIRST-LAST'",
    "eagle": "an EAGLE head (folder or hub id)",
    "eagle3": "an EAGLE-3 head (folder or hub id)",
}
# Tokens drafted per verify where nothing else is asked for: the published default of three steps for heads.
TOKENS: dict[str, int] = {"eagle": 3, "eagle3": 3, "mtp": 3, "nextn": 3}
# Settings that not every algorithm has.
TAKERS: dict[str, tuple[str, ...]] = {"aux_layers": ("eagle3",), "draft_rope_theta": ("eagle", "eagle3")}
