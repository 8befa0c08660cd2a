"""A DSpark draft with its paged context matches the reference: each draft's distribution is the one given the drafts
before it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from block_drafts import BASE, HIDDEN, LAYERS, VOCABULARY, Run, check_greedy_chain, random_draft
from crossed import crossed

from specbatch.drafters.dspark import DSparkDrafter
from specbatch.kernels.sampling.rng import DRAFT, uniform_ref, verify_keys
from specbatch.kernels.sampling.sample import sample_ref
from specbatch.models.heads.dspark import DSpark, DSparkConfig
from specbatch.models.weight_reader import Reader
from specbatch.weights import open_checkpoint

DSPARK: dict[str, Any] = BASE | {
    "architectures": ["Qwen3DSparkModel"], "block_size": 5, "markov_rank": 8, "markov_head_type": "vanilla",
    "enable_confidence_head": True, "confidence_head_with_markov": True,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn", "confidence_head_with_markov": False},
    "after the anchor": {"sample_from_anchor": False, "block_size": 6},
}
KNOWN = [0, 2, 3, 7, 8, 12]


@pytest.fixture
def start(bench: Any, tiny: Any, reference: Any) -> Callable[..., Run]:
    class Sequential(Run):
        config, network, drafter = DSparkConfig, DSpark, DSparkDrafter

    Sequential.reference = reference

    def run(kind: str, *how: Any) -> Run:
        return Sequential(bench, tiny, DSPARK | KINDS[kind], *how)

    return run


@pytest.mark.parametrize(("kind", "count", "chunk", "known"), crossed(KINDS, [5, 2, 1], [1000, 4], [[], KNOWN]))
def test_distributions_match_reference(start: Any, kind: str, count: int, chunk: int, known: Any) -> None:
    assert start(kind, count, chunk, known).worst() < 2e-5


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_drafts_are_argmax_given_those_before(start: Any, kind: str) -> None:
    check_greedy_chain(start(kind, 5, 7, KNOWN), 1e-4)


def test_samples_are_drawn_from_the_given_distributions(start: Any) -> None:
    """The random number of a draft depends only on the seed and the positions of draft and root in the text. Greedy
    requests of the batch have one-hot distributions."""
    run = start("rnn", 5, 1000)
    temperature = torch.tensor([1.0, 0.0, 0.7, 1.5, 1.0, 0.0])
    step = run.here.step(5, temperature=temperature)
    proposal = run.drafts.propose(step)
    logits = run.all_logits(proposal.tokens)
    for index, text in enumerate(run.here.texts):
        wanted = (logits[index] / temperature[index]).softmax(-1)
        if temperature[index] == 0:
            wanted = torch.nn.functional.one_hot(logits[index].argmax(-1), VOCABULARY).double()
        torch.testing.assert_close(proposal.probabilities[index].double(), wanted, atol=2e-5, rtol=0)
        for place in range(5):
            key = verify_keys(torch.tensor(len(text) + place), step.lengths[index])
            number = uniform_ref(step.sampling.seeds[index], key, DRAFT)
            assert proposal.tokens[index, place] == sample_ref(proposal.probabilities[index, place], number)


@pytest.mark.parametrize("kind", KINDS)
def test_confidence_matches_reference(tiny: Any, reference: Any, kind: str) -> None:
    raw, drafts = DSPARK | KINDS[kind], [3, 1, 4, 1, 5]
    config, target = DSparkConfig.from_dict(raw), tiny(VOCABULARY, layers=LAYERS)
    tensors = random_draft(config)
    model = DSpark(Reader(config, tensors.__getitem__, torch.float32, torch.device("cpu"), of_draft=True), target, 256)
    by_reference = reference(raw, tensors, target)
    features = torch.randn(9, 2 * HIDDEN, generator=torch.Generator().manual_seed(3))
    rows = by_reference.rows(features, 6, 5).float()
    found = model.confidence(rows, model.markov.embedding[[6, *drafts[:-1]]])
    torch.testing.assert_close(found.double(), by_reference.confidence(features, 6, 5, drafts), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@torch.inference_mode()
def test_reference_matches_the_authors_code(tiny: Any, reference: Any, kind: str, tmp_path: Path) -> None:
    """A checkout of github.com/deepseek-ai/DeepSpec in PYTHONPATH. Its checkpoint is read as it writes it."""
    authors = pytest.importorskip("deepspec.modeling.dspark.qwen3.modeling")
    transformers = pytest.importorskip("transformers")
    raw, target = DSPARK | KINDS[kind] | DSPARK["dflash_config"], tiny(VOCABULARY, layers=LAYERS)
    own = {key: value for key, value in raw.items() if key not in ("dflash_config", "rope_theta")}
    described = transformers.Qwen3Config(
        **own, rope_parameters={"rope_theta": raw["rope_theta"], "rope_type": "default"}, tie_word_embeddings=False,
        layer_types=["full_attention"] * 2, num_anchors=4,
    )  # fmt: skip
    described._attn_implementation = "eager"
    theirs = authors.Qwen3DSparkModel(described).eval()
    theirs.load_state_dict(random_draft(DSparkConfig.from_dict(raw)), strict=False)
    theirs.embed_tokens.weight.copy_(target.embedding)
    theirs.lm_head.weight.copy_(target.logits(torch.eye(HIDDEN)).T)
    theirs.save_pretrained(tmp_path)
    found = open_checkpoint(str(tmp_path), read=DSparkConfig.from_dict)
    ours = reference(raw, {name: found.tensor(name) for name in found.names()}, target)
    features = torch.randn(9, 2 * HIDDEN, generator=torch.Generator().manual_seed(3))
    tokens = torch.tensor([[3, *[11] * 4]])
    hidden = theirs._forward_backbone(
        target_hidden_states=features[None], noise_embedding=theirs.embed_tokens(tokens), attention_mask=None,
        position_ids=torch.arange(14)[None], is_causal=False,
    )  # fmt: skip
    first, base = tokens[:, 0], theirs.compute_logits(hidden)
    drafts, logits = theirs.sample_draft_tokens(base, first_prev_token_ids=first, hidden_states=hidden)
    before = torch.cat([tokens[:, :1], drafts[:, :-1]], 1)
    confidence = theirs.predict_confidence_step(hidden, prev_token_ids=before).sigmoid()
    how = (features, 3, 5, drafts[0].tolist())
    torch.testing.assert_close(logits[0].double(), ours.logits(*how), rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(confidence[0].double(), ours.confidence(*how), rtol=1e-5, atol=2e-5)
