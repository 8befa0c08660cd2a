"""Short convolution: matches sums in float64 over chunked prompts and verifies of chains and trees."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from crossed import first_quick
from trees import ancestor_masks, path_of, random_parents

from specbatch.kernels.attention.ragged_batch import RaggedBatch, StaticRaggedBatch
from specbatch.kernels.recurrent import short_conv, short_conv_triton
from specbatch.kernels.recurrent.inputs import MOST_TAPS, ConvInputs
from specbatch.kernels.recurrent.state_replay import StateReplay

TWINS = {
    "reference": (short_conv.conv_prefill_ref, short_conv.conv_verify_ref),
    "kernel": (short_conv_triton.conv_prefill, short_conv_triton.conv_verify),
}
SLACK = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
ROWS = 7  # device rows


class Case:
    """Sequences on scattered device rows, whose convolution is written down token by token in float64."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, twin: str, channels: int, taps: int, bias: bool,
        activation: bool, gates: bool, held: int = 9,
    ) -> None:  # fmt: skip
        if dtype == torch.bfloat16 and device.type != "cuda" and twin == "kernel":
            pytest.skip("the interpreter has no bfloat16")
        torch.manual_seed(channels * taps)
        self.random = random.Random(channels + taps)
        self.device, self.dtype, self.channels, self.taps, self.gates = device, dtype, channels, taps, gates
        self.prefill, self.verify = TWINS[twin]
        self.weight = torch.randn(channels, taps).to(device, dtype)
        self.bias = torch.randn(channels).to(device, dtype) if bias else None
        self.activation = activation
        # Of two layers, adjacent for each device row.
        self.window = torch.full((ROWS, 2, taps - 1, channels), torch.nan, device=device, dtype=dtype)[:, 1]
        self.window[0] = 0
        self.count = torch.zeros(ROWS, dtype=torch.int64)
        self.kept = torch.randint(held, (ROWS, held))
        self.pending = torch.full((ROWS, 2, held, channels), torch.nan, device=device, dtype=dtype)[:, 1]
        self.pending[0] = 0
        self.seen: dict[int, list[torch.Tensor]] = {}

    def inputs(self, count: int) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
        """x as columns of something wider, the gates, and u in float64."""
        projection = torch.randn(count, 3 * self.channels + 5).to(self.device, self.dtype)
        before, x, after = (projection[:, 2 + n * self.channels :][:, : self.channels] for n in range(3))
        gates = {"before": before, "after": after} if self.gates else {}
        self.after = after.double().cpu() if self.gates else torch.ones(count, 1, dtype=torch.float64)
        return x, gates, (before * x if self.gates else x).double().cpu()

    def expected(self, path: list[torch.Tensor]) -> torch.Tensor:
        """The window after all inputs of a sequence."""
        last = path[-self.taps :]
        y = sum(w * u for w, u in zip(self.weight.double().cpu().T.flip(0), reversed(last), strict=False))
        y = y if self.bias is None else y + self.bias.double().cpu()
        return F.silu(y) if self.activation else y

    def check(self, y: torch.Tensor, expected: list[torch.Tensor]) -> None:
        slack = SLACK[self.dtype]
        torch.testing.assert_close(y.double().cpu(), torch.stack(expected) * self.after, rtol=slack, atol=4 * slack)

    def prompt(self, spans: list[tuple[int, int]], recorded: bool = False) -> None:
        """Runs (device row, tokens) chunks, each continuing its sequence."""
        rows = [row for row, _ in spans]
        starts = [len(self.seen.get(row, [])) for row in rows]
        ends = [start + count for start, (_, count) in zip(starts, spans, strict=True)]
        table = torch.zeros(ROWS, 1, dtype=torch.int64, device=self.device)
        layout = RaggedBatch(starts, ends, rows, table, 16)
        total = layout.offsets[-1]
        if recorded:
            graph = StaticRaggedBatch(total + 9, len(spans) + 2, table, 16, fresh=layout.fresh)
            graph.tiles(short_conv_triton._TOKENS)
            graph.load(layout)
            layout = graph
        x, gates, u = self.inputs(total)
        inputs = ConvInputs(x, self.weight, self.bias, self.window, self.activation, **gates)
        out = torch.full((total, self.channels), torch.nan, device=self.device, dtype=self.dtype)
        y = self.prefill(inputs, layout, out)
        assert y.data_ptr() == out.data_ptr()
        expected = []
        for row, start, part in zip(rows, starts, u.split([count for _, count in spans]), strict=True):
            self.count[row] = 0
            path = self.seen[row] = self.seen.get(row, []) if start else []
            for item in part:
                path.append(item)
                expected.append(self.expected(path))
        self.check(y, expected)
        for row in rows:
            path = [torch.zeros(self.channels, dtype=torch.float64)] * self.taps + self.seen[row]
            torch.testing.assert_close(self.window[row].double().cpu(), torch.stack(path[1 - self.taps :]))

    def verifies(self, nodes: int, tree: bool, rounds: int, path: bool = False) -> None:
        """All sequences and a padding row, a random part of what is drafted kept each time. path: it is named for
        chains, too."""
        rows = [*self.seen, 0]
        before = self.window.clone()
        for _ in range(rounds):
            parents = [random_parents(self.random, nodes, tree) for _ in rows]
            replay = StateReplay(
                torch.tensor(rows, device=self.device), self.count.to(self.device),
                self.kept.to(self.device) if tree or path else None,
                torch.tensor([ancestor_masks(item) for item in parents], device=self.device) if tree else None,
            )  # fmt: skip
            x, gates, u = self.inputs(len(rows) * nodes)
            inputs = ConvInputs(x, self.weight, self.bias, self.window, self.activation, **gates)
            y = self.verify(inputs, self.pending, replay)
            expected = []
            for row, tree_of, part in zip(rows, parents, u.split(nodes), strict=True):
                paths = [path_of(tree_of, node) for node in range(nodes)]
                past = self.seen.get(row, [torch.zeros(self.channels, dtype=torch.float64)] * self.taps)
                expected += [self.expected(past + [part[node] for node in path]) for path in paths]
                if row:
                    taken = self.random.choice(paths)
                    self.seen[row] = past + [part[node] for node in taken]
                    self.count[row] = len(taken)
                    self.kept[row, : len(taken)] = torch.tensor(taken)
            self.check(y, expected)
        assert not self.window[0].any()
        assert not self.pending[0].any()
        free = [row for row in range(ROWS) if row not in rows]
        assert torch.equal(self.window[free], before[free]) or self.window[free].isnan().all()


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize(
    ("dtype", "channels", "taps", "bias", "activation", "gates"),
    first_quick(
        2,
        [
            (torch.float32, 37, 4, False, True, False),
            (torch.float16, 37, 3, True, True, True),
            (torch.float32, 130, 3, False, False, True),
            (torch.float32, 24, 2, True, True, False),
            (torch.float32, 40, 8, True, False, False),
            (torch.bfloat16, 130, 4, False, True, False),
        ],
    ),
)
def test_prompts_and_verifies(device, dtype, twin, channels, taps, bias, activation, gates) -> None:
    case = Case(device, dtype, twin, channels, taps, bias, activation, gates)
    case.prompt([(3, 2), (5, 21), (1, 1)])
    case.prompt([(1, 1), (3, 1), (5, 18)])
    case.verifies(1, False, 1)
    del case.seen[3]
    case.prompt([(3, 1)])
    case.verifies(5, False, 2)
    case.verifies(7, True, 2)
    case.verifies(2, False, 2, path=True)
    case.verifies(9, False, 1)


@pytest.mark.parametrize("twin", TWINS)
def test_maximum_kernel_width(device: torch.device, twin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles may run in any order: later tiles do not read the window that the first one replaces."""
    tiles = RaggedBatch.tiles
    monkeypatch.setattr(RaggedBatch, "tiles", lambda spans, tokens: tiles(spans, tokens).flip(0))
    case = Case(device, torch.float32, twin, 20, MOST_TAPS, False, True, False)
    case.prompt([(3, 2), (5, 18)])
    case.prompt([(3, 17)])


@pytest.mark.parametrize("twin", TWINS)
def test_reused_slot_starts_from_zero_state(device: torch.device, twin: str) -> None:
    case = Case(device, torch.float32, twin, 20, 4, False, True, False)
    case.prompt([(4, 9)])
    case.window[4] = torch.nan
    case.seen.clear()
    case.prompt([(4, 2)])
    case.verifies(2, False, 2)


@pytest.mark.parametrize("twin", TWINS)
def test_wide_trees(device: torch.device, twin: str) -> None:
    case = Case(device, torch.float32, twin, 20, 4, False, True, False, held=64)
    case.prompt([(4, 1), (2, 9)])
    case.verifies(64, True, 2)


@pytest.mark.parametrize("rows", [1, 4, 8])
def test_chain_has_the_bits_of_a_tree(device: torch.device, rows: int) -> None:
    """The kernel of few rows and that of trees, for both orders of the weight in memory."""
    torch.manual_seed(rows)
    channels, taps, dtype = 140, 4, torch.bfloat16 if device.type == "cuda" else torch.float16
    x, before, after = torch.randn(3, 3 * rows, channels).to(device, dtype)
    weight, bias = torch.randn(channels, taps).to(device, dtype), torch.randn(channels).to(device, dtype)
    window, pending = (torch.randn(ROWS, count, channels).to(device, dtype) for count in (taps - 1, 8))
    on, counts = torch.tensor([2, 0, 5], device=device), torch.tensor([9, 9, 0, 9, 9, rows, 9], device=device)
    counts[0] = 0
    words = torch.tensor([ancestor_masks(list(range(rows - 1)))] * 3, device=device)
    found = []
    for ancestors in (words, None):
        for taps_of in (weight, weight.t().contiguous().t()):
            states, replay = (window.clone(), pending.clone()), StateReplay(on, counts, None, ancestors)
            inputs = ConvInputs(x, taps_of, bias, states[0], True, before, after)
            found.append((short_conv_triton.conv_verify(inputs, states[1], replay), *states))
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


def test_ragged_batch_at_fixed_addresses(device: torch.device) -> None:
    case = Case(device, torch.float32, "kernel", 20, 4, False, True, False)
    case.check = trimmed(case.check)  # type: ignore[method-assign]
    case.prompt([(4, 21), (2, 2)], recorded=True)


def trimmed(check: Callable[..., None]) -> Callable[..., None]:
    return lambda y, expected: check(y[: len(expected)], expected)
