"""Drafters by name. A new algorithm is one file in this folder and one line here; nothing is imported until used."""

from __future__ import annotations

ALGORITHMS: dict[str, str] = {
    "none": "specbatch.drafters.base:NoDraft",
    "ngram": "specbatch.drafters.ngram:NGram",
    "standalone": "specbatch.drafters.standalone:Standalone",
}
