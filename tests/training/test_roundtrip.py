"""Trained heads round-trip: the engine accepts as many drafts at every verify as the trainer's own pass predicts."""

from __future__ import annotations

import json
from copy import copy
from dataclasses import replace

import pytest
import torch
from chi_square import smallest_p_value
from crossed import first_quick
from safetensors.torch import load_file
from trained import LAYER, TRAINED, weights

from specbatch import Engine, EngineConfig, SamplingParams, Speculation
from specbatch.algorithms import ALGORITHMS
from specbatch.errors import SpecbatchError
from specbatch.training.data import Batch, Example, split
from specbatch.training.dflash import feature_layers
from specbatch.training.eagle3 import Eagle3Head
from specbatch.training.files import write_beside, write_head
from specbatch.training.mtp import takes_a_head
from specbatch.training.peagle import PEagleHead
from specbatch.training.recipe import HEADS, Recipe
from specbatch.training.trainer import make_head
from specbatch.weights import open_checkpoint

from .conftest import CPU, LAYERS, MAX_LEN, VOCABULARY

HIDDEN, DIM = 24, 8


def test_every_head_that_can_be_trained_is_tested():
    assert TRAINED.keys() == set(HEADS)


@pytest.mark.parametrize("algorithm", HEADS)
def test_tensor_names_match_published_heads(trained, algorithm):
    """Their shapes are checked when the engine loads them."""
    folder = trained[algorithm][0]
    file = "model-mtp.safetensors" if ALGORITHMS[algorithm].in_target else "model.safetensors"
    assert load_file(folder / file).keys() == TRAINED[algorithm].tensors


def test_configs_hold_the_keys_that_readers_need(trained):
    eagle, dflash = (json.loads((trained[name][0] / "config.json").read_text()) for name in ("eagle3", "dflash"))
    assert eagle["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (eagle["model_type"], eagle["num_hidden_layers"], eagle["draft_vocab_size"]) == ("llama", 1, 24)
    assert "eagle_config" not in eagle  # the usual layers need no list, and lists are read in two ways
    assert dflash["architectures"] == ["DFlashDraftModel"]
    assert (dflash["model_type"], dflash["block_size"], dflash["num_target_layers"]) == ("qwen3", 5, LAYERS)
    assert dflash["dflash_config"] == {"mask_token_id": VOCABULARY - 2, "target_layer_ids": [1, 4, 6]}
    parallel = json.loads((trained["peagle"][0] / "config.json").read_text())
    assert (parallel["architectures"], parallel["num_hidden_layers"]) == (["LlamaForCausalLMEagle3"], 2)
    assert (parallel["parallel_drafting"], parallel["ptd_token_id"]) == (True, VOCABULARY - 2)
    first = json.loads((trained["eagle"][0] / "config.json").read_text())
    assert (first["architectures"], first["num_hidden_layers"]) == (["LlamaForCausalLMEagle"], 2)
    dspark = json.loads((trained["dspark"][0] / "config.json").read_text())
    assert (dspark["architectures"], dspark["block_size"], dspark["markov_rank"]) == (["Qwen3DSparkModel"], 4, 8)
    assert (dspark["mask_token_id"], dspark["target_layer_ids"]) == (VOCABULARY - 2, [1, 4, 6])
    dflash2 = json.loads((trained["dflash2"][0] / "config.json").read_text())
    assert (dflash2["architectures"], dflash2["block_size"]) == (["DFlash2DraftModel"], 5)
    own = {"conv_kernel_size": 2, "conv_group_size": 1, "selector_rank": 6, "selector_top_k": 16}
    assert dflash2["dflash_config"] == dflash["dflash_config"] | own
    domino, lilicorr, xpress = (
        json.loads((trained[name][0] / "config.json").read_text()) for name in ("domino", "lilicorr", "xpress")
    )
    assert (domino["architectures"], domino["block_size"]) == (["DFlashDraftModel"], 4)
    own = {"projector_type": "domino", "pure_draft_prefix_len": 1, "shift_label": True}
    assert domino["dflash_config"] == dflash["dflash_config"] | own | {"gru_hidden_dim": 12, "emb_dim": 8}
    assert (lilicorr["architectures"], lilicorr["block_size"]) == (["LiLiCorrDraftModel"], 5)
    own = {"lilicorr_hidden_size": 16, "lilicorr_candidate_topk": 8, "lilicorr_logit_scale": 8.0}
    assert lilicorr["dflash_config"] == lilicorr["dflash_config"] | dflash["dflash_config"] | own
    assert (xpress["architectures"], xpress["block_size"]) == (["Qwen3XPressModel"], 5)
    assert (xpress["xpress_rank"], xpress["xpress_mlp_hidden"], xpress["xpress_num_passes"]) == (8, 16, 6)
    for config in (first, parallel, eagle, dflash, dflash2, dspark, domino, lilicorr, xpress):
        assert (config["rope_theta"], config["head_dim"], config["vocab_size"]) == (500.0, DIM, VOCABULARY)


def test_vocabulary_maps_agree(trained, examples):
    tensors = load_file(trained["eagle3"][0] / "model.safetensors")
    ids = torch.arange(24) + tensors["d2t"]
    assert tensors["t2d"].nonzero().flatten().tolist() == ids.tolist()
    kept, _ = split(examples, 10)
    seen = torch.bincount(torch.tensor([t for item in kept for t in item.tokens[item.prompt :]]), minlength=VOCABULARY)
    assert seen[ids].min() >= seen[~tensors["t2d"]].max()


def test_mtp_head_is_stored_with_the_target(trained, target_folder):
    folder = trained["mtp"][0]
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    own = load_file(target_folder / "model.safetensors")
    assert {name for name, file in index.items() if file == "model.safetensors"} == set(own)
    assert {name for name, file in index.items() if file == "model-mtp.safetensors"} == TRAINED["mtp"].tensors
    before = json.loads((target_folder / "config.json").read_text())
    after = json.loads((folder / "config.json").read_text())
    assert after == before | {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}


@torch.no_grad()
def read_back(algorithm, folder, target, examples, checkpoint):
    """The trainer's module with the weights from the files."""
    settings = TRAINED[algorithm].recipe | {"max_len": MAX_LEN, "held_out": 10, "seed": 99}
    if "anchors" in ALGORITHMS[algorithm].training.settings:
        settings["anchors"] = MAX_LEN
    head = make_head(Recipe(algorithm, **settings), target, split(examples, 10)[0], checkpoint.tokenizer().vocab_size)
    stored = load_file(folder / head.file)
    for name, tensor in head.tensors().items():
        if isinstance(tensor, torch.nn.Parameter):
            tensor.copy_(stored[name])
    if isinstance(head, PEagleHead):
        head.mask_embedding.copy_(stored["embed_tokens.weight"][head.config()["ptd_token_id"]])
    return head


@torch.no_grad()
def emitted(head, target, example: Example) -> list[int]:
    """Tokens of each verify of a greedy answer: the drafts accepted after each root, plus one."""
    counts = []
    root = example.prompt
    while root + 1 < len(example.tokens):
        accepted = 0
        while accepted < head.drafts and root + accepted + 2 <= len(example.tokens):
            # In this text only the root is followed by that many tokens.
            alone = Example(example.tokens[: root + accepted + 2], root)
            batch = Batch.of([alone], CPU)
            chains, places = head.score(batch, target, torch.Generator().manual_seed(0)).sums[2:, accepted].tolist()
            assert places == 1
            if not chains:
                break
            accepted += 1
        counts.append(min(accepted + 1, len(example.tokens) - root - 1))
        root += accepted + 1
    return counts


@pytest.mark.parametrize("algorithm", first_quick(1, HEADS))
def test_engine_acceptance_matches_the_trainer(
    trained, algorithm, target, target_folder, examples, checkpoint, tmp_path
):
    head = read_back(algorithm, trained[algorithm][0], target, examples, checkpoint)
    folder = trained[algorithm][0]
    if algorithm == "mtp":  # the gates of a short training are all about one half
        folder = tmp_path
        with torch.no_grad():
            gates = head.layers[0].self_attn.q_proj.weight.view(-1, 2, DIM, HIDDEN)[:, 1]
            gates += torch.randn(gates.shape, generator=torch.Generator().manual_seed(8)) * 2
        write_beside(folder, head, torch.float32, takes_a_head(open_checkpoint(str(target_folder))))
    model = folder if algorithm == "mtp" else target_folder
    mixed = assert_same_acceptance(head, target, split(examples, 10)[1][:4], model, algorithm, folder)
    assert len(mixed) > 2


def assert_same_acceptance(head, target, shown, model, algorithm, folder):
    """An engine emits as many tokens in each verify as the trainer predicts. Returns these numbers."""
    speculation = Speculation(
        algorithm=algorithm, draft=None if algorithm == "mtp" else str(folder), draft_tokens=head.drafts
    )
    config = EngineConfig(
        model=str(model), device="cpu", max_model_len=MAX_LEN + 8, max_running=4, page_size=4, speculation=speculation
    )
    longest = max(len(item.tokens) - item.prompt for item in shown)
    with Engine(config) as engine:
        prompts = [list(item.tokens[: item.prompt]) for item in shown]
        completions = engine.generate(prompts, SamplingParams(max_new_tokens=longest))
    mixed = set()
    for item, completion in zip(shown, completions, strict=True):
        assert tuple(completion.token_ids) == item.tokens[item.prompt :]
        wanted = emitted(head, target, item)
        mixed |= set(wanted)
        histogram = completion.metrics.emitted_histogram
        counts = [wanted.count(count) for count in range(len(histogram))]
        assert sum(counts) == len(wanted)
        assert histogram == counts
    return mixed


@pytest.mark.slow
@pytest.mark.parametrize("verification", ["token", "block"])
def test_sampled_tokens_follow_the_target_with_a_trained_dspark_draft(trained, target, target_folder, verification):
    """Its drafts depend on each other, and many of them are accepted."""
    requests, top_k, temperature, prompt = 3000, 3, 4.0, [5, 9, 17]
    folder = trained["dspark"][0]
    speculation = Speculation("dspark", draft=str(folder), draft_tokens=4, verification=verification)
    config = EngineConfig(
        model=str(target_folder), device="cpu", max_model_len=MAX_LEN, max_running=400, speculation=speculation
    )
    params = [
        SamplingParams(temperature=temperature, top_k=top_k, seed=seed, max_new_tokens=3, ignore_eos=True)
        for seed in range(requests)
    ]
    with Engine(config) as engine:
        done = engine.generate([prompt] * requests, params)
        metrics = engine.record().metrics
    assert 0.1 < metrics["accepted_tokens"] / metrics["drafted_tokens"] < 0.9
    chances = torch.zeros((VOCABULARY,) * 3)
    texts = {(): 1.0}
    for _ in range(3):
        longer = {}
        for text, chance in texts.items():
            last, _ = target.features(Batch.of([Example((*prompt, *text), len(prompt))], CPU), ())
            best = target.logits(last[0, -1:])[0].topk(top_k)
            for token, share in zip(best.indices.tolist(), (best.values / temperature).softmax(0), strict=True):
                longer[(*text, token)] = chance * float(share)
        texts = longer
    for text, chance in texts.items():
        chances[text] = chance
    assert smallest_p_value(torch.tensor([item.token_ids for item in done]), chances) > 1e-3


def test_second_mtp_head_is_refused(trained):
    with pytest.raises(SpecbatchError, match="already has an MTP head"):
        takes_a_head(open_checkpoint(str(trained["mtp"][0])))


@torch.no_grad()
def test_engine_runs_an_eagle3_head_of_two_layers(target, target_folder, examples, tmp_path):
    """In vLLM's names; SafeAILab's format has one layer."""
    head = Eagle3Head(target, torch.arange(VOCABULARY), steps=3, layers=2, max_len=MAX_LEN, seed=4)
    write_head(tmp_path, head, torch.float32)
    names = load_file(tmp_path / "model.safetensors").keys()
    first = weights("layers.0.", "hidden_norm", *LAYER) | weights("layers.1.", *LAYER)
    assert names == {"d2t", "t2d"} | weights("", "fc", "norm", "lm_head") | first
    assert_same_acceptance(head, target, examples[:3], target_folder, "eagle3", tmp_path)


@torch.no_grad()
def test_engine_reads_the_layers_that_a_head_was_trained_on(target, target_folder, examples, tmp_path):
    """With another number of them than usual, and the output of the last layer."""
    kept = torch.arange(VOCABULARY)
    head = Eagle3Head(target, kept, steps=3, max_len=MAX_LEN, seed=4, boundaries=(1, 4, 6, LAYERS))
    write_head(tmp_path, head, torch.float32)
    assert_same_acceptance(head, target, examples[:3], target_folder, "eagle3", tmp_path)


def with_layers(target, count):
    """The target with the config of one with so many layers."""
    found = copy(target)
    found.config = replace(target.config, num_layers=count)
    return found


def test_shallow_target_uses_its_lowest_layers(target):
    """Readers' defaults would name a layer twice there, so the config lists boundaries itself."""
    head = Eagle3Head(with_layers(target, 4), torch.arange(VOCABULARY), steps=1, max_len=8, seed=0)
    assert head.aux == (0, 1, 2)
    assert head.config()["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert [feature_layers(36, 5), feature_layers(36, 2), feature_layers(4, 2), feature_layers(2, 1)] == [
        (1, 9, 17, 25, 33), (1, 17, 33), (1,), (0,)
    ]  # fmt: skip


@pytest.mark.parametrize("algorithm", ["eagle3", "peagle", "dflash", "dflash2", "dspark", "xpress"])
def test_target_of_one_layer_is_refused(target, examples, algorithm):
    with pytest.raises(SpecbatchError, match=f"^algorithm='{algorithm}': .* has one layer .*; use mtp$"):
        make_head(Recipe(algorithm=algorithm), with_layers(target, 1), examples, 0)
