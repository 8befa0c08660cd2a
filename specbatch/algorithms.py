"""The registry of drafting algorithms: one `Algorithm` per value of `Speculation.algorithm`.

To add an algorithm, write a module in `specbatch/drafters` with `plan(target, config, log) -> DraftPlan` and add an
entry here. Configuration, command line, checks and reports read their facts from the entry. Nothing is imported until
an engine uses the algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

NO_SPECULATION = "none"  # the baseline

_LOW_ACCEPTANCE_OF_TRAINED_DRAFTS = (
    "feature layers counted by the other convention (--aux-layers), another rope theta (--draft-rope-theta), a "
    "thinking mode or chat template that the draft was not trained on, a draft made for another target"
)


@dataclass(frozen=True)
class Algorithm:
    """What the rest of the program must know of a drafting algorithm.

    module          the module with its `plan` function
    default_tokens  length of the drafted chain when no shape is configured, as published: SGLang drafts 3 tokens with a
                    model or head, vLLM's prompt lookup examples 4, DFLASH and DFlash 2 a block of 16
                    with the root, DSpark a block of 7, P-EAGLE 7 as in vLLM's benchmarks at one request
    tree            how a tree gets its candidates: "expanded" gives each of `topk` nodes of a step `topk` children,
                    "block" does so with the tokens of a block that is filled in one pass, "merged" joins `topk`
                    continuations of `steps` tokens, None means that only chains are drafted
    draft           what the setting `draft` must name; None if the algorithm takes no draft
    settings        settings that only some algorithms take
    loads_draft     whether weights beside the target's are loaded, so that they must fit the target
    training        the module whose `untrained_head` makes a draft head to train; None: no training
    samples_drafts  whether the drafts of sampled requests are samples, so that acceptance uses their distributions
    in_target       whether the draft head is stored with the target, in the same checkpoint
    alias_of        the algorithm that this is another name for
    low_acceptance  likely causes of a low acceptance rate, for the warning
    """

    module: str
    default_tokens: int
    tree: Literal["expanded", "block", "merged"] | None = "expanded"
    draft: str | None = None
    settings: tuple[str, ...] = ()
    loads_draft: bool = True
    training: str | None = None
    samples_drafts: bool = True
    in_target: bool = False
    alias_of: str | None = None
    low_acceptance: str = _LOW_ACCEPTANCE_OF_TRAINED_DRAFTS

    def candidates(self, steps: int, topk: int) -> int:
        """Nodes that a tree of this shape is chosen from."""
        return steps * topk if self.tree == "merged" else topk + (steps - 1) * topk * topk


_MTP = Algorithm(
    "specbatch.drafters.mtp",
    default_tokens=3,
    settings=("draft_attention_backend", "draft_quantization"),
    training="specbatch.training.mtp",
    in_target=True,
)

ALGORITHMS: dict[str, Algorithm] = {
    # The shape is that of n-gram lookup, so that both verify the same number of rows in a comparison.
    NO_SPECULATION: Algorithm("specbatch.drafters.base", default_tokens=4, loads_draft=False, samples_drafts=False),
    "ngram": Algorithm(
        "specbatch.drafters.ngram",
        default_tokens=4,
        tree="merged",
        settings=("ngram_max", "ngram_min"),
        loads_draft=False,
        samples_drafts=False,
        low_acceptance=(
            "the output repeats little of what came before it; --ngram-min 3 or more drafts less often and better"
        ),
    ),
    "standalone": Algorithm(
        "specbatch.drafters.draft_model",
        default_tokens=3,
        draft="a draft model or 'self:skip=FIRST-LAST'",
        settings=("draft_attention_backend", "draft_quantization"),
        low_acceptance=(
            "draft and target are no pair (another family or fine-tune, too many layers skipped), another rope "
            "theta, a thinking mode or chat template that only one of them was trained on"
        ),
    ),
    "eagle": Algorithm(
        "specbatch.drafters.eagle",
        default_tokens=3,
        draft="an EAGLE head (folder or hub id)",
        settings=("draft_attention_backend", "draft_quantization", "draft_rope_theta"),
        training="specbatch.training.eagle",
    ),
    "eagle3": Algorithm(
        "specbatch.drafters.eagle3",
        default_tokens=3,
        draft="an EAGLE-3 head (folder or hub id)",
        settings=("aux_layers", "draft_attention_backend", "draft_quantization", "draft_rope_theta"),
        training="specbatch.training.eagle3",
    ),
    "peagle": Algorithm(
        "specbatch.drafters.peagle",
        default_tokens=7,
        tree=None,
        draft="a P-EAGLE head (folder or hub id)",
        settings=("aux_layers", "draft_attention_backend", "draft_quantization", "draft_rope_theta"),
        training="specbatch.training.peagle",
    ),
    "mtp": _MTP,
    "nextn": replace(_MTP, training=None, alias_of="mtp"),  # SGLang's name
    "dflash": Algorithm(
        "specbatch.drafters.dflash",
        default_tokens=15,
        tree="block",
        draft="a draft that was made for the model (folder or hub id)",
        settings=("draft_quantization",),
        training="specbatch.training.dflash",
    ),
    "dflash2": Algorithm(
        "specbatch.drafters.dflash2",
        default_tokens=15,
        tree="block",
        draft="a draft that was made for the model (folder or hub id)",
        settings=("draft_quantization",),
        training="specbatch.training.dflash2",
    ),
    "dspark": Algorithm(
        "specbatch.drafters.dspark",
        default_tokens=7,
        tree="block",
        draft="a draft that was made for the model (folder or hub id)",
        settings=("draft_quantization",),
        training="specbatch.training.dspark",
    ),
}


def algorithms_with(setting: str) -> tuple[str, ...]:
    """Names of the algorithms that take `setting`."""
    return tuple(name for name, algorithm in ALGORITHMS.items() if setting in algorithm.settings)


def causes_of_low_acceptance(name: str, load_format: str) -> str:
    """Likely causes of a low acceptance rate with algorithm `name`, in the order to check them."""
    if load_format == "dummy":
        return "the weights are random (--load-format dummy), for which --simulate-accept-length was made"
    return ALGORITHMS[name].low_acceptance
