"""Heads in whole engines: a head that predicts its target perfectly has every draft accepted in every setting.

The target is a table: token t is followed by FOLLOWS[t]. Each of its features is the one-hot
vector of t. The heads turn it into the vector of the next token, so each depends on features alone; one reads
tokens alone instead. A feature in the wrong place, or of the wrong row, costs acceptance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import draft_heads as heads
import pytest
import torch
from crossed import crossed
from stand_ins import fake_graphs, random_draft_lengths
from uncached import features_of
from watched_calls import Watch

from specbatch import Completion, Engine, EngineConfig, SamplingParams
from specbatch.config.engine_config import Graphs
from specbatch.config.speculation import Speculation
from specbatch.engine.setup import prepare
from specbatch.errors import SpecbatchError
from specbatch.kernels.attention.qkv import split_qkv_rope
from specbatch.kernels.attention.queries import AttentionInputs
from specbatch.models.config import ModelConfig
from specbatch.models.weight_shapes import tensor_shapes

COUNT, SIZE = 37, 40
FOLLOWS = [(5 * token + 3) % COUNT for token in range(COUNT)]
BOTH = Graphs(decode="whole", prefill="piecewise")


def sizes(**changes: Any) -> dict[str, Any]:
    return heads.llama(vocab_size=COUNT, hidden_size=SIZE, intermediate_size=SIZE, **changes)


class Table:
    """The target's checkpoint, with an MTP head."""

    name, origin = "table", "memory"

    def __init__(self, tokenizer: Any) -> None:
        self.config = ModelConfig.from_dict(sizes(num_hidden_layers=4, max_position_embeddings=512))
        self._tokenizer = tokenizer
        self.tensors = {name: torch.zeros(shape) for name, shape in tensor_shapes(self.config).items()}
        for name, tensor in self.tensors.items():
            if tensor.dim() == 1:
                tensor.fill_(1.0)
            elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                tensor.normal_(generator=torch.Generator().manual_seed(1))
        self.tensors["model.embed_tokens.weight"] = math.sqrt(SIZE) * torch.eye(COUNT, SIZE)
        self.tensors["lm_head.weight"][FOLLOWS, range(COUNT)] = 1.0
        mtp = {f"mtp.{name}": tensor for name, tensor in heads.stored(head("mtp")).items()}
        self.mtp = {name: tuple(tensor.shape) for name, tensor in mtp.items()}
        self.cache: dict[str, tuple[int, ...]] = {}
        self.grouped = None
        self.tensors |= mtp

    def names(self) -> list[str]:
        return list(tensor_shapes(self.config))

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def tokenizer(self) -> Any:
        return self._tokenizer


def head(kind: str) -> dict[str, torch.Tensor]:
    """Predicts the next token from the feature: fc selects it, the MLP replaces a token's vector with the next one's.

    "token" is an EAGLE head that reads the token alone, which its target's matrix turns into what follows.
    """
    sizes = heads.layer(2 if kind == "eagle3" else 1, hidden=SIZE, mlp=SIZE)
    tensors = {name: torch.zeros(shape) for name, shape in heads.named(sizes).items()}
    norms = ["layer.input_layernorm", "layer.post_attention_layernorm"]
    step = -torch.eye(SIZE)
    step[FOLLOWS, range(COUNT)] += 1.0
    # silu(g) * g of g = 10 sqrt(SIZE) where the token is: 100 SIZE, and the vector is sqrt(SIZE) long.
    tensors |= {f"layer.mlp.{part}_proj.weight": 10 * torch.eye(SIZE) for part in ("gate", "up")}
    tensors["layer.mlp.down_proj.weight"] = step / (100 * math.sqrt(SIZE))
    # Attention has no output, but its keys and values can be compared.
    generator = torch.Generator().manual_seed(3)
    for part in "kv":
        tensors[f"layer.self_attn.{part}_proj.weight"].normal_(generator=generator)
    none, picked = torch.zeros(SIZE, SIZE), torch.eye(SIZE)
    tensors["fc.weight"] = torch.cat([none, picked], 1)
    if kind == "eagle3":
        tensors["fc.weight"] = torch.cat([none, picked, none], 1)
        norms += ["layer.hidden_norm", "norm"]
        follows = torch.zeros(COUNT, SIZE)
        follows[FOLLOWS, range(COUNT)] = 1.0
        tensors["lm_head.weight"] = follows[1:]  # all tokens but the first
        tensors["d2t"] = torch.ones(COUNT - 1, dtype=torch.int64)
    if kind == "mtp":
        norms += ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"]
        tensors["layer.self_attn.q_proj.weight"] = torch.zeros(2 * heads.HEADS * heads.DIM, SIZE)
        tensors |= {f"layer.self_attn.{part}_norm.weight": torch.zeros(heads.DIM) for part in "qk"}
    # MTP adds 1 to its norms.
    tensors |= {f"{name}.weight": torch.full((SIZE,), float(kind != "mtp")) for name in norms}
    if kind in ("eagle", "token"):
        del tensors["layer.input_layernorm.weight"]
    if kind == "token":
        tensors["fc.weight"] = torch.cat([picked, none], 1)
        tensors["layer.mlp.down_proj.weight"].zero_()
    return tensors


def following(token: int, count: int) -> list[int]:
    found = [token]
    for _ in range(count):
        found.append(FOLLOWS[found[-1]])
    return found[1:]


KINDS = {"eagle": "eagle", "token": "eagle", "eagle3": "eagle3", "mtp": "mtp"}


@pytest.fixture
def table_engine(toy: Any, write: Any, use_checkpoints: Any) -> Callable[..., Engine]:
    """`table_engine(kind, schedule, count, **settings)`; count: tokens to draft, None for the default."""

    def build(kind: str, schedule: str = "v2", count: Any = None, **settings: Any) -> Engine:
        shape = {name: settings.pop(name) for name in ("draft_steps", "draft_topk") if name in settings}
        table = Table(toy.tokenizer)
        use_checkpoints(lambda *_, **__: table)
        config = sizes(draft_vocab_size=COUNT - 1, eagle_aux_hidden_state_layer_ids=[1, 2, 4])
        draft = None if kind == "mtp" else write(config, head(kind))
        settings = {"max_running": 8, "max_model_len": 120, "page_size": 4} | settings
        speculation = Speculation(KINDS[kind], schedule, draft=draft, draft_tokens=count, **shape)
        return Engine(EngineConfig(model="table", device="cpu", speculation=speculation, **settings))

    return build


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "seven drafted, chunks": {"count": 7, "prefill_chunk": 3},
    "few pages": {"kv_pages": 24, "max_model_len": 70, "prefill_chunk": 8},
    "no prefix": {"prefix_cache": False},
    "graphs": {"graphs": BOTH, "prefill_chunk": 20},
}
TOKENS = 17  # one from the prefill, and all of four verifies of 4, or of two of 8


def check_tokens(engine: Engine, prompts: list[list[int]]) -> list[Completion]:
    done = engine.generate(prompts, SamplingParams(max_new_tokens=TOKENS, ignore_eos=True))
    assert [item.token_ids for item in done] == [following(prompt[-1], TOKENS) for prompt in prompts]
    return done


def allowed(prompts: list[list[int]]) -> list[list[int]]:
    """The head has no row for token 0, so the text must not contain it."""
    return [prompt for prompt in prompts if 0 not in following(prompt[-1], TOKENS)]


SHORT = allowed([[n, 1, 5, n] for n in range(2, 12)])


@pytest.mark.parametrize(("setting", "kind", "schedule"), crossed(SETTINGS, KINDS, ["v1", "v2"]))
def test_perfect_head_has_every_draft_accepted(
    table_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, kind: str, schedule: str, setting: str
) -> None:
    fake_graphs(monkeypatch)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, COUNT, (n,), generator=generator).tolist() for n in (1, 2, 3, 4, 5, 8, 9, 23, 31)]
    prompts += [prompts[-1][:16] + prompts[2], prompts[-1]]  # a shared prefix
    engine = table_engine(kind, schedule, **SETTINGS[setting])
    done = check_tokens(engine, allowed(prompts))
    record = engine.record()
    count = SETTINGS[setting].get("count", 3)
    assert engine.caps["verify_rows"] == count + 1
    # Only the last verify of a text may emit less, where the limit cuts it; after a retraction it is not a full one.
    assert all(sum(item.metrics.emitted_histogram[: count + 1]) <= 1 for item in done)
    if setting == "few pages":
        assert record.metrics["retractions"] > 0
        assert record.metrics["accept_length"] > 3.6
    else:
        assert record.metrics["accept_length"] == count + 1
    if setting == "graphs":
        found = record.counters["graphs"]
        assert set(found) == {"decode", "target_prefill", "draft_prefill"}
        assert found["decode"]["replays"] == record.counters["iterations"] > 0
        assert found["draft_prefill"]["replays"] == found["target_prefill"]["replays"] > 0
        assert not any(item["fallbacks"] for item in found.values())
        assert record.metrics["graph_coverage"] == 1.0


@pytest.mark.parametrize(
    ("kind", "schedule", "setting"), crossed(KINDS, [("v1", "few pages"), ("v2", "default"), ("v2", "graphs")])
)
def test_perfect_head_with_varying_draft_lengths(
    table_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, kind: str, schedule: str, setting: str
) -> None:
    fake_graphs(monkeypatch)
    random_draft_lengths(monkeypatch, seed=3)
    engine = table_engine(kind, schedule, "auto", **SETTINGS[setting])
    check_tokens(engine, SHORT)
    record = engine.record()
    counts = record.counters["acceptance"]
    assert counts["accepted"] == counts["drafted"]
    assert counts["accepted"][2] > 0
    assert record.metrics["verify_steps"] > counts["drafted"][0]


def test_prefill_graphs_of_two_layers_write_the_same_keys(targets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of the second layer depend on the attention of the first, which is between graphs."""
    fake_graphs(monkeypatch)
    written = []
    for graphs in (Graphs(), Graphs(prefill="piecewise")):
        engine = targets.engine("llama", "eagle", "v1", graphs=graphs, prefill_chunk=7)
        engine.generate(targets.prompts("llama"), SamplingParams(max_new_tokens=2, ignore_eos=True))
        cache = engine.parts.worker.prefill_step.drafter.cache
        written.append(torch.stack([cache.keys, cache.values])[:, :, 1:])  # the first page is for padding
    assert written[0].shape[1] == 2
    assert (written[0][:, 1] != 0).any()
    torch.testing.assert_close(*written)


def test_attention_backend_is_for_heads_of_several_layers(targets: Any, watch: Watch) -> None:
    asked = watch(prepare, "prefill_backend", before=lambda *args, **_: args)
    targets.engine("llama", "eagle", draft_attention_backend="torch")
    assert [(args[0], args[2:]) for args in asked[1:]] == [("torch", ("draft_attention_backend",))]
    with pytest.raises(SpecbatchError, match=r"^draft_attention_backend='torch': this head has one layer"):
        targets.engine("llama", "eagle3", draft_attention_backend="torch")


@pytest.mark.parametrize(("kind", "shape"), crossed(["eagle", "eagle3", "mtp"], ["chain", "tree"]))
def test_shared_pages_hold_the_heads_keys(table_engine: Callable[..., Engine], kind: str, shape: str) -> None:
    """Pages that a request leaves to the prefix cache hold the keys and values recomputed from its text. With v2 an
    iteration in flight would complete them."""
    settings = {"count": 6, "draft_steps": 3, "draft_topk": 2} if shape == "tree" else {}
    engine = table_engine(kind, "v1", page_size=1, **settings)
    # The last verify ends before, at and after the limit.
    limits = [SamplingParams(max_new_tokens=8 + place % 4, ignore_eos=True) for place in range(len(SHORT))]
    done = engine.generate(SHORT, limits)
    assert engine.record().metrics["accept_length"] > 2.5
    drafter: Any = engine.parts.worker.prefill_step.drafter
    head, cache, model, cached = drafter.head, drafter.cache, engine.parts.model, engine.parts.scheduler.cache
    assert cached is not None
    for item in done:
        text = torch.tensor([*item.prompt_token_ids, *item.token_ids])
        pages = torch.tensor([node.page for node in cached.path(text.tolist(), len(text))])
        assert len(text) - 9 <= len(pages) < len(text), "the newest positions may be missing, but no others"
        positions = torch.arange(len(text))
        _, qkv = head.enter(head.embed(text[1:]), head.project(head.take(features_of(model, text)))[:-1])
        keys, values = (torch.zeros(1, len(text), *part.shape[2:]) for part in (cache.k[0], cache.v[0]))
        split_qkv_rope(AttentionInputs(qkv, head.heads, positions[:-1], keys, values), positions[:-1])
        for ours, theirs in ((cache.k[0], keys), (cache.v[0], values)):
            torch.testing.assert_close(ours[pages, 0], theirs[0, : len(pages)], rtol=1e-4, atol=1e-5)
