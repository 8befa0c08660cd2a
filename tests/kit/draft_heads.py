"""EAGLE, EAGLE-3 and MTP heads for tests: random heads on disk, tiny targets, and a float64 reference of each head.

The references have no cache: for every draft the layer runs over the whole text again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from uncached import prefill_texts

from specbatch.algorithms import ALGORITHMS
from specbatch.config.engine_config import EngineConfig
from specbatch.config.speculation import Speculation
from specbatch.core.step_input import Proposal
from specbatch.drafters.base import Drafter, DraftPlan
from specbatch.kernels.attention.prefill.prefill_backends import prefill_backend
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder, Features
from specbatch.models.layers.moe import Mixture, read_experts
from specbatch.models.shape_recorder import ShapeRecorder
from specbatch.models.weight_shapes import tensor_shapes
from specbatch.progress.bars import Stages
from specbatch.runtime.loader import Loader

VOCABULARY, HIDDEN, HEADS, KV, DIM, MLP = 13, 24, 4, 2, 8, 32
EXPERTS, EXPERT = 5, 12
MASK = 11  # mask token of P-EAGLE
CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


class TargetStub:
    """A target's checkpoint in memory. Its theta differs from every draft's."""

    name, origin = "target", "memory"

    def __init__(self, layers: int = 8, vocabulary: int = VOCABULARY, mtp: Tensors | None = None) -> None:
        self.config = ModelConfig.from_dict(llama(vocab_size=vocabulary, num_hidden_layers=layers, rope_theta=77.0))
        self.tensors = randomise(tensor_shapes(self.config), vocabulary, 1.5)
        self.mtp = {f"mtp.{name}": tuple(tensor.shape) for name, tensor in (mtp or {}).items()}
        self.tensors |= {f"mtp.{name}": tensor for name, tensor in (mtp or {}).items()}
        self.cache: dict[str, tuple[int, ...]] = {}

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def model(self) -> Decoder:
        return Decoder(self.config, self.tensor, dtype=torch.float32, device=torch.device("cpu"), max_positions=256)


def llama(**changes: Any) -> dict[str, Any]:
    """The config.json of a Llama of the sizes used here, without any theta."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN, "intermediate_size": MLP, "num_hidden_layers": 1, "num_attention_heads": HEADS,
        "num_key_value_heads": KV, "head_dim": DIM, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    } | changes  # fmt: skip


def qwen3_next(**changes: Any) -> dict[str, Any]:
    """The config.json of a Qwen3-Next of these sizes, with rotary embedding on half of the channels."""
    return llama(num_hidden_layers=2) | {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next",
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.5, "num_experts": EXPERTS, "num_experts_per_tok": 2,
        "moe_intermediate_size": EXPERT, "shared_expert_intermediate_size": 20, "norm_topk_prob": True,
        "rope_theta": 77.0, **changes,
    }  # fmt: skip


def randomise(shapes: dict[str, tuple[int, ...]], seed: int, scale: float = 1.0) -> Tensors:
    """Random norms and biases; a target's `scale` is higher, for sharp logits."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        found[name] = 1 + noise / 4 if len(shape) == 1 else scale * noise / math.sqrt(shape[1])
    return found


def layer(width: int = 1, **changes: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a decoder layer, whose q, k and v read `width` hidden states."""
    hidden, dim, mlp = changes.get("hidden", HIDDEN), changes.get("dim", DIM), changes.get("mlp", MLP)
    return {
        "input_layernorm.weight": (hidden,), "self_attn.q_proj.weight": (HEADS * dim, width * hidden),
        "self_attn.k_proj.weight": (KV * dim, width * hidden), "self_attn.v_proj.weight": (KV * dim, width * hidden),
        "self_attn.o_proj.weight": (hidden, HEADS * dim), "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (mlp, hidden), "mlp.up_proj.weight": (mlp, hidden),
        "mlp.down_proj.weight": (hidden, mlp),
    }  # fmt: skip


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


class Reference:
    """A head's tensors under the names used here ("layer." for its layer), and its equations."""

    theta = 10000.0
    turning: int | None = None  # rotated channels of a head; None: all

    def __init__(self, tensors: Tensors, target: TargetStub, **options: Any) -> None:
        self.w = {name: tensor.double() for name, tensor in tensors.items()}
        self.embedding = self.w.get("embed_tokens.weight", target.tensors["model.embed_tokens.weight"].double())
        self.head = self.w.get("lm_head.weight", target.tensors["lm_head.weight"].double())
        self.__dict__.update(options)

    def drafts(
        self, features: Features, text: list[int], chosen: list[int], ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits [n, V] before each of the chosen drafts, for the features before the root text[-1]."""
        hidden = list(self.project(self.take(features).double()))
        tokens, found = text[1:], []
        for token in chosen:
            y = self.run(torch.stack(hidden), self.embedding[tokens])
            logits = self.logits(y[-1])
            if ids is not None:
                logits = torch.full((len(self.embedding),), -math.inf, dtype=torch.float64).scatter(0, ids, logits)
            found.append(logits)
            hidden.append(y[-1])
            tokens = [*tokens, token]
        return torch.stack(found)

    def take(self, features: Features) -> torch.Tensor:
        return features.last

    def project(self, features: torch.Tensor) -> torch.Tensor:
        return features

    def logits(self, y: torch.Tensor) -> torch.Tensor:
        return self.head @ y

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y = x @ self.w[f"{name}.weight"].T
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, stem: str = "layer") -> torch.Tensor:
        """Projections [T, heads * dim] -> [T, heads * dim]."""
        count = len(q)
        q, k, v = (x.unflatten(1, (heads, -1)).transpose(0, 1) for x, heads in ((q, HEADS), (k, KV), (v, KV)))
        if f"{stem}.self_attn.q_norm.weight" in self.w:
            q = rms(q, self.norm_weight(f"{stem}.self_attn.q_norm"))
            k = rms(k, self.norm_weight(f"{stem}.self_attn.k_norm"))
        turning = self.turning or q.shape[-1]
        angle = torch.arange(count).double()[:, None] / self.theta ** (torch.arange(0, turning, 2).double() / turning)

        def turn(x: torch.Tensor) -> torch.Tensor:
            one, two = x[..., : turning // 2], x[..., turning // 2 : turning]
            cos, sin = angle.cos(), angle.sin()
            return torch.cat([one * cos - two * sin, two * cos + one * sin, x[..., turning:]], -1)

        k, v = (x.repeat_interleave(HEADS // KV, 0) for x in (turn(k), v))
        scores = turn(q) @ k.mT / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -math.inf)
        return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)

    def norm_weight(self, name: str) -> torch.Tensor:
        return self.w[f"{name}.weight"]

    def mlp(self, x: torch.Tensor, stem: str = "layer") -> torch.Tensor:
        x = rms(x, self.norm_weight(f"{stem}.post_attention_layernorm"))
        gate, up = self.linear(x, f"{stem}.mlp.gate_proj"), self.linear(x, f"{stem}.mlp.up_proj")
        return self.linear(F.silu(gate) * up, f"{stem}.mlp.down_proj")

    def qkv(self, x: torch.Tensor, stem: str = "layer") -> tuple[torch.Tensor, ...]:
        return tuple(self.linear(x, f"{stem}.self_attn.{part}_proj") for part in "qkv")

    def further(self, x: torch.Tensor) -> torch.Tensor:
        """The layers after the first, which are plain."""
        index = 1
        while f"{(stem := f'layers.{index}')}.input_layernorm.weight" in self.w:
            attended = self.attend(*self.qkv(rms(x, self.w[f"{stem}.input_layernorm.weight"]), stem), stem)
            x = x + self.linear(attended, f"{stem}.self_attn.o_proj")
            x, index = x + self.mlp(x, stem), index + 1
        return x

    def run(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class RefEagle(Reference):
    def run(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        x = self.linear(torch.cat([embedded, hidden], 1), "fc")
        x = x + self.linear(self.attend(*self.qkv(x)), "layer.self_attn.o_proj")
        return self.further(x + self.mlp(x))


class RefEagle3(Reference):
    norm_before_residual = norm_output = False

    def take(self, features: Features) -> torch.Tensor:
        assert features.aux is not None
        return features.aux

    def project(self, features: torch.Tensor) -> torch.Tensor:
        if "input_norm.weight" in self.w:
            features = rms(features, self.w["input_norm.weight"])
        if "fc_norm.0.weight" in self.w:
            parts = features.chunk(3, 1)
            features = torch.cat([rms(part, self.w[f"fc_norm.{n}.weight"]) for n, part in enumerate(parts)], 1)
        return self.linear(features, "fc")

    def run(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        normed = rms(hidden, self.w["layer.hidden_norm.weight"])
        x = torch.cat([rms(embedded, self.w["layer.input_layernorm.weight"]), normed], 1)
        y = normed if self.norm_before_residual else hidden
        y = y + self.linear(self.attend(*self.qkv(x)), "layer.self_attn.o_proj")
        y = self.further(y + self.mlp(y))
        return rms(y, self.w["norm.weight"]) if self.norm_output else y

    def logits(self, y: torch.Tensor) -> torch.Tensor:
        return self.head @ (y if self.norm_output else rms(y, self.w["norm.weight"]))


class RefPeagle(RefEagle3):
    def drafts(
        self, features: Features, text: list[int], chosen: list[int], ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """All in one pass: after the pairs come masked places."""
        count = len(chosen)
        masked = self.project(self.w["mask_hidden"].reshape(1, -1)).expand(count - 1, -1)
        hidden = torch.cat([self.project(self.take(features).double()), masked])
        y = self.run(hidden, self.embedding[[*text[1:], *[MASK] * (count - 1)]])
        logits = torch.stack([self.logits(row) for row in y[len(y) - count :]])
        if ids is None:
            return logits
        every = torch.full((count, len(self.embedding)), -math.inf, dtype=torch.float64)
        return every.index_copy(1, ids, logits)


class RefMtp(Reference):
    def norm_weight(self, name: str) -> torch.Tensor:
        return 1 + self.w[f"{name}.weight"]

    def drafts(
        self, features: Features, text: list[int], chosen: list[int], ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """With several layers each makes one draft, from the outputs of the one before and tokens further ahead."""
        if "layers.1.input_layernorm.weight" not in self.w:
            return super().drafts(features, text, chosen, ids)
        hidden, found = self.take(features).double(), []
        for depth in range(len(chosen)):
            tokens = [*text, *chosen][1 + depth :][: len(hidden)]
            hidden = self.run(hidden, self.embedding[tokens], f"layers.{depth}" if depth else "layer")
            found.append(self.logits(hidden[-1]))
        return torch.stack(found)

    def mlp(self, x: torch.Tensor, stem: str = "layer") -> torch.Tensor:
        """Dense, or of each token's top two experts and a shared one."""
        if "layer.mlp.gate.weight" not in self.w:
            return super().mlp(x, stem)
        x = rms(x, self.norm_weight("layer.post_attention_layernorm"))
        shares = self.linear(x, "layer.mlp.gate").softmax(-1)
        out = self.linear(x, "layer.mlp.shared_expert_gate").sigmoid() * self.swiglu(x, "layer.mlp.shared_expert")
        for token, chosen in enumerate(shares.topk(2).indices.tolist()):
            for expert in chosen:
                share = shares[token, expert] / shares[token, chosen].sum()
                out[token] += share * self.swiglu(x[token], f"layer.mlp.experts.{expert}")
        return out

    def swiglu(self, x: torch.Tensor, name: str) -> torch.Tensor:
        if f"{name}.up_proj.weight" in self.w:
            gate, up = (self.linear(x, f"{name}.{part}_proj") for part in ("gate", "up"))
            return self.linear(F.silu(gate) * up, f"{name}.down_proj")
        stem, _, expert = name.rpartition(".")
        gate, up = (self.w[f"{stem}.gate_up_proj"][int(expert)] @ x).chunk(2)
        return self.w[f"{stem}.down_proj"][int(expert)] @ (F.silu(gate) * up)

    def run(self, hidden: torch.Tensor, embedded: torch.Tensor, stem: str = "layer") -> torch.Tensor:
        e, h = (
            rms(embedded, self.norm_weight("pre_fc_norm_embedding")),
            rms(hidden, self.norm_weight("pre_fc_norm_hidden")),
        )
        x = self.linear(torch.cat([e, h], 1), "fc")
        normed = rms(x, self.norm_weight(f"{stem}.input_layernorm"))
        both, k, v = self.qkv(normed, stem)
        q, gate = both.unflatten(1, (HEADS, 2, DIM)).unbind(2)
        attended = self.attend(q.flatten(1), k, v, stem) * gate.flatten(1).sigmoid()
        x = x + self.linear(attended, f"{stem}.self_attn.o_proj")
        return rms(x + self.mlp(x, stem), self.norm_weight("norm"))


def write_head(folder: Path, config: dict[str, Any], tensors: Tensors, stem: str = "layers.0", **spelling: Any) -> str:
    """A head on disk: "layer." is written as `stem`; prefix: before every name; binary: as pytorch_model.bin."""
    names = {name: name.replace("layer.", f"{stem}.", 1) if name.startswith("layer.") else name for name in tensors}
    for ours, theirs in spelling.get("rename", {}).items():
        names = {name: stored.replace(ours, theirs) for name, stored in names.items()}
    stored = {spelling.get("prefix", "") + names[name]: tensor.contiguous() for name, tensor in tensors.items()}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if spelling.get("binary"):
        torch.save(stored, folder / "pytorch_model.bin")
    else:
        save_file(stored, folder / "model.safetensors")
    return str(folder)


def loader_of(here: Any) -> Loader:
    attention = prefill_backend("torch", CPU)
    return Loader(
        dtype=torch.float32,
        kv_dtype=torch.float32,
        device=CPU,
        max_positions=128,
        pages=here.pages,
        page_size=4,
        attention={"target": attention, "draft": attention},
        chunk=64,
        page_table=here.batch.page_table,
        tokens=here.batch.tokens,
        num_drafts=7,
        trees=True,
        state_dtype="fp32",
        cached_states=0,
        progress=Stages(lambda done, total: None),
    )


def plan_of(algorithm: str) -> Callable[..., DraftPlan]:
    found: Callable[..., DraftPlan] = import_module(ALGORITHMS[algorithm].module).plan
    return found


class Run:
    """A target and its drafter over the rows of a bench."""

    def __init__(self, here: Any, stub: Any, algorithm: str, count: int, draft: str | None, **asked: Any) -> None:
        self.here, self.count = here, count
        self.lines: list[str] = []
        speculation = Speculation(algorithm, draft=draft, draft_tokens=count, **asked)
        config = EngineConfig(model="target", max_running=here.batch.slots, speculation=speculation)
        plan: DraftPlan = plan_of(algorithm)(stub, config, self.lines.append)
        loader = loader_of(here)
        self.plan = plan
        self.target = stub.model().with_aux(plan.aux)
        self.cache = here.cache_for(self.target)
        self.drafter: Drafter = plan.build(self.target, loader)

    def prefill(self, chunk: int) -> None:
        """All positions before the root, which is not known yet: the batch holds another token at its position."""
        here = self.here
        ends = [len(text) - 1 for text in here.texts]
        roots = here.batch.tokens[here.rows, torch.tensor(ends)]
        here.batch.tokens[here.rows, torch.tensor(ends)] = (roots + 1) % self.target.config.vocab_size
        here.prefill(self.drafter, chunk, (self.target, self.cache))
        here.batch.tokens[here.rows, torch.tensor(ends)] = roots

    def verify(self, step: Any, proposal: Proposal, accepted: list[int], bonus: list[int]) -> None:
        here = self.here
        tokens, positions = here.batch.stage(step.slots, proposal.tokens, None)
        metadata = step.decode_metadata(step.lengths, self.count + 1)
        features = self.target.forward(tokens, positions, metadata.bind(self.cache))
        here.commit(proposal.tokens, accepted, bonus)
        self.drafter.update(step, features, torch.tensor(accepted), None)


def features_of(target: Decoder, texts: list[list[int]]) -> list[Features]:
    """Features of each text, without a cache."""
    return prefill_texts(target, texts)[0]


def usual(algorithm: str, write: Callable[..., str]) -> tuple[TargetStub, str | None, Reference, Any]:
    """A target, the folder of an algorithm's usual head, its reference, and the ids of its vocabulary.

    algorithm: "eagle of 2" has two layers.
    """
    algorithm, _, layers = algorithm.partition(" of ")
    makers = {"eagle": eagle, "eagle3": eagle3, "peagle": peagle, "mtp": mtp}
    tensors, is_mtp = makers[algorithm](), algorithm == "mtp"
    tensors |= further_mtp(int(layers or 1)) if is_mtp else further(int(layers or 1))
    stub = TargetStub(8, mtp=stored(tensors) if is_mtp else None)
    folder = (
        None
        if is_mtp
        else write(llama(draft_vocab_size=9, num_hidden_layers=int(layers or 1), ptd_token_id=MASK), tensors)
    )
    reference = {"eagle": RefEagle, "eagle3": RefEagle3, "peagle": RefPeagle, "mtp": RefMtp}[algorithm](tensors, stub)
    reference.theta = 77.0 if is_mtp else 10000.0
    return stub, folder, reference, ids(tensors)


def named(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {f"layer.{name}": shape for name, shape in shapes.items()}


def further(layers: int, **changes: int) -> Tensors:
    """The layers after the first of a head with so many."""
    shapes = {f"layers.{n}.{name}": shape for n in range(1, layers) for name, shape in layer(**changes).items()}
    return randomise(shapes, 8)


def further_mtp(layers: int) -> Tensors:
    """The same for MTP: each is like the first."""
    return {
        name.replace("layer.", f"layers.{depth}.", 1): tensor
        for depth in range(1, layers)
        for name, tensor in mtp(seed=20 + depth).items()
        if name.startswith("layer.")
    }


def eagle(bias: bool = True, own: bool = False) -> Tensors:
    shapes = {"fc.weight": (HIDDEN, 2 * HIDDEN), **named(layer())}
    del shapes["layer.input_layernorm.weight"]
    if bias:
        shapes["fc.bias"] = (HIDDEN,)
    if own:
        shapes["embed_tokens.weight"] = (VOCABULARY, HIDDEN)
    return randomise(shapes, 3)


def eagle3(known: int | None = 9, hidden: int = HIDDEN, dim: int = DIM, more: Any = ()) -> Tensors:
    """known: tokens that it drafts, None for all (and the target's head); more: extra vectors, name -> size."""
    shapes = {"fc.weight": (hidden, 3 * HIDDEN), **named(layer(2, hidden=hidden, dim=dim))}
    shapes |= {"layer.hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    shapes |= {name: (size,) for name, size in dict(more).items()}
    tensors = randomise(shapes, 4)
    if known is not None:
        tensors |= randomise({"lm_head.weight": (known, hidden)}, 5)
        drafted = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(6))[:known].sort().values
        tensors["d2t"] = drafted - torch.arange(known)
        tensors["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, drafted, True)
    return tensors


def peagle(**how: Any) -> Tensors:
    return eagle3(**how) | randomise({"mask_hidden": (1, 1, 3 * HIDDEN)}, 12)


def mtp(experts: str | None = None, seed: int = 7) -> Tensors:
    """experts: None for a dense MLP, else "each" in tensors of its own, or all "fused"."""
    shapes = {"fc.weight": (HIDDEN, 2 * HIDDEN), **named(layer())}
    shapes["layer.self_attn.q_proj.weight"] = (2 * HEADS * DIM, HIDDEN)
    shapes |= {f"layer.self_attn.{part}_norm.weight": (DIM,) for part in "qk"}
    if experts:
        mixture = Mixture(EXPERTS, 2, EXPERT, shared=20, fused=experts == "fused")
        shapes = {name: shape for name, shape in shapes.items() if ".mlp." not in name}
        read_experts(recorder := ShapeRecorder(SimpleNamespace(hidden_size=HIDDEN)), "layer.mlp", mixture)
        shapes |= recorder.shapes
    shapes |= {f"{n}.weight": (HIDDEN,) for n in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    tensors = randomise(shapes, seed)
    return {name: tensor - 1 if tensor.dim() == 1 else tensor for name, tensor in tensors.items()}


def ids(tensors: Tensors) -> torch.Tensor | None:
    """The target's id of each token that the head drafts; None if they are the same."""
    return torch.arange(len(tensors["d2t"])) + tensors["d2t"] if "d2t" in tensors else None


def stored(tensors: Tensors) -> Tensors:
    """As they are called in a checkpoint."""
    return {name.replace("layer.", "layers.0.", 1): tensor for name, tensor in tensors.items()}
