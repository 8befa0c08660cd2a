"""Drafters by name. A new algorithm is one file in this folder and one line here; nothing is imported until used.

Each module has `plan(target, config, log) -> DraftPlan` (see `base`).
"""

from __future__ import annotations

ALGORITHMS: dict[str, str] = {
    "none": "specbatch.drafters.base",
    "ngram": "specbatch.drafters.ngram",
    "standalone": "specbatch.drafters.standalone",
    "dflash": "specbatch.drafters.dflash",
}
# What `draft` must name; the others take none.
DRAFTS: dict[str, str] = {
    "standalone": "a draft model or 'self:skip=FIRST-LAST'",
    "dflash": "a draft that was made for the model (folder or hub id)",
}
# Tokens drafted per verify where neither the user nor the draft says another number, and that is not 4.
TOKENS: dict[str, int] = {"dflash": 15}
