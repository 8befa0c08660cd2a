"""Writes untrained draft heads with speculators: python write_speculators.py FOLDER"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from speculators.models.dflash import DFlashDraftModel
from speculators.models.eagle3 import Eagle3DraftModel
from tiny_llama import VOCABULARY, copy, write_model
from transformers import LlamaConfig, Qwen3Config

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def main(out: Path) -> None:
    known = torch.zeros(VOCABULARY, dtype=torch.bool)
    known[::2] = True
    maps = {"t2d": known, "d2t": torch.arange(0, VOCABULARY, 2) - torch.arange(VOCABULARY // 2)}
    with TemporaryDirectory() as folder:
        target = str(write_model(Path(folder), torch.bfloat16))
        torch.manual_seed(3)
        eagle3 = Eagle3DraftModel.from_training_args(
            LlamaConfig(**SIZES, num_hidden_layers=1), **maps, verifier_name_or_path=target, ttt_steps=5,
            draft_vocab_size=VOCABULARY // 2, norm_before_residual=False, target_layer_ids=[1, 2],
        )  # fmt: skip
        eagle3.to(torch.bfloat16).save_pretrained(f"{folder}/eagle3")
        copy(Path(folder, "eagle3"), out / "speculators-eagle3", "config.json", "model.safetensors")
        dflash = DFlashDraftModel.from_training_args(
            Qwen3Config(**SIZES, num_hidden_layers=2), **maps, verifier_name_or_path=target, block_size=6,
            draft_vocab_size=VOCABULARY // 2, target_layer_ids=[1], mask_token_id=VOCABULARY - 1,
        )  # fmt: skip
        dflash.to(torch.bfloat16).save_pretrained(f"{folder}/dflash")
        copy(Path(folder, "dflash"), out / "speculators-dflash", "config.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
