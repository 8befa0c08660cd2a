"""Thread counts and fixtures of all tests: a toy model with a naive reference decoder, and engines over it."""

from __future__ import annotations

import os

# One thread per process, child processes included, unless the user chose otherwise: toy models gain nothing from
# threads, and the pools of several pytest workers wait for each other. BLAS libraries read these when they are loaded.
os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or "1"
os.environ["MKL_NUM_THREADS"] = os.environ.get("MKL_NUM_THREADS") or os.environ["OMP_NUM_THREADS"]
os.environ["OPENBLAS_NUM_THREADS"] = os.environ.get("OPENBLAS_NUM_THREADS") or os.environ["OMP_NUM_THREADS"]

import sys

# Container images often set this. Every worker, and every process that a test starts, would then compile all modules
# and tests again, in each run: eight seconds of a worker's.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False

import atexit
import gc
import math
import signal
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import crossed
import lossless
import pytest
import torch
import torch.nn.functional as F
import typer.testing
from fake_ray import FakeRay
from hypothesis import HealthCheck, settings
from opening import opening
from targets import Targets
from typer.main import get_command
from watched_calls import Watch, watch_with

from specbatch.config.engine_config import EngineConfig, Graphs
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import tensor_shapes
from specbatch.models.formats.format import Format
from specbatch.models.heads.dflash import DFlashConfig
from specbatch.models.heads.dflash2 import DFlash2Config
from specbatch.models.heads.domino import DominoConfig
from specbatch.models.heads.dspark import DSparkConfig
from specbatch.models.heads.lilicorr import LiLiCorrConfig
from specbatch.models.heads.xpress import XPressConfig
from specbatch.records import low_acceptance

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))  # where a plugin imported torch earlier

# Without a GPU, `torch.manual_seed` keeps a stack trace for each device that might come.
_seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed

settings.register_profile(
    "specbatch",
    deadline=None,
    derandomize=True,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
settings.load_profile("specbatch")

# The runner makes all commands and their options again for each call, which takes longer than most of the calls.
typer.main.get_command = typer.testing._get_command = cache(get_command)  # type: ignore[attr-defined]

# A shell has what it runs in the background ignore interruptions, and so would the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """`watch(owner, name, before=..., after=...)` watches the calls of a method or function, which run as they are.
    Returns the list, filled as they come, of what `before(*arguments)` and `after(result, *arguments)` return."""
    return watch_with(monkeypatch)


@pytest.fixture
def use_prefill(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    """`use_prefill(backend)`: engines compute the attention of prompts with it, whatever their device and settings."""
    return lambda backend: monkeypatch.setattr(
        "specbatch.engine.setup.prepare.prefill_backend", lambda *_, **__: backend
    )


@pytest.fixture
def use_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`use_memory(size)`: engines find so many bytes available on any device."""
    return lambda size: monkeypatch.setattr("specbatch.engine.setup.memory_plan.available_memory", lambda device: size)


@pytest.fixture
def stopped_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`stopped_after(count)`: a rank counts as stopped after so many beats without an answer."""
    return lambda count: monkeypatch.setattr("specbatch.engine.ranks.rank_group.SILENT_BEATS", count)


@pytest.fixture
def low_acceptance_from(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`low_acceptance_from(count)`: after so many verifies every acceptance below 100% counts as low."""

    def use(count: int) -> None:
        monkeypatch.setattr(low_acceptance, "LOW_SHARE", 1.01)
        monkeypatch.setattr(low_acceptance, "MIN_VERIFIES", count)

    return use


@pytest.fixture
def stay_quantized(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`stay_quantized()`: weights stay quantized on a CPU, too, as on a GPU; `stay_quantized(False)`: nowhere."""
    return lambda keeps=True: monkeypatch.setattr(Format, "runs_on", staticmethod(lambda device: keeps))


def pytest_configure(config: pytest.Config) -> None:
    """Cases that are not run need not be made: there are some forty thousand."""
    crossed.only_quick = lossless.only_quick = config.option.markexpr == "not slow"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fuzz")
    group.addoption("--fuzz", type=int, metavar="N", help="rounds of each fuzz test, in place of a few")
    group.addoption("--fuzz-seed", type=int, metavar="SEED", help="only the round with this seed")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Random inputs of a test without a generator of its own depend neither on the run nor on other tests."""
    _seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported for the tests stays: the garbage collector need not look through it, now and later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000)
        gc.enable()


atexit.register(gc.unfreeze)  # else bindings report at the end that their objects are still there


BOS, EOS = 1, 2
_PIECES = [b"", b"<s>", b"</s>", *(bytes([97 + i]) for i in range(26))]
_PIECES += [b" ", b"ab", b"\n", b"\xc3", b"\xa9", b"x\xf0\x9f", b"\x98\x80", "ü".encode()]  # é and an emoji in halves


class ToyTokenizer:
    """37 tokens, some of them parts of characters; `size` cuts the vocabulary down."""

    name = "toy"
    eos_ids = frozenset({EOS})
    bos_id = BOS
    has_chat_template = False
    byte_tokens: dict[int, int] = {}  # noqa: RUF012
    hidden: dict[str, int] = {"<s>": BOS, "</s>": EOS}  # noqa: RUF012
    eos_id = EOS

    def __init__(self, size: int = len(_PIECES), *, foreign: bool = False) -> None:
        self.vocab_size = size
        self._foreign = foreign  # other texts

    @property
    def shown_bytes(self) -> list[bytes | None]:
        return [b"other " + piece if self._foreign else piece for piece in _PIECES[: self.vocab_size]]

    def token_bytes(self) -> list[bytes | None]:
        return [None if token in (0, BOS, EOS) else piece for token, piece in enumerate(_PIECES[: self.vocab_size])]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [_PIECES.index(letter.encode()) for letter in text]

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        gone = (BOS, EOS) if skip_special_tokens else ()
        return b"".join(_PIECES[token] for token in ids if token not in gone).decode(errors="replace")

    def vocabulary(self) -> list[str]:
        return [("other " if self._foreign else "") + piece.decode(errors="backslashreplace")
                for piece in _PIECES[: self.vocab_size]]  # fmt: skip


class ToyCheckpoint:
    """Random weights in memory. Names: "toy", "toy-2" (another seed), "toy-foreign" (31 tokens of other texts),
    "toy-deep" (a layer more), and "toy-nan"."""

    origin = "memory"
    mtp: dict[str, tuple[int, ...]] = {}  # noqa: RUF012
    grouped = None
    cache: dict[str, tuple[int, ...]] = {}  # noqa: RUF012

    def __init__(self, name: str = "toy", vocabulary: int = len(_PIECES)) -> None:
        self.name = name
        vocabulary = 31 if name == "toy-foreign" else vocabulary
        self.config = ModelConfig.from_dict(
            {
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": vocabulary,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 4 if name == "toy-deep" else 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 512,
                "rms_norm_eps": 1e-5,
                "rope_theta": 10000.0,
                "tie_word_embeddings": True,
                "eos_token_id": EOS,
            }
        )
        generator = torch.Generator().manual_seed(2 if name == "toy-2" else 1)
        self.tensors = random_tensors(self.config, generator)
        if name == "toy-nan":  # token 36 poisons whatever reads it
            self.tensors["model.embed_tokens.weight"][36, 0] = torch.nan
            self.config = ModelConfig(**{**self.config.__dict__, "tie_embeddings": False})
            self.tensors["lm_head.weight"] = torch.randn(vocabulary, 32, generator=generator) * 0.2

    def names(self) -> list[str]:
        return list(tensor_shapes(self.config))

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def tokenizer(self) -> ToyTokenizer:
        return ToyTokenizer(self.config.vocab_size, foreign=self.name == "toy-foreign")


TOY_BLOCK: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "vocab_size": 37, "hidden_size": 32,
    "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3,
    "head_dim": 12, "max_position_embeddings": 512, "rms_norm_eps": 1e-4, "rope_theta": 3000.0,
    "layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 9,
    "num_target_layers": 3, "block_size": 5, "dflash_config": {"mask_token_id": 34, "target_layer_ids": [1, 0]},
}  # fmt: skip

_MARKOV = {"architectures": ["Qwen3DSparkModel"], "markov_rank": 8, "enable_confidence_head": False}
_SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5}
_GRU = {"projector_type": "domino", "pure_draft_prefix_len": 1, "gru_hidden_dim": 8, "emb_dim": 6, "shift_label": True}
_LATTICE = {
    "lilicorr_candidate_topk": 5, "lilicorr_hidden_size": 12, "lilicorr_num_layers": 2, "lilicorr_num_heads": 2,
    "lilicorr_mlp_ratio": 2.0, "lilicorr_factor_dim": 8, "lilicorr_vector_eps": 1e-4, "lilicorr_logit_scale": 40.0,
}  # fmt: skip
TOY_BLOCKS: dict[str, tuple[type[DFlashConfig], dict[str, Any]]] = {
    "toy-block": (DFlashConfig, {}),
    "toy-block-34": (DFlashConfig, {}),
    **{
        f"toy-block-{kind}": (DSparkConfig, _MARKOV | {"markov_head_type": kind})
        for kind in ("vanilla", "gated", "rnn")
    },
    "toy-block-refiner": (
        XPressConfig,
        {"architectures": ["Qwen3XPressModel"], "xpress_rank": 6, "xpress_mlp_hidden": 10, "xpress_num_passes": 4},
    ),
    "toy-block-gru": (
        DominoConfig,
        {"dflash_config": TOY_BLOCK["dflash_config"] | _GRU},
    ),
    "toy-block-lattice": (
        LiLiCorrConfig,
        {"architectures": ["LiLiCorrDraftModel"], "dflash_config": TOY_BLOCK["dflash_config"] | _LATTICE},
    ),
    "toy-block-selector": (
        DFlash2Config,
        {"architectures": ["DFlash2DraftModel"], "dflash_config": TOY_BLOCK["dflash_config"] | _SELECTOR},
    ),
}


class ToyBlock(ToyCheckpoint):
    """A block draft for the toy, random, of `TOY_BLOCKS`. "toy-block-34" drafts nothing but token 34, which the toy
    likes to repeat.

    raw: its config.json
    """

    def __init__(self, name: str = "toy-block") -> None:
        self.name = name
        read, changes = TOY_BLOCKS[name]
        self.raw = TOY_BLOCK | changes
        self.config = read.from_dict(self.raw)
        generator = torch.Generator().manual_seed(4)
        self.tensors = random_tensors(self.config, generator)
        if name == "toy-block-34":  # layers that add nothing leave a mask's own embedding
            for key, value in self.tensors.items():
                if key.endswith(("o_proj.weight", "down_proj.weight")):
                    value.zero_()


def random_tensors(config: ModelConfig, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """What a checkpoint of this config holds; norms are random too, so that they matter."""
    return {
        key: torch.randn(shape, generator=generator) * (1.2 / math.sqrt(shape[-1]))
        if len(shape) > 1
        else torch.rand(shape, generator=generator) + 0.5
        for key, shape in tensor_shapes(config).items()
    }


class Toy:
    """The toy model and its naive decoding in float64: the whole text is computed again for every token, no cache.
    Of "toy-nan" it computes with 0 in place of NaN."""

    eos = EOS
    pieces = _PIECES
    block = ToyBlock

    def __init__(self, name: str = "toy") -> None:
        self.checkpoint = ToyCheckpoint(name)
        self.tokenizer = ToyTokenizer()
        self._weights = {key: value.double().nan_to_num() for key, value in self.checkpoint.tensors.items()}
        self._head = self._weights.get("lm_head.weight", self._weights["model.embed_tokens.weight"])
        self._decoded: dict[tuple[tuple[int, ...], int], tuple[int, ...] | None] = {}

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """float64 [len(tokens), V]."""
        return self._forward(torch.tensor([tokens]))[0]

    def logits_of(self, texts: list[list[int]]) -> list[torch.Tensor]:
        """float64 [len(text), V] of each text, in one batch."""
        longest = max(map(len, texts))
        padded = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
        return [logits[: len(text)] for logits, text in zip(self._forward(padded), texts, strict=True)]

    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: int64 [texts, n]. Returns float64 [texts, n, V]."""
        config, weights = self.checkpoint.config, self._weights
        count, dim, half = tokens.shape[1], config.head_dim, config.head_dim // 2
        angles = torch.outer(
            torch.arange(count).double(), 1e4 ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        ).repeat(1, 2)

        def norm(x: torch.Tensor, name: str) -> torch.Tensor:
            return F.rms_norm(x, (x.shape[-1],), weights[name], config.rms_norm_eps)

        def heads(x: torch.Tensor, name: str, turn: bool) -> torch.Tensor:
            y = (x @ weights[name].T).unflatten(-1, (-1, dim)).transpose(1, 2)
            if turn:
                y = y * angles.cos() + torch.cat([-y[..., half:], y[..., :half]], -1) * angles.sin()
            return y.repeat_interleave(config.num_heads // y.shape[1], 1)

        x = weights["model.embed_tokens.weight"][tokens]
        for index in range(config.num_layers):
            layer = f"model.layers.{index}"
            y = norm(x, f"{layer}.input_layernorm.weight")
            q, k = (heads(y, f"{layer}.self_attn.{part}_proj.weight", True) for part in "qk")
            v = heads(y, f"{layer}.self_attn.v_proj.weight", False)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + attended @ weights[f"{layer}.self_attn.o_proj.weight"].T
            y = norm(x, f"{layer}.post_attention_layernorm.weight")
            gate, up = (y @ weights[f"{layer}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
            x = x + (F.silu(gate) * up) @ weights[f"{layer}.mlp.down_proj.weight"].T
        return norm(x, "model.norm.weight") @ self._head.T

    def greedy(self, prompt: tuple[int, ...], count: int = 40) -> tuple[int, ...] | None:
        """The likeliest continuation; None where two tokens are so near that rounding could decide."""
        if (prompt, count) not in self._decoded:
            self._decode([prompt], count)
        return self._decoded[prompt, count]

    def _decode(self, prompts: list[tuple[int, ...]], count: int = 40) -> None:
        """All prompts in one batch: padding after a text does not change the logits before it."""
        lengths, every = torch.tensor([len(prompt) for prompt in prompts]), torch.arange(len(prompts))
        texts = torch.zeros(len(prompts), int(lengths.max()) + count, dtype=torch.int64)
        for text, prompt in zip(texts, prompts, strict=True):
            text[: len(prompt)] = torch.tensor(prompt)
        clear = torch.ones(len(prompts), dtype=torch.bool)
        for ends in (lengths + step for step in range(count)):
            best = self._forward(texts[:, : int(ends.max())])[every, ends - 1].topk(2)
            clear &= best.values[:, 0] - best.values[:, 1] >= 1e-4
            texts[every, ends] = best.indices[:, 0]
        for text, prompt, is_clear in zip(texts.tolist(), prompts, clear.tolist(), strict=True):
            end = len(prompt)
            self._decoded[prompt, count] = tuple(text[end : end + count]) if is_clear else None

    @cache  # noqa: B019
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        """28 prompts of 1 to 45 tokens, half of them with a prefix of 21 in common, clear at every greedy token."""
        generator = torch.Generator().manual_seed(3)

        def draw(count: int) -> tuple[int, ...]:
            return tuple(torch.randint(3, 37, (count,), generator=generator).tolist())

        shared = draw(21)
        lengths = [1, 2, 3, 4, 5, 7, 8, 9, 13, 15, 16, 17, 24, 31, 32, 45]
        drawn = [draw(length) for length in lengths] + [shared + draw(length) for length in lengths[:14]]
        self._decode(drawn)
        clear = [prompt for prompt in drawn if self.greedy(prompt) is not None]
        assert len(clear) >= 28
        return tuple(clear[:28])


@pytest.fixture(scope="session")
def toy() -> Toy:
    return Toy()


@pytest.fixture(scope="session")
def open_toy() -> Callable[..., ToyCheckpoint]:
    """In place of `specbatch.weights.open_checkpoint`."""

    def opened(model: str, load_format: str = "auto", **_: Any) -> ToyCheckpoint:
        return ToyBlock(model) if model.startswith("toy-block") else ToyCheckpoint(model)

    return opened


@pytest.fixture(scope="session")
def toy_engine(open_toy: Callable[..., ToyCheckpoint]) -> Callable[..., Any]:
    """`toy_engine(**settings of EngineConfig)` builds an Engine over the toy model, whatever weights are installed."""
    from specbatch.engine.engine import Engine

    def build(
        log: Callable[[str], None] | None = None, report: Callable[[int, int], None] | None = None, **config: Any
    ) -> Engine:
        config = {"model": "toy", "device": "cpu", "max_running": 8, "max_model_len": 120, "page_size": 4} | config
        config = {"load_format": "dummy"} | config  # of no matter to the toy; heads of drafters are then random
        with opening(open_toy):
            return Engine(EngineConfig(**config), log=log, report=report)

    return build


@pytest.fixture
def graph_engine(toy_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Engines with whole decode graphs and piecewise prefill graphs."""
    from stand_ins import fake_graphs

    fake_graphs(monkeypatch)
    return partial(toy_engine, graphs=Graphs(decode="whole", prefill="piecewise"), prefill_chunk=48)


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    return Targets(tmp_path_factory.mktemp("heads"))


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of the time of a report."""
    monkeypatch.setattr("specbatch.sweeps.report.report.draw_all", lambda records: [])


@pytest.fixture
def known_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run on a CPU does not measure it, which takes most of its time."""
    monkeypatch.setattr("specbatch.sweeps.run.estimate.cpu_speeds", lambda: (1e10, 1e11))


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps end without the report, most of which is plots."""
    monkeypatch.setattr("specbatch.cli.sweep.write_reports", lambda folder: [])


@pytest.fixture
def use_checkpoints() -> Generator[Callable[[Callable[..., Any]], None]]:
    """`use_checkpoints(opened)`: the rest of the test is within `opening(opened)`."""
    with ExitStack() as stack:
        yield lambda opened: stack.enter_context(opening(opened))


@pytest.fixture
def use_tokenizer(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    """`use_tokenizer(tokenizer)`: every model, also that of a server, has it."""
    return lambda tokenizer: monkeypatch.setattr("specbatch.weights.open_tokenizer", lambda name, log=None: tokenizer)


@pytest.fixture
def use_packages(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, object]], None]:
    """`use_packages({name: module})`: imports find these modules; None: as if it were not installed."""

    def use(found: Mapping[str, object]) -> None:
        for name, module in found.items():
            monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]

    return use


@pytest.fixture
def fake_ray(use_packages: Callable[[Mapping[str, object]], None]) -> FakeRay:
    """What `import ray` finds."""
    found = FakeRay()
    use_packages({"ray": found})
    return found


@pytest.fixture
def use_hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """`use_hub(load)`: `load(path, name, ...)` is asked for the data sets of the hub."""
    return lambda load: monkeypatch.setattr("datasets.load_dataset", load)


@pytest.fixture
def no_hub(use_hub: Callable[[Callable[..., Any]], None]) -> None:
    """Any attempt to reach the hub or its cache fails the test."""
    use_hub(lambda *_, **__: pytest.fail("the hub is asked"))


@pytest.fixture
def use_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`use_gpus(count)`: torch sees this many CUDA devices."""

    def use(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return use


@pytest.fixture
def short_renderings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chat templates have a small part of the usual time, so that what ignores the limit is seen soon."""
    monkeypatch.setattr("specbatch.text.chat_template.CPU_SECONDS", 0.3)
