"""The registry of drafting algorithms: one `Algorithm` per value of `Speculation.algorithm`.

To add an algorithm, write a module in `specbatch/drafters` with `plan(target, config, log) -> DraftPlan`, one in
`specbatch/models/heads` with the network of its draft, and an entry here; for training one more in
`specbatch/training`. Configuration, command line, checks and reports read their facts from the entry. Nothing is
imported until an engine uses the algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

NO_SPECULATION = "none"  # the baseline

_LOW_ACCEPTANCE_OF_TRAINED_DRAFTS = (
    "feature layers counted by the other convention (--aux-layers), another rope theta (--draft-rope-theta), a "
    "thinking mode or chat template that the draft was not trained on, a draft made for another target"
)


@dataclass(frozen=True)
class Published:
    """How the files of a published draft show that it is one for the algorithm.

    architectures  patterns of the name in the "architectures" of its config.json
    speculators    the `speculators_model_type` that drafts of vllm-project/speculators have
    is_own         whether a config.json with such a name is one of this algorithm. Where it is one of several, the last
                   algorithm of the registry counts
    tensors        of heads on the target's features: those that tell them from the heads of other algorithms
    has            of block drafts: what they have besides the layers that fill the block, for messages
    """

    architectures: tuple[str, ...] = ()
    speculators: tuple[str, ...] = ()
    is_own: Callable[[Mapping[str, Any]], bool] = lambda config: True
    tensors: tuple[str, ...] | None = None
    has: str = ""


@dataclass(frozen=True)
class Training:
    """module: the module whose `untrained_head` makes a draft head to train; settings: those of `Recipe` that it takes,
    with defaults, of which None depends on the target."""

    module: str
    settings: Mapping[str, float | None]


@dataclass(frozen=True)
class Algorithm:
    """What the rest of the program must know of a drafting algorithm.

    module          the module with its `plan` function
    default_tokens  length of the drafted chain when no shape is configured, as published: SGLang drafts 3 tokens with a
                    model or head, vLLM's prompt lookup examples 4, DSpark a block of 7, all others that fill a block
                    one of 16 with the root, P-EAGLE 7 as in vLLM's benchmarks at one request
    tree            how a tree gets its candidates: "expanded" gives each of `topk` nodes of a step `topk` children,
                    "block" does so with the tokens of a block that is filled in one pass, "merged" joins `topk`
                    continuations of `steps` tokens, None means that only chains are drafted
    root_drafts     whether the row of the newest token drafts, too, in a block that is filled in one pass
    draft           what the setting `draft` must name; None if the algorithm takes no draft
    drafts_by_model whether that is a whole model, and not one trained for the target
    published       how the files of its drafts are recognized
    needs           what a target must have, for the support matrix; empty: nothing
    settings        settings that only some algorithms take
    loads_draft     whether weights beside the target's are loaded, so that they must fit the target
    training        how a draft head is trained; None: no training
    samples_drafts  whether the drafts of sampled requests are samples, so that acceptance uses their distributions
    in_target       whether the draft head is stored with the target, in the same checkpoint
    alias_of        the algorithm that this is another name for
    in_vllm         what vLLM's --speculative-config says of it, besides draft and number of drafts; None: nothing known
    in_sglang       its name for SGLang's --speculative-algorithm; None: nothing known
    low_acceptance  likely causes of a low acceptance rate, for the warning
    """

    module: str
    default_tokens: int
    tree: Literal["expanded", "block", "merged"] | None = "expanded"
    root_drafts: bool = False
    draft: str | None = None
    drafts_by_model: bool = False
    published: Published = field(default_factory=Published)
    needs: str = ""
    settings: tuple[str, ...] = ()
    loads_draft: bool = True
    training: Training | None = None
    samples_drafts: bool = True
    in_target: bool = False
    alias_of: str | None = None
    in_vllm: Mapping[str, Any] | None = None
    in_sglang: str | None = None
    low_acceptance: str = _LOW_ACCEPTANCE_OF_TRAINED_DRAFTS

    @property
    def has_trained_draft(self) -> bool:
        """Whether it takes a draft that was trained for the target."""
        return self.draft is not None and not self.drafts_by_model

    def candidates(self, steps: int, topk: int) -> int:
        """Nodes that a tree of this shape is chosen from."""
        return steps * topk if self.tree == "merged" else topk + (steps - 1) * topk * topk


def _names_mask_token(config: Mapping[str, Any]) -> bool:
    """Whether a config is of a head that drafts in parallel, in vLLM's layout or that of speculators."""
    keys = ("speculators_model_type", "pard_token", "ptd_token_id")
    return any(config.get(key) is not None for key in keys)


def _projector(config: Mapping[str, Any]) -> Any:
    """What a block draft has besides its layers, as SpecForge names it."""
    inside = config.get("dflash_config")
    found = inside.get("projector_type") if isinstance(inside, Mapping) else None
    return config.get("projector_type") if found is None else found


_MTP = Algorithm(
    "specbatch.drafters.mtp",
    default_tokens=3,
    settings=("draft_attention_backend", "draft_quantization"),
    published=Published(speculators=("mtp",)),
    needs=("a checkpoint with an MTP head (`mtp.*` tensors, or of DeepSeek-V3 and GLM-4.5 the layers after the last)"),
    training=Training("specbatch.training.mtp", {"unroll": 5}),
    in_target=True,
    in_vllm={"method": "mtp"},
    in_sglang="NEXTN",
)
_HIDDEN_NORM = "layers.0.hidden_norm.weight"
_DEEPSPEC = ("Qwen3DSparkModel", "DSparkDraftModel")  # of DeepSpec and SpecForge
_BLOCK_DRAFT = "a draft that was made for the model (folder or hub id)"

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
        in_vllm={"method": "ngram"},
        in_sglang="NGRAM",
        low_acceptance=(
            "the output repeats little of what came before it; --ngram-min 3 or more drafts less often and better"
        ),
    ),
    "standalone": Algorithm(
        "specbatch.drafters.draft_model",
        default_tokens=3,
        draft="a draft model or 'self:skip=FIRST-LAST'",
        drafts_by_model=True,
        settings=("draft_attention_backend", "draft_quantization"),
        in_vllm={"method": "draft_model"},
        in_sglang="STANDALONE",
        low_acceptance=(
            "draft and target are no pair (another family or fine-tune, too many layers skipped), another rope "
            "theta, a thinking mode or chat template that only one of them was trained on"
        ),
    ),
    "eagle": Algorithm(
        "specbatch.drafters.eagle",
        default_tokens=3,
        draft="an EAGLE head (folder or hub id)",
        published=Published(("*Eagle",), ("eagle",), tensors=()),
        settings=("draft_attention_backend", "draft_quantization", "draft_rope_theta"),
        training=Training("specbatch.training.eagle", {"unroll": 3, "draft_layers": 1}),
        in_vllm={"method": "eagle"},
        in_sglang="EAGLE",
    ),
    "eagle3": Algorithm(
        "specbatch.drafters.eagle3",
        default_tokens=3,
        draft="an EAGLE-3 head (folder or hub id)",
        published=Published(("*Eagle3",), ("eagle3",), tensors=(_HIDDEN_NORM,)),
        settings=("aux_layers", "draft_attention_backend", "draft_quantization", "draft_rope_theta"),
        training=Training(
            "specbatch.training.eagle3", {"unroll": 5, "vocab": None, "draft_layers": 1, "aux_layers": None}
        ),
        in_vllm={"method": "eagle3"},
        in_sglang="EAGLE3",
    ),
    "peagle": Algorithm(
        "specbatch.drafters.peagle",
        default_tokens=7,
        tree=None,
        draft="a P-EAGLE head (folder or hub id)",
        published=Published(("*Eagle3",), ("peagle",), _names_mask_token, (_HIDDEN_NORM, "mask_hidden")),
        settings=("aux_layers", "draft_attention_backend", "draft_quantization", "draft_rope_theta"),
        training=Training(
            "specbatch.training.peagle", {"unroll": 7, "vocab": None, "draft_layers": 2, "aux_layers": None}
        ),
        in_vllm={"method": "eagle3", "parallel_drafting": True},
    ),
    "mtp": _MTP,
    "nextn": replace(_MTP, training=None, alias_of="mtp"),  # SGLang's name
    "dflash": Algorithm(
        "specbatch.drafters.dflash",
        default_tokens=15,
        tree="block",
        draft=_BLOCK_DRAFT,
        published=Published(("DFlashDraftModel", *_DEEPSPEC), ("dflash", "dspark"), has="no head of its own"),
        settings=("draft_quantization",),
        training=Training("specbatch.training.dflash", {"draft_layers": 2, "block_size": 8, "anchors": 16}),
        in_vllm={"method": "dflash"},
        in_sglang="DFLASH",
    ),
    "dflash2": Algorithm(
        "specbatch.drafters.dflash2",
        default_tokens=15,
        tree="block",
        draft=_BLOCK_DRAFT,
        published=Published(("DFlash2DraftModel",), has="a selector"),
        settings=("draft_quantization",),
        training=Training(
            "specbatch.training.dflash2", {"draft_layers": 2, "block_size": 8, "anchors": 16, "selector_rank": 256}
        ),
    ),
    "dspark": Algorithm(
        "specbatch.drafters.dspark",
        default_tokens=7,
        tree="block",
        root_drafts=True,
        draft=_BLOCK_DRAFT,
        published=Published(_DEEPSPEC, ("dspark",), lambda config: config.get("markov_rank") != 0, has="a Markov head"),
        settings=("draft_quantization",),
        training=Training(
            "specbatch.training.dspark",
            {"draft_layers": 2, "block_size": 7, "anchors": 16, "markov_rank": 256, "token_weight": 0.1},
        ),
        in_vllm={"method": "dspark"},
        in_sglang="DSPARK",
    ),
    "domino": Algorithm(
        "specbatch.drafters.domino",
        default_tokens=15,
        tree="block",
        root_drafts=True,
        draft=_BLOCK_DRAFT,
        published=Published(
            ("DFlashDraftModel", "DominoDraftModel"),
            is_own=lambda config: _projector(config) == "domino",
            has="a GRU over the block",
        ),
        settings=("draft_quantization",),
        training=Training(
            "specbatch.training.domino",
            {"draft_layers": 2, "block_size": 8, "anchors": 16, "gru_size": 1024, "correction_rank": 256},
        ),
        in_sglang="DFLASH",
    ),
    "lilicorr": Algorithm(
        "specbatch.drafters.lilicorr",
        default_tokens=15,
        tree="block",
        draft=_BLOCK_DRAFT,
        published=Published(("LiLiCorrDraftModel",), has="a LiLiCorr head"),
        settings=("draft_quantization",),
        training=Training(
            "specbatch.training.lilicorr", {"draft_layers": 2, "block_size": 8, "anchors": 16, "lattice_width": 1024}
        ),
        in_vllm={"method": "dflash"},
        in_sglang="DFLASH",
    ),
    "uno": Algorithm(
        "specbatch.drafters.uno",
        default_tokens=8,
        tree="block",
        root_drafts=True,
        draft="a LoRA that was made for the model (folder or hub id)",
        needs="dense layers (Llama, Mistral, Qwen2, Qwen3)",
    ),
    "xpress": Algorithm(
        "specbatch.drafters.xpress",
        default_tokens=15,
        tree="block",
        draft=_BLOCK_DRAFT,
        published=Published(("Qwen3XPressModel",), has="a refiner"),
        settings=("draft_quantization",),
        training=Training(
            "specbatch.training.xpress",
            {"draft_layers": 2, "block_size": 8, "anchors": 16, "refiner_rank": 256, "token_weight": 0.1},
        ),
        in_vllm={"method": "dflash"},
    ),
}


def algorithms_with(setting: str) -> tuple[str, ...]:
    """Names of the algorithms that take `setting`."""
    return tuple(name for name, algorithm in ALGORITHMS.items() if setting in algorithm.settings)


def algorithm_of(config: Mapping[str, Any]) -> str | None:
    """The algorithm that the config.json of a draft was published for; None if it does not say, as that of a model."""
    kind, names = config.get("speculators_model_type"), config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) else ""
    found = None
    for algorithm, entry in ALGORITHMS.items():
        files = entry.published
        is_named = (
            any(fnmatchcase(name, one) for one in files.architectures) if kind is None else kind in files.speculators
        )
        if is_named and entry.alias_of is None and files.is_own(config):
            found = algorithm
    return found


def causes_of_low_acceptance(name: str, load_format: str) -> str:
    """Likely causes of a low acceptance rate with algorithm `name`, in the order to check them."""
    if load_format == "dummy":
        return "the weights are random (--load-format dummy), for which --simulate-accept-length was made"
    return ALGORITHMS[name].low_acceptance
