"""Drafters by name. A new algorithm is one file in this folder and one line here; nothing is imported until used.

Each module has `plan(target, config, log) -> DraftPlan` (see `base`).
"""

from __future__ import annotations

ALGORITHMS: dict[str, str] = {
    "none": "specbatch.drafters.base",
    "ngram": "specbatch.drafters.ngram",
    "standalone": "specbatch.drafters.standalone",
}

# What little acceptance likely comes from: of a draft that was trained for its target, and where that says too much.
_TRAINED = (
    "feature layers counted by the other convention (--aux-layers), another rope theta (--draft-rope-theta), a "
    "thinking mode or chat template that the draft was not trained on, a draft made for another target"
)
_SUSPECTS = {
    "ngram": "the output repeats little of what came before it; --ngram-min 3 or more drafts less often and better",
    "standalone": "draft and target are no pair (another family or fine-tune, too many layers skipped), another rope "
    "theta, a thinking mode or chat template that only one of them was trained on",
}


def suspects(algorithm: str, load_format: str) -> str:
    """The likely causes of low acceptance, for a person to try one after the other."""
    if load_format == "dummy":
        return "the weights are random (--load-format dummy), for which --simulate-accept-length was made"
    return _SUSPECTS.get(algorithm, _TRAINED)
