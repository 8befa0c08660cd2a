"""Engines that read shared prefixes once, however few they are, and a check of what they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from specbatch.engine.setup.prepare import Prepared
from specbatch.kernels.attention.latent import latent_attention
from specbatch.kernels.attention.queries import DecodeQueries, SharedPrefixes
from specbatch.kernels.attention.verify import verify_attention
from specbatch.memory import shared_prefixes


def shared(
    table: torch.Tensor, slots: torch.Tensor, groups: Sequence[tuple[list[int], int]], page_size: int, most: int = 4
) -> SharedPrefixes:
    """Have sequences share pages in `table`, and say so as a step does. groups: sequences of `slots` and the keys of
    their prefix."""
    lengths, members = torch.zeros(2, len(slots), dtype=torch.int32, device="cpu")
    found = torch.zeros(3, most, dtype=torch.int32, device="cpu")
    taken = 0
    for index, (sequences, keys) in enumerate(groups):
        rows, pages = slots[sequences], keys // page_size
        table[rows, :pages] = table[rows[0], :pages].clone()
        lengths[sequences] = keys
        members[taken : taken + len(sequences)] = torch.tensor(sequences, device="cpu").int()
        found[:, index] = torch.tensor([taken, len(sequences), keys], device="cpu")
        taken += len(sequences)
    return SharedPrefixes(*(part.to(table.device) for part in (lengths, members, found)))


def share_always(patch: pytest.MonkeyPatch) -> None:
    """Two requests with a page in common share it."""
    costs = {"GROUP_KEYS": 0, "MEMBER_KEYS": 0, "LEAST_SAVED": 0, "TILE_READS": 1, "MOST_ROWS": 999}
    for name, value in costs.items():
        patch.setattr(shared_prefixes, name, value)


def _has_shared_keys(prepared: Prepared) -> bool:
    model = prepared.model
    seen = bool(model.kv_layers) and model.largest_window is None
    return seen and prepared.config.prefix_cache and not prepared.config.deterministic


def share_on_cpu(patch: pytest.MonkeyPatch) -> list[int]:
    """The same on a CPU, where the reference reads each request's own pages: every pass is checked, and the number of
    sequences that share is noted."""
    share_always(patch)
    for module in ("memory_plan", "builder"):
        patch.setattr(f"specbatch.engine.setup.{module}.shares_prefixes", _has_shared_keys)
    noted: list[int] = []

    def checked(kind: type[verify_attention.DecodeAttentionRef]) -> type:
        class Checked(kind):  # type: ignore[misc, valid-type]
            def __init__(self, queries: DecodeQueries, *rest: Any) -> None:
                if queries.prefixes is not None:
                    noted.append(check_groups(queries))
                super().__init__(queries, *rest)

        return Checked

    for module, name in ((verify_attention, "DecodeAttentionRef"), (latent_attention, "LatentDecodeRef")):
        patch.setattr(module, name, checked(getattr(module, name)))
    return noted


def check_groups(queries: DecodeQueries) -> int:
    """Assert that the members of a group have the same pages, which no query is in, and that each member is in one.
    Returns the number of members."""
    prefixes = queries.prefixes
    assert prefixes is not None
    keys_of = torch.zeros(len(queries.lengths), dtype=torch.int64)
    for first, count, keys in prefixes.groups.T.tolist():
        members = prefixes.members[first : first + count].long()
        assert count != 1
        assert keys % queries.page_size == 0
        assert not keys_of[members].any()
        keys_of[members] = keys
        if not queries.slots[members].any():
            continue  # a recording warms up with padding
        pages = queries.page_table[queries.slots[members], : keys // queries.page_size]
        assert (pages == pages[:1]).all()
        assert pages.all()
    assert torch.equal(prefixes.lengths.long(), keys_of)
    assert (keys_of <= queries.lengths + queries.first_node)[queries.slots > 0].all()
    return int((keys_of > 0).sum())
