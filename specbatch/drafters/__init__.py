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
