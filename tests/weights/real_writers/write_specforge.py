"""Writes an untrained EAGLE-3 head with SpecForge: python write_specforge.py FOLDER"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
from tiny_llama import VOCABULARY
from transformers import LlamaConfig


def main(out: Path) -> None:
    torch.manual_seed(3)
    config = LlamaConfig(
        architectures=["LlamaForCausalLMEagle3"], vocab_size=VOCABULARY, draft_vocab_size=VOCABULARY // 2,
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "use_aux_hidden_state": True},
    )  # fmt: skip
    head = LlamaForCausalLMEagle3(config)
    head.d2t.copy_(torch.arange(0, VOCABULARY, 2) - torch.arange(VOCABULARY // 2))
    head.t2d.copy_(torch.arange(VOCABULARY) % 2 == 0)
    head.to(torch.bfloat16).save_pretrained(out / "specforge-eagle3")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
