"""The engine on a CUDA device: the losslessness matrix, whole-step and piecewise graphs, and a v2 loop that never
waits for the device."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lossless
import pytest
import torch
from crossed import crossed
from plain_decoding import check_end, check_logprobs, check_tokens
from targets import HYBRIDS, LATENT, WINDOWED, Targets

from specbatch import Engine
from specbatch.config.acceptance_profile import AcceptanceProfile
from specbatch.config.engine_config import EngineConfig, Graphs
from specbatch.config.speculation import Speculation
from specbatch.core.sampling_params import SamplingParams
from specbatch.engine.schedule.draft_length import Choice, DraftLength
from specbatch.sweeps.check.options import CheckOptions
from specbatch.sweeps.check.run import run_check
from specbatch.weights.shapes import SHAPES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")]

SPECULATIONS = {
    "none": Speculation(),
    "ngram": Speculation("ngram", draft_tokens=3, ngram_min=1),
    "self": Speculation("standalone", draft="self:skip=1"),
    "other": Speculation("standalone", draft="toy-2", draft_tokens=2),
    "self by budget": Speculation("standalone", draft="self:skip=1", draft_tokens=4, verify_budget=2.5),
    "eagle": Speculation("eagle", draft="dummy"),
    "eagle3": Speculation("eagle3", draft="dummy"),
    "peagle": Speculation("peagle", draft="dummy", draft_tokens=4),
    "mtp": Speculation("mtp", draft_tokens=2),
    "eagle3-tree": Speculation("eagle3", draft="dummy", draft_steps=3, draft_topk=2, draft_tokens=5),
    "block": Speculation("dflash", draft="toy-block"),
    "dflash2": Speculation("dflash2", draft="dummy"),
    "dspark": Speculation("dspark", draft="dummy"),
    "dspark by budget": Speculation("dspark", draft="dummy", verify_budget=3),
    "domino": Speculation("domino", draft="dummy"),
    "lilicorr": Speculation("lilicorr", draft="dummy"),
    "uno": Speculation("uno", draft="dummy", draft_tokens=4),
    "xpress": Speculation("xpress", draft="dummy"),
    "ngram-tree": Speculation("ngram", draft_steps=3, draft_topk=2, ngram_min=1),
    "self-tree": Speculation("standalone", draft="self:skip=1", draft_steps=5, draft_topk=3, draft_tokens=7),
}


GRAPHS = {"eager": Graphs(), "graphs": Graphs(decode="whole", prefill="piecewise")}


def with_schedule(speculation: Speculation, schedule: str) -> Speculation:
    return Speculation(**{**speculation.__dict__, "schedule": schedule})


@pytest.mark.parametrize("case", lossless.cases(("v1", "v2"), ("eager", "whole", "piecewise", "both")))
def test_tokens_are_those_of_the_baseline(
    targets: Targets, monkeypatch: pytest.MonkeyPatch, case: lossless.Case
) -> None:
    lossless.check(case, targets, monkeypatch, "cuda")


@pytest.mark.parametrize(
    ("name", "algorithm", "graphs"), crossed([*HYBRIDS, *WINDOWED, *LATENT], ["none", "ngram-tree", "eagle"], GRAPHS)
)
def test_v2_on_targets_of_all_kinds_waits_only_for_results(
    targets: Targets, name: str, algorithm: str, graphs: str
) -> None:
    engine = targets.engine(name, algorithm, device="cuda", dtype="float32", graphs=GRAPHS[graphs])
    prompts, params = targets.prompts(name), SamplingParams(max_new_tokens=20, ignore_eos=True)
    engine.generate(prompts, params)  # compiles the remaining kernels
    engine.generate(prompts, params)  # with cached prefixes
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = [item.token_ids for item in engine.generate(prompts, params)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert again == targets.greedy(name, 20)
    assert engine.record().metrics["cached_tokens"]


@pytest.mark.parametrize(("name", "graphs", "temperature"), crossed(SPECULATIONS, GRAPHS, [0.0, 0.8, 1.2]))
def test_v2_waits_only_for_results(
    toy: Any, toy_engine: Callable[..., Any], name: str, temperature: float, graphs: str
) -> None:
    engine = toy_engine(
        device="cuda", dtype="float32", speculation=with_schedule(SPECULATIONS[name], "v2"), graphs=GRAPHS[graphs]
    )
    prompts = [list(prompt) for prompt in toy.prompts()]
    params = SamplingParams(temperature=temperature, top_p=0.9, max_new_tokens=24, logprobs=True)
    expected = [item.token_ids for item in engine.generate(prompts, params)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = [item.token_ids for item in engine.generate(prompts, params)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if not (temperature and "budget" in name):  # the tokens of a seed depend on the slots, too
        assert again == expected


@pytest.mark.parametrize(("name", "graphs"), crossed(["ngram", "other", "eagle3", "mtp", "block"], GRAPHS))
def test_a_corpus_grows_without_a_wait(toy: Any, toy_engine: Callable[..., Any], name: str, graphs: str) -> None:
    """Answers are added while the next step runs; a second run drafts from the first one's."""
    speculation = replace(with_schedule(SPECULATIONS[name], "v2"), corpus="run", corpus_tokens=1024, corpus_min=2)
    engine = toy_engine(device="cuda", dtype="float32", speculation=speculation, graphs=GRAPHS[graphs])
    prompts, params = [list(prompt) for prompt in toy.prompts()], SamplingParams(max_new_tokens=24, ignore_eos=True)
    expected = [toy.greedy(tuple(prompt))[:24] for prompt in prompts]
    engine.generate(prompts, params)  # compiles the remaining kernels
    engine.forget_prefixes()
    shares = []
    for _ in range(2):
        engine.reset_record()
        torch.cuda.set_sync_debug_mode("error")
        try:
            done = engine.generate(prompts, params)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert [tuple(item.token_ids) for item in done] == expected
        metrics = engine.record().metrics
        shares.append(metrics["corpus_share"] * metrics["corpus_accept_rate"])
        assert metrics["graph_coverage"] == (1.0 if graphs == "graphs" else None)
    assert shares[1] > 0.7 > shares[0]
    params = SamplingParams(temperature=0.9, top_p=0.9, max_new_tokens=24, ignore_eos=True)
    runs = [[item.token_ids for item in engine.generate(prompts, params)] for _ in range(2)]
    assert sum(one != other for one, other in zip(*runs, strict=True)) <= 2  # by rounding


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("name", ["eagle3", "block", "self-tree"])
def test_simulated_acceptance_is_that_of_a_cpu(
    toy: Any, toy_engine: Callable[..., Any], name: str, graphs: str
) -> None:
    """Its draws depend on seeds and positions only, and not on tokens, graphs or the device."""
    drafts = {"simulate_accept": AcceptanceProfile("", (0.9, 0.6, 0.8, 0.5, *[0.7] * 11))}
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    prompts, found = [list(prompt) for prompt in toy.prompts()], []
    for settings in ({"device": "cpu"}, {"device": "cuda", "graphs": GRAPHS[graphs]}):
        engine = toy_engine(dtype="float32", speculation=replace(SPECULATIONS[name], **drafts), **settings)
        done = engine.generate(prompts, params)
        found.append([(item.metrics.accepted, item.metrics.verify_steps) for item in done])
    assert found[0] == found[1]


@pytest.mark.parametrize(("name", "graphs"), crossed(["ngram", "other", "eagle", "eagle3", "mtp", "block"], GRAPHS))
def test_draft_lengths_change_without_a_wait(
    toy: Any, toy_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str, graphs: str
) -> None:
    """Lengths chosen by step times and acceptance, then at random."""
    speculation = replace(SPECULATIONS[name], draft_tokens="auto", draft_steps=None)
    engine = toy_engine(device="cuda", dtype="float32", speculation=speculation, graphs=GRAPHS[graphs])
    prompts, params = [list(prompt) for prompt in toy.prompts()], SamplingParams(max_new_tokens=24, ignore_eos=True)
    expected = [toy.greedy(tuple(prompt))[:24] for prompt in prompts]
    assert [tuple(item.token_ids) for item in engine.generate(prompts, params)] == expected
    assert all(seconds > 0 for row in engine.caps["draft_length_s"].values() for seconds in row.values())
    chance = random.Random(1)

    def choose(self: DraftLength, rows: int, describe: Any) -> Choice:
        drafts = chance.choice([0, 0, *self.draft_lengths])
        splits = self.can_split and rows > 1 and drafts and chance.random() < 0.3
        kind = self.model.kind(rows, drafts, 1 if splits else None)
        return Choice(drafts, [rows - 1] if splits else None, kind, expected_s=1.0)

    monkeypatch.setattr(DraftLength, "choose", choose)
    for seed in (1, 2, 3, 4, 5, 1):  # compiles the remaining kernels and records graphs that are first needed now
        chance.seed(seed)
        engine.generate(prompts, params)
    chance.seed(1)
    engine.reset_record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = [tuple(item.token_ids) for item in engine.generate(prompts, params)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert again == expected
    record = engine.record()
    assert len({n for row in record.counters["draft_lengths"].values() for n in row}) > 2
    assert record.metrics["graph_coverage"] == (1.0 if graphs == "graphs" else None)


def test_seeds_give_the_tokens_of_the_cpu(toy: Any, toy_engine: Callable[..., Any]) -> None:
    prompts = [list(prompt) for prompt in toy.prompts()]
    params = SamplingParams(temperature=0.7, max_new_tokens=12, seed=5)
    tokens = [
        [item.token_ids for item in toy_engine(device=device, dtype="float32").generate(prompts, params)]
        for device in ("cpu", "cuda")
    ]
    same = sum(a == b for a, b in zip(*tokens, strict=True))
    assert same >= len(prompts) - 2  # random numbers near a threshold may fall on either side of it


def test_bfloat16_tokens_are_the_same_from_graphs(toy: Any, toy_engine: Callable[..., Any]) -> None:
    """Bit-identical: both run the same kernels, whose sums have a fixed order."""
    prompts = [list(prompt) for prompt in toy.prompts()[:8]]
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    tokens = [
        [
            item.token_ids
            for item in toy_engine(device="cuda", dtype="bfloat16", graphs=graphs).generate(prompts, params)
        ]
        for graphs in (Graphs(), Graphs(decode="whole"))
    ]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("name", "schedule", "graphs"), crossed(["none", "eagle3", "ngram-tree", "self", "self-tree"], ["v1", "v2"], GRAPHS)
)
def test_penalties_and_biases(toy: Any, toy_engine: Callable[..., Any], name: str, schedule: str, graphs: str) -> None:
    """Greedy tokens are those that a CPU chooses without drafts."""
    prompts = [list(prompt) for prompt in toy.prompts()[:8]]
    params = [
        SamplingParams(
            max_new_tokens=20, ignore_eos=True, frequency_penalty=index % 3 * 0.6, presence_penalty=index % 2 * -0.4,
            repetition_penalty=1 + index % 4 * 0.3, logit_bias={5 + index: 3.0} if index % 3 else {},
            bad_words=["ab", "c"] if index % 2 else [],
        )
        for index in range(8)
    ]  # fmt: skip
    expected = [item.token_ids for item in toy_engine(device="cpu", dtype="float32").generate(prompts, params)]
    speculation = with_schedule(SPECULATIONS[name], schedule)
    engine = toy_engine(device="cuda", dtype="float32", speculation=speculation, graphs=GRAPHS[graphs])
    engine.generate(prompts, params)  # compiles kernels and records graphs
    torch.cuda.set_sync_debug_mode("error" if schedule == "v2" else "default")
    try:
        done = engine.generate(prompts, params)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [item.token_ids for item in done] == expected


@pytest.mark.parametrize(
    ("name", "schedule", "graphs"), crossed(["none", "eagle3", "ngram-tree", "self", "self-tree"], ["v1", "v2"], GRAPHS)
)
def test_grammars(toy: Any, toy_engine: Callable[..., Any], name: str, schedule: str, graphs: str) -> None:
    """Greedy tokens are those that a CPU chooses without drafts, and sampled answers match."""
    prompts = [list(prompt) for prompt in toy.prompts()[:8]]
    expressions = ["[a-m ]{4,30}", "(?:[a-z]{3} )*[a-z]{3}", "(?:ab|[^b])*é?", "a{2,9}|b[c-z]{3}"]
    params = [
        SamplingParams(max_new_tokens=20, regex=expressions[index // 2], frequency_penalty=index % 3 * 0.6)
        if index % 4 < 3
        else SamplingParams(max_new_tokens=20)
        for index in range(8)
    ]
    expected = [item.token_ids for item in toy_engine(device="cpu", dtype="float32").generate(prompts, params)]
    speculation = with_schedule(SPECULATIONS[name], schedule)
    engine = toy_engine(device="cuda", dtype="float32", speculation=speculation, graphs=GRAPHS[graphs])
    sampled = [replace(one, temperature=1.0, seed=index) for index, one in enumerate(params)]
    engine.generate(prompts, params)  # compiles kernels and records graphs
    engine.generate(prompts, sampled)
    torch.cuda.set_sync_debug_mode("error" if schedule == "v2" else "default")
    try:
        done, free = engine.generate(prompts, params), engine.generate(prompts, sampled)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [item.token_ids for item in done] == expected
    for item, own in zip([*done, *free], params * 2, strict=True):
        assert own.regex is None or item.finish_reason == "length" or re.fullmatch(own.regex, item.text)


@pytest.mark.parametrize(
    ("name", "schedule", "graphs"), crossed(["none", "eagle3", "ngram", "ngram-tree"], ["v1", "v2"], GRAPHS)
)
def test_grammars_on_the_host(name: str, schedule: str, graphs: str) -> None:
    """Greedy tokens are those without drafts and graphs; verifies of chains run from graphs where there are any."""
    nested = {"type": "array", "items": {"$ref": "#"}}
    prompts = [f"{index} nested" for index in range(7)]
    params = [SamplingParams(max_new_tokens=20, json_schema=nested if index % 3 else None) for index in range(7)]
    config = EngineConfig(
        model="toy", load_format="dummy", device="cuda", dtype="float32", max_running=7, max_model_len=128
    )
    with Engine(config) as engine:
        expected = [item.token_ids for item in engine.generate(prompts, params)]
    speculation = with_schedule(SPECULATIONS[name], schedule)
    with Engine(replace(config, speculation=speculation, graphs=GRAPHS[graphs])) as engine:
        for _ in range(2):
            engine.reset_record()
            assert [item.token_ids for item in engine.generate(prompts, params)] == expected
        decode = engine.record().counters["graphs"]["decode"]
    if GRAPHS[graphs].decode == "whole":
        assert ("grammar on the host" in decode["fallbacks"]) == name.endswith("tree")
        assert decode["replays"] > 0


@pytest.mark.parametrize(
    ("name", "schedule", "graphs"), crossed(["none", "eagle3", "ngram-tree", "self", "self-tree"], ["v1", "v2"], GRAPHS)
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_samples_min_tokens_and_top_logprobs(
    toy: Any, toy_engine: Callable[..., Any], name: str, schedule: str, graphs: str, temperature: float
) -> None:
    """Against the naive model where seeds are the baseline's; masks, logprobs and shared prompts in any case."""
    speculation = with_schedule(SPECULATIONS[name], schedule)
    engine = toy_engine(device="cuda", dtype="float32", speculation=speculation, graphs=GRAPHS[graphs], seed=3)
    prompts = [list(prompt) for prompt in toy.prompts()[:12]]
    params = [
        SamplingParams(
            temperature=temperature, max_new_tokens=10, stop_token_ids=tuple(range(3, 3 + 5 * (index % 5))),
            min_tokens=index % 4 * 3, n=1 + index % 3, top_logprobs=(0, 1, 5, 20)[index % 4], logprobs=index % 2 == 1,
        )
        for index in range(12)
    ]  # fmt: skip
    engine.generate(prompts, params)  # compiles kernels and records graphs
    torch.cuda.set_sync_debug_mode("error" if schedule == "v2" else "default")
    try:
        done = engine.generate(prompts, params)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [(item.index, item.sample) for item in done] == [(i, n) for i in range(12) for n in range(1 + i % 3)]
    ends, wrong = engine.tokenizer.eos_ids, 0
    texts = [item.prompt_token_ids + item.token_ids for item in done]
    for item, logits in zip(done, toy.logits_of(texts), strict=True):
        own = params[item.index]
        check_end(item, own, ends, toy.tokenizer.decode)
        check_logprobs(item, own, logits)
        if not temperature or "tree" in name or name in ("none", "ngram"):
            wrong += not check_tokens(item, own, ends, logits, engine_seed=3)
    assert wrong <= (1 if temperature else 0)  # one random number may fall on the other side of a boundary


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_samples_share_their_prompt(toy_engine: Callable[..., Any], prefix_cache: bool) -> None:
    engine = toy_engine(
        device="cuda", dtype="float32", max_model_len=500, page_size=16, prefill_chunk=128, prefix_cache=prefix_cache
    )
    prompt = [3 + (index * index) % 31 for index in range(400)]
    done = engine.generate([prompt], SamplingParams(temperature=1.0, max_new_tokens=8, ignore_eos=True, n=8))
    assert [item.metrics.cached_tokens for item in done] == [0] + [384] * 7
    assert engine.record().counters["prefill_tokens"] == 400 + 7 * 16


@pytest.mark.parametrize("graphs", GRAPHS)
def test_only_a_prompt_with_nan_logits_fails(toy_engine: Callable[..., Any], graphs: str) -> None:
    engine = toy_engine(model="toy-nan", device="cuda", dtype="float32", graphs=GRAPHS[graphs])
    for _ in range(2):
        good, bad = engine.generate([[3, 4, 5], [3, 36, 5]], SamplingParams(max_new_tokens=4, ignore_eos=True))
        assert (good.finish_reason, bad.finish_reason) == ("length", "error")
        assert "not finite" in str(bad.error)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_attention_backends_give_the_same_tokens(toy: Any, toy_engine: Callable[..., Any], backend: str) -> None:
    prompts = [list(prompt) for prompt in toy.prompts()]
    engine = toy_engine(device="cuda", dtype="float32", attention_backend=backend)
    assert engine.caps["attention_backend"] == backend
    completions = engine.generate(prompts, SamplingParams(max_new_tokens=10, ignore_eos=True))
    assert [tuple(item.token_ids) for item in completions] == [toy.greedy(tuple(prompt))[:10] for prompt in prompts]


@pytest.mark.parametrize("graphs", GRAPHS)
def test_attention_backends_agree_in_bfloat16(tmp_path: Path, graphs: str) -> None:
    """Prompts and chunks after a prefix, short and long, of a model with heads that the kernel for Hopper has."""
    described = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 320,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(described))
    prompts = [[3 + (index * index + index // 7) % 300 for index in range(n)] for n in (1, 900, 2400, 2401, 3000)]
    found: dict[str, torch.Tensor] = {}
    for backend in ("triton", "auto"):
        settings = {"dtype": "bfloat16", "prefill_chunk": 2400, "max_model_len": 3100, "attention_backend": backend}
        config = EngineConfig(
            str(tmp_path), load_format="dummy", device="cuda", prefix_cache=False, graphs=GRAPHS[graphs], **settings
        )
        engine = Engine(config)
        found[backend] = torch.stack([engine.next_logits(prompt) for prompt in prompts])
        if backend == "auto" and torch.cuda.get_device_capability() == (9, 0):
            assert engine.caps["attention_backend"] == "gluon"
        engine.close()
    assert (found["auto"] - found["triton"]).abs().max() < 0.15 * found["triton"].std()


def test_an_fp8_kv_cache(toy: Any, toy_engine: Callable[..., Any]) -> None:
    """Half or a quarter of the memory, and at least the first token of most prompts is still the same."""
    prompts = [list(prompt) for prompt in toy.prompts()]
    plain, small = (
        toy_engine(device="cuda", dtype="float32", kv_dtype=kind, graphs=GRAPHS["graphs"]) for kind in ("auto", "fp8")
    )
    assert (small.caps["kv_dtype"], small.caps["kv_scales"]) == ("float8_e4m3fn", "computed")
    assert small.caps["kv_bytes"] * 4 == plain.caps["kv_bytes"]
    done = small.generate(prompts, SamplingParams(max_new_tokens=10, ignore_eos=True))
    same = sum(item.token_ids[0] == toy.greedy(tuple(prompt))[0] for item, prompt in zip(done, prompts, strict=True))
    assert same >= len(prompts) * 0.7


@pytest.mark.parametrize("name", ["qwen3-next-80b-a3b", "qwen3.5-9b", "nemotron-nano-9b-v2", "lfm2-1.2b"])
def test_an_fp8_kv_cache_of_recurrent_targets(name: str, tmp_path: Path) -> None:
    """A few layers of the published shapes: heads of 256 with partial rope, of 128 without rope, and of 64."""
    few = {"num_hidden_layers": 4, "vocab_size": 500, "num_experts": 16, "eos_token_id": None, "bos_token_id": None}
    few |= {"hybrid_override_pattern": "M-*-M-*", "full_attn_idxs": [1, 3]}
    described: dict[str, Any] = dict(SHAPES[name])
    inner = described.get("text_config", described)
    small = inner | {key: value for key, value in few.items() if key in inner}
    described = described | {"text_config": small} if "text_config" in described else small
    (tmp_path / "config.json").write_text(json.dumps(described))
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 250, (length,), generator=generator).tolist() for length in range(3, 120, 6)]
    found = {}
    for kind in ("auto", "fp8"):
        asked = EngineConfig(
            model=str(tmp_path), load_format="dummy", device="cuda", kv_dtype=kind, graphs=GRAPHS["graphs"],
            max_running=8, max_model_len=160, kv_pages=120,
        )  # fmt: skip
        with Engine(asked) as engine:
            done = engine.generate(prompts, SamplingParams(max_new_tokens=6, ignore_eos=True))
            found[kind] = engine.caps["kv_bytes"], [item.token_ids[0] for item in done]
    assert found["fp8"][0] * 2 == found["auto"][0]
    same = sum(one == other for one, other in zip(found["auto"][1], found["fp8"][1], strict=True))
    assert same >= len(prompts) * 0.6


@pytest.mark.parametrize("algorithm", ["none", "ngram-tree", "eagle3"])
def test_mxfp4_experts_give_the_tokens_of_dequantized_ones(
    tmp_path: Path, stay_quantized: Callable[..., None], algorithm: str
) -> None:
    few = {"num_hidden_layers": 4, "vocab_size": 500, "num_local_experts": 8, "eos_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["gpt-oss-20b"] | few))
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 250, (length,), generator=generator).tolist() for length in (3, 40, 200, 300)]
    asked = EngineConfig(
        model=str(tmp_path), load_format="dummy", device="cuda", dtype="float32", max_running=4, max_model_len=360,
    )  # fmt: skip
    drafting = replace(asked, speculation=SPECULATIONS[algorithm], graphs=GRAPHS["graphs"])
    tokens = []
    for keeps, config in ((False, asked), (True, drafting)):
        stay_quantized(keeps)
        with Engine(config) as engine:
            done = engine.generate(prompts, SamplingParams(max_new_tokens=30))
            tokens.append([item.token_ids for item in done])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(("name", "schedule"), crossed(SPECULATIONS, ["v1", "v2"]))
def test_a_check_from_graphs_is_equal(
    open_toy: Callable[..., Any], tmp_path: Path, use_checkpoints: Any, name: str, schedule: str
) -> None:
    use_checkpoints(open_toy)
    config = EngineConfig(
        model="toy", load_format="dummy", device="cuda", dtype="float32", max_model_len=120,
        speculation=with_schedule(SPECULATIONS[name], schedule), graphs=GRAPHS["graphs"],
    )  # fmt: skip
    report = run_check(config, CheckOptions(random=True, input_len=30), tmp_path)
    assert (len(report.findings), report.summary()["diverging"], report.faults) == (32, 0, [])
    assert "NO REPLAYS" not in report.markdown()
    assert report.record.metrics["step_time_s"]


def test_a_trace_names_every_wait(toy: Any, toy_engine: Callable[..., Any], tmp_path: Any) -> None:
    from specbatch.engine.trace import trace

    prompts = [list(prompt) for prompt in toy.prompts()[:4]]
    engine = toy_engine(device="cuda", dtype="float32", graphs=GRAPHS["graphs"])
    result = trace(engine, prompts, 6, tmp_path / "trace.json")
    assert result["steps"] >= 6
    assert result["kernels"]
    assert {row["where"].split(":")[0] for row in result["waits"]} == {"specbatch.core.async_copy"}
    assert (tmp_path / "trace.json").stat().st_size > 1000
