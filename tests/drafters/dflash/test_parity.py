"""A block draft with its paged context matches the reference, recomputed from all features at every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from block_drafts import BASE, BLOCK, HIDDEN, KINDS, LAYERS, LENGTHS, VOCABULARY, Reference, Run, random_draft
from crossed import crossed, slow_but

from specbatch.kernels.sampling.rng import DRAFT, uniform_ref, verify_keys
from specbatch.kernels.sampling.sample import sample_ref
from specbatch.models.decoder import Decoder
from specbatch.models.heads.dflash import DFlashConfig


@pytest.fixture
def start(bench: Any, tiny: Any) -> Callable[..., Run]:
    def run(kind: str, *how: Any) -> Run:
        return Run(bench, tiny, BASE | KINDS[kind], *how)

    return run


KNOWN = [0, 2, 3, 7, 8, 12]


@pytest.mark.parametrize(("kind", "count", "chunk", "known"), crossed(KINDS, [BLOCK - 1, 2], [1000, 4, 3], [[], KNOWN]))
def test_distributions_match_reference(start: Any, kind: str, count: int, chunk: int, known: Any) -> None:
    assert start(kind, count, chunk, known).worst() < 2e-5


@pytest.mark.parametrize("kind", slow_but(["sliding and full", "causal"], KINDS))
def test_draft_length_may_change_every_step(start: Any, kind: str) -> None:
    """None or the first few of a block, which is filled as a whole."""
    run = start(kind, BLOCK - 1, 4)
    for count in (0, 0, BLOCK - 1, 1, 0, 2, 1, BLOCK - 1, 0, 1):
        assert run.step([run.random.randint(0, count) for _ in LENGTHS], count) < 2e-5


def test_sampled_drafts_use_the_random_numbers_of_their_positions(start: Any) -> None:
    """The random number of a draft depends only on the seed and the positions of draft and root in the text."""
    run = start("sliding and full", BLOCK - 1, 1000)
    step = run.here.step(5, spare=0, temperature=1.0)
    proposal = run.drafts.propose(step)
    for index, text in enumerate(run.here.texts):
        for place in range(5):
            key = verify_keys(torch.tensor(len(text) + place), step.lengths[index])
            number = uniform_ref(step.sampling.seeds[index], key, DRAFT)
            assert proposal.tokens[index, place] == sample_ref(proposal.probabilities[index, place], number)


@pytest.mark.parametrize(("kind", "known"), [("full", []), ("sliding and full", KNOWN)])
def test_greedy_drafts_are_argmax(start: Any, kind: str, known: list[int]) -> None:
    run = start(kind, BLOCK - 1, 7, known)
    for accepted in run.here.acceptances(run.count, run.random):
        proposal = run.drafts.propose(run.here.step(run.count))
        assert proposal.probabilities is None
        for drafts, logits in zip(proposal.tokens, run.all_logits(proposal.tokens), strict=True):
            best = logits.topk(2, -1).values
            clear = best[:, 0] - best[:, 1] > 1e-4
            assert clear.double().mean() > 0.5
            assert torch.equal(drafts[clear], logits.argmax(-1)[clear])
        run.step(accepted)


def test_batch_may_shrink_and_reorder(start: Any) -> None:
    run = start("sliding and full", 3, 1000)
    while len(run.here.texts) > 1:
        assert run.step([run.random.randint(0, 3) for _ in run.here.texts]) < 2e-5
        order = run.random.sample(range(len(run.here.texts)), len(run.here.texts) - 1)
        run.here.rows, run.features = run.here.rows[order], run.features[order]
        run.here.texts = [run.here.texts[index] for index in order]


# Other implementations of the same model match the reference.


@pytest.mark.parametrize("start", [1, 9, 30])
def test_reference_matches_transformers(tiny: Any, start: int) -> None:
    """Its DFlash models differ in names and have no causal layers."""
    muse = pytest.importorskip("transformers.models.muse_glimmer_assistant")
    raw = BASE | KINDS["full"]
    tensors = random_draft(DFlashConfig.from_dict(raw))
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    theirs = muse.MuseGlimmerAssistantModel(
        muse.MuseGlimmerAssistantConfig(
            **{key: raw[key] for key in (*keys, "head_dim", "rms_norm_eps", "block_size")},
            rope_parameters={"rope_type": "default", "rope_theta": raw["rope_theta"]},
            layer_types=["full_attention"] * 2,
            target_layer_ids=[2, 0],
        )
    )
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    theirs.load_state_dict({names.get(name, name): value for name, value in tensors.items()})
    same_hidden(raw, tensors, tiny(VOCABULARY, layers=LAYERS), start, theirs, "context_hidden_states", "noise_embeds")


@pytest.mark.parametrize("kind", KINDS)
def test_reference_matches_the_authors_package(tiny: Any, kind: str) -> None:
    """pip install --no-deps dflash"""
    authors = pytest.importorskip("dflash.model")
    raw = BASE | KINDS[kind]
    tensors = random_draft(DFlashConfig.from_dict(raw))
    theirs = authors.DFlashDraftModel(authors.Qwen3Config(**raw))
    theirs.load_state_dict(tensors)
    same_hidden(raw, tensors, tiny(VOCABULARY, layers=LAYERS), 12, theirs, "target_hidden", "noise_embedding")


@torch.inference_mode()
def same_hidden(
    raw: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    target: Decoder,
    start: int,
    theirs: Any,
    context: str,
    block: str,
) -> None:
    features = torch.randn(start, 2 * HIDDEN, generator=torch.Generator().manual_seed(start))
    ours = Reference(raw, tensors, target).hidden(features, 3, BLOCK - 1)
    x = target.embedding[[3] + [11] * (BLOCK - 1)]
    found = theirs.eval()(**{context: features[None], block: x[None]}, position_ids=torch.arange(start + BLOCK)[None])
    found = found if isinstance(found, torch.Tensor) else found.last_hidden_state
    torch.testing.assert_close(found[0].double(), ours, rtol=1e-5, atol=2e-5)
