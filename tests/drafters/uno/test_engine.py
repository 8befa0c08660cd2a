"""UNO drafts in whole engines over the toy model: every proposal is that of a float64 reference, and configs that are
not supported are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from crossed import crossed
from watched_blocks import paths

from specbatch import SamplingParams, SpecbatchError, Speculation
from specbatch.drafters.uno import UnoDrafter, UnoTree
from specbatch.kernels.sampling.rng import NOISE, uniform_ref, verify_keys
from specbatch.weights import open_checkpoint

from .conftest import MODULES, UnoReference

SHAPES: dict[str, dict[str, int]] = {
    "chain": {"draft_tokens": 4},
    "tree": {"draft_steps": 3, "draft_topk": 2, "draft_tokens": 6},
}


@pytest.mark.parametrize(("shape", "schedule", "adapted"), crossed(SHAPES, ["v2", "v1"], ["all", "some"]))
def test_proposals_match_the_reference(
    toy: Any, toy_engine: Any, write_adapter: Any, monkeypatch: Any, shape: str, schedule: str, adapted: str
) -> None:
    folder, tensors = write_adapter(target_modules=[*MODULES] if adapted == "all" else ["q_proj", "v_proj", "up_proj"])
    found, compared = toy.checkpoint, []
    reference = UnoReference(found.config, found.tensors, tensors)
    kind = UnoTree if shape == "tree" else UnoDrafter
    propose = kind.propose

    def watched(own: UnoDrafter, step: Any) -> Any:
        proposal = propose(own, step)
        for place, (slot, length) in enumerate(zip(step.slots.tolist(), step.lengths.tolist(), strict=True)):
            if not slot:
                continue
            text, rows = step.batch.tokens[slot, : length + 1].tolist(), SHAPES[shape].get("draft_steps", 4)
            keys = verify_keys(torch.arange(length + 1, length + rows), torch.tensor(length))
            noise = (uniform_ref(step.sampling.seeds[place], keys, NOISE) * 37).long().tolist()
            best = reference.logits([*text, *noise], rows - 1)[-rows:].topk(2)
            if shape == "chain":
                clear = best.values[:, 0] - best.values[:, 1] > 1e-3
                assert torch.equal(proposal.tokens[place][clear], best.indices[clear, 0])
                compared.append(int(clear.sum()))
            else:  # nodes are the likeliest tokens of each depth, of which the first one's are always there
                texts = paths(proposal.tokens[place], proposal.ancestors[place])
                assert (int(best.indices[0, 0]),) in texts
                assert all(text[-1] in best.indices[len(text) - 1] for text in texts)
                compared.append(len(texts))
        return proposal

    monkeypatch.setattr(kind, "propose", watched)
    engine = toy_engine(
        speculation=Speculation("uno", schedule, draft=str(folder), **SHAPES[shape]), page_size=3, load_format="auto"
    )
    prompts = [list(prompt) for prompt in toy.prompts()[5:9]]
    done = engine.generate(prompts, SamplingParams(max_new_tokens=16, ignore_eos=True))
    assert [tuple(item.token_ids) for item in done] == [toy.greedy(tuple(prompt))[:16] for prompt in prompts]
    assert sum(compared) > 100
    assert engine.record().metrics["accept_length"] > 1.9  # the first draft is the target's own token


@pytest.mark.parametrize("shape", [{"draft_tokens": 1}, {"draft_steps": 1, "draft_topk": 2, "draft_tokens": 2}])
def test_one_row_needs_no_noise(toy: Any, toy_engine: Any, write_adapter: Any, shape: dict[str, int]) -> None:
    speculation = Speculation("uno", draft=str(write_adapter()[0]), **shape)
    engine = toy_engine(speculation=speculation, page_size=3, load_format="auto")
    prompt = toy.prompts()[5]
    [done] = engine.generate([list(prompt)], SamplingParams(max_new_tokens=16, ignore_eos=True))
    assert tuple(done.token_ids) == toy.greedy(tuple(prompt))[:16]
    assert engine.record().metrics["accept_length"] > 1.8


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "LOHA"}, "peft_type='LOHA': a UNO draft is a 'LORA'"),
    ({"use_dora": True}, "use_dora=True: not supported"),
    ({"use_rslora": True}, "use_rslora=True: not supported"),
    ({"bias": "all"}, "bias='all': not supported"),
    ({"rank_pattern": {"q_proj": 4}}, "rank_pattern=.*: not supported; all matrices must have one rank"),
    ({"r": 0}, "r=0"),
    ({"r": 4}, r"lora_A.weight is \[3, 32\]; its config requires \[4, 32\]"),
    ({"lora_alpha": -1}, "lora_alpha=-1"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_unsupported_adapters_are_refused(toy_engine: Any, write_adapter: Any, changes: Any, message: str) -> None:
    folder, _ = write_adapter(**changes)
    with pytest.raises(SpecbatchError, match=message):
        toy_engine(speculation=Speculation("uno", draft=str(folder)), load_format="auto")


def test_other_drafts_and_other_uses_of_an_adapter_are_refused(
    toy_engine: Any, write_adapter: Any, tmp_path: Any
) -> None:
    folder, _ = write_adapter()
    with pytest.raises(SpecbatchError, match=r"no config.json; it has a LoRA, for which use algorithm 'uno'"):
        toy_engine(speculation=Speculation("eagle", draft=str(folder)), load_format="auto")
    with pytest.raises(SpecbatchError, match=r"no config.json; it has a LoRA, for which use algorithm 'uno'"):
        open_checkpoint(str(folder))
    (folder / "adapter_config.json").rename(folder / "config.json")
    with pytest.raises(SpecbatchError, match=r"the folder has no adapter_config.json"):
        toy_engine(speculation=Speculation("uno", draft=str(folder)), load_format="auto")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 3, "target_modules": ["lm_head"]}')
    with pytest.raises(SpecbatchError, match=r"target_modules=\['lm_head'\]: list some of q_proj"):
        toy_engine(speculation=Speculation("uno", draft=str(folder)), load_format="auto")


def test_targets_without_dense_layers_and_ranks_are_refused(targets: Any, toy_engine: Any) -> None:
    with pytest.raises(SpecbatchError, match="algorithm='uno': a UNO draft adapts dense layers"):
        targets.engine("qwen3-moe", "uno")
    with pytest.raises(SpecbatchError, match="tensor_parallel=2: the adapter of a UNO draft is not divided"):
        toy_engine(speculation=Speculation("uno", draft="dummy"), tensor_parallel=2)
    with pytest.raises(SpecbatchError, match="draft_steps=3: a block is drafted in one pass; leave it out"):
        toy_engine(speculation=Speculation("uno", draft="dummy", draft_steps=3))
