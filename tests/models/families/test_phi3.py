"""LongRoPE of Phi-3 to Phi-4: `max_model_len` decides on the factors, which are those of transformers for a text that
is as long."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from uncached import decoder_of, logits_of

from specbatch import Engine, EngineConfig, SpecbatchError, Speculation
from specbatch.models.decoder import Decoder
from specbatch.weights import open_checkpoint

ORIGINAL, LONGEST = 24, 96
SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 72, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": LONGEST, "original_max_position_embeddings": ORIGINAL,
    "partial_rotary_factor": 0.67, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FACTORS = {"type": "longrope", "short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [1.5, 3.0, 5.0, 9.0]}


@pytest.fixture(scope="module")
def theirs() -> Any:
    torch.manual_seed(5)
    model = hf.Phi3ForCausalLM(hf.Phi3Config(**SIZES, rope_scaling=FACTORS)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=1.2 / parameter.shape[1] ** 0.5)
    return model


@pytest.fixture(scope="module")
def folder(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("phi3")
    theirs.save_pretrained(found)
    return found


@pytest.mark.parametrize(("max_model_len", "count"), [(None, 23), (24, 24), (25, 25), (96, 90)])
def test_logits_are_those_of_transformers(folder: Path, theirs: Any, max_model_len: int | None, count: int) -> None:
    found = open_checkpoint(str(folder), max_model_len=max_model_len)
    assert found.config.max_position == (ORIGINAL if count <= ORIGINAL else LONGEST)
    tokens = torch.randint(0, 300, (count,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens[None], use_cache=False).logits[0]
    torch.testing.assert_close(logits_of(decoder_of(found), tokens), expected, rtol=0, atol=1e-4)


def engine(folder: Path, max_model_len: int | None, lines: list[str], **more: Any) -> Engine:
    config = EngineConfig(
        model=str(folder), load_format="dummy", device="cpu", max_running=2, max_model_len=max_model_len, page_size=4,
        speculation=Speculation("standalone", draft=str(folder / "config.json"), draft_tokens=2),
    )  # fmt: skip
    return Engine(config, log=lines.append, **more)


def tables(model: Decoder) -> torch.Tensor:
    return model.layers[0].mixer.heads.cos[:10]  # type: ignore[union-attr]


def test_engine_logs_the_factors_and_shares_weights(folder: Path) -> None:
    lines: list[str] = []
    with engine(folder, None, lines) as short:
        assert short.plan.max_model_len == ORIGINAL
        note = "LongRoPE: the short factors, for texts of up to 24 tokens; with a max_model_len beyond, of up to 96, "
        assert [line for line in lines if "LongRoPE" in line] == [
            f"{whose}{note}the long factors for all texts" for whose in ("", "draft: ")
        ]
        lines.clear()
        with engine(folder, 96, lines, weights_of=short) as shared, engine(folder, 96, []) as long:
            note = "LongRoPE: the long factors for all texts, as max_model_len is beyond 24"
            assert [line for line in lines if "LongRoPE" in line] == [note, f"draft: {note}"]
            assert torch.equal(tables(shared.parts.model), tables(long.parts.model))
            assert not torch.equal(tables(short.parts.model), tables(long.parts.model))
    with pytest.raises(SpecbatchError, match="max_model_len=97: the model supports at most 96"):
        engine(folder, 97, [])


def test_without_longer_texts_nothing_is_to_be_decided(folder: Path, tmp_path: Path) -> None:
    described = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": ORIGINAL}
    (tmp_path / "config.json").write_text(json.dumps(described))
    config = open_checkpoint(str(tmp_path), "dummy").config
    assert config.note is None
    assert config.for_length(ORIGINAL + 1).max_position == ORIGINAL
