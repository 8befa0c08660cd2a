"""Drafters by name. A new algorithm is one file in this folder and one line here; nothing is imported until used.

Each module has `plan(target, config, log) -> DraftPlan` (see `base`).
"""

from __future__ import annotations

ALGORITHMS: dict[str, str] = {
    "none": "specbatch.drafters.base",
    "ngram": "specbatch.drafters.ngram",
    "standalone": "specbatch.drafters.draft_model",
    "eagle": "specbatch.drafters.eagle",
    "eagle3": "specbatch.drafters.eagle3",
    "mtp": "specbatch.drafters.mtp",
    "nextn": "specbatch.drafters.mtp",
    "dflash": "specbatch.drafters.dflash",
}
# What `draft` must name; the others take none.
DRAFTS: dict[str, str] = {
    "standalone": "a draft model or 'self:skip=FIRST-LAST'",
    "eagle": "an EAGLE head (folder or hub id)",
    "eagle3": "an EAGLE-3 head (folder or hub id)",
    "dflash": "a draft that was made for the model (folder or hub id)",
}
# Settings that not every algorithm has.
TAKERS: dict[str, tuple[str, ...]] = {"aux_layers": ("eagle3",), "draft_rope_theta": ("eagle", "eagle3")}
