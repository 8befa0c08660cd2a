"""Which engines read shared prefixes once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specbatch import Speculation
from specbatch.engine.setup.memory_plan import fewest_rows, shares_prefixes

NGRAM = {"algorithm": "ngram", "draft_steps": 3}


@pytest.mark.parametrize(
    ("heads", "speculation", "changes", "rows", "shares"),
    [
        (16, {}, {}, 16, True),
        (16, NGRAM, {}, 64, False),
        (16, NGRAM | {"draft_tokens": "auto"}, {}, 16, True),  # its steps without drafts
        (128, {}, {}, 128, False),
        (16, {}, {"deterministic": True}, 16, False),
        (16, {}, {"prefix_cache": False}, 16, False),
        (16, {}, {"device": "cpu"}, 16, False),
        (16, {}, {"largest_window": 128}, 16, False),
    ],
)
def test_engines_share_prefixes_of_latents_where_it_pays(
    heads: int, speculation: dict[str, Any], changes: dict[str, Any], rows: int, shares: bool
) -> None:
    values = {"deterministic": False, "prefix_cache": True, "device": "cuda", "largest_window": None} | changes
    config = SimpleNamespace(speculation=Speculation(**speculation), **values)
    model = SimpleNamespace(num_heads=heads, num_kv_heads=1, kv_layers=[0], largest_window=values["largest_window"])
    prepared: Any = SimpleNamespace(config=config, model=model, device=torch.device(values["device"]))
    assert fewest_rows(prepared) == rows
    assert shares_prefixes(prepared) == shares
