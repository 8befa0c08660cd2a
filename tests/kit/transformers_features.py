"""Features of transformers that tests compare with, and that older supported versions lack: such tests are skipped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, modeling_layers
from transformers.models.deepseek_v2 import modeling_deepseek_v2


@dataclass(frozen=True)
class Feature:
    """lack: what the versions without it do."""

    is_there: bool
    lack: str

    @property
    def needed(self) -> pytest.MarkDecorator:
        return pytest.mark.skipif(not self.is_there, reason=self.lack)

    def require(self) -> None:
        if not self.is_there:
            pytest.skip(self.lack)


def _rendered(message: dict[str, Any]) -> str:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    text = tokenizer.apply_chat_template([message], chat_template="{{ messages[0] | list }}", tokenize=False)
    assert isinstance(text, str)
    return text


YARN_MSCALE = Feature(
    hasattr(modeling_deepseek_v2, "yarn_apply_mscale"),
    "transformers before 5.15 leaves YaRN's mscale_all_dim out of the softmax scale of DeepSeek-V2",
)
MTP_LAYERS = Feature(
    hasattr(getattr(modeling_layers, "MtpModel", None), "forward_layer"),
    "transformers before 5.20 has no MtpModel.forward_layer",
)
REASONING_NAMES = Feature(
    "reasoning_content" in _rendered({"role": "assistant", "reasoning": "r"}),
    "transformers before 5.21 gives templates the reasoning under the name that the message has",
)
NO_NONE = Feature(
    "content" not in _rendered({"role": "assistant", "content": None}),
    "transformers before 5.23 gives templates the values of a message that are None",
)
