"""`specbatch advise`: candidates, rounds, advice, records, and servers as candidates."""

from __future__ import annotations

import json
import math

import pytest
from rival_servers import Rival, rival

from specbatch.cli.advise import candidates
from specbatch.cli.options import EngineOptions
from specbatch.engine.scoring import Likelihood
from specbatch.errors import SpecbatchError
from specbatch.models.heads.dflash import published_shape
from specbatch.sweeps.report.points import load_records
from specbatch.weights import open_checkpoint

SHORT = ("--device", "cpu", "--output-len", 5, "--prompts-per-concurrency", 2)


@pytest.fixture
def prompts(jsonl):
    return jsonl(*({"prompt": f"prompt {n}"} for n in range(4)))


@pytest.fixture
def losses(engine, monkeypatch):
    """The log-probability of each token of a prompt; how often prompts were scored."""
    found = {"logprob": -3.0, "calls": 0}

    def score(self, pairs):
        found["calls"] += 1
        return [Likelihood(found["logprob"] * len(tokens), True) for _, tokens in pairs]

    monkeypatch.setattr(engine, "score", score, raising=False)
    return found


def test_advice_of_the_engine(run, tmp_path, prompts, losses, engine, no_plots):
    out = tmp_path / "out"
    words = ("advise", prompts, "--draft-tokens", "1,3", "--concurrency", "1,2", *SHORT, "--output", out)
    result = run(*words)
    assert result.exit_code == 0, result.output
    found = load_records(out)
    names = ["baseline", "ngram draft-tokens=1", "ngram draft-tokens=3"]
    assert {one.workload["configuration"] for one in found} == set(names)
    assert len(found) == 2 * 3 * 3, "3 repeats are the default"
    assert {one.workload["dataset"] for one in found} == {str(prompts)}
    advice = json.loads((out / "advice.json").read_text())
    assert (out / "advice.md").read_text() in result.stdout
    assert advice["chosen"] in (None, *names[1:])
    assert losses["calls"] == 1, "prompts are scored once"
    assert {one.workload["prompt_loss"] for one in found} == {3.0}
    assert run("report", out, "--output", tmp_path / "report").exit_code == 0
    count = len(engine.order)
    assert run(*words).exit_code == 0
    assert len(engine.order) == count, "every point is finished"


def test_prompts_that_the_model_finds_improbable_are_warned_of(run, tmp_path, jsonl, losses):
    """The loss on token ids drawn at random is at least log(257) nats per token."""
    losses["logprob"] = -math.log(257)
    ids = jsonl(*({"prompt_token_ids": [5 * n + 3, 17, 91, 200, 33]} for n in range(4)))
    result = run("advise", ids, "--concurrency", 1, "--repeats", 1, *SHORT, "--output", tmp_path / "out")
    assert "RANDOM PROMPTS: the prompts look like random ids: the model's loss on them is 5.5" in result.stdout


def test_candidates(tmp_path):
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    drafts = ["ngram", "mtp", "self:skip=1-2", "eagle3=org/head", str(tmp_path / "head"), "dflash=org/block"]
    found = candidates(EngineOptions(device="cpu"), drafts, "1,3", concurrency=2)
    shown = {name: (own.speculation.algorithm, own.speculation.draft) for name, own in found.items()}
    assert shown.pop("baseline") == ("none", None)
    assert shown["eagle3 head draft-tokens=1"] == ("eagle3", "org/head")
    assert ("eagle3", str(tmp_path / "head")) in shown.values(), "a folder says its algorithm"
    assert shown["standalone self:skip=1-2 draft-tokens=3"] == ("standalone", "self:skip=1-2")
    heads = {name for name in found if name.startswith("eagle3 head") and name.endswith("=3")}
    assert len(heads) == 2, "two heads of the same name"
    assert [own.speculation.num_drafts for own in candidates(EngineOptions(), None, "2,4", concurrency=2).values()] == [
        0,
        2,
        4,
    ]


def test_the_usual_number_is_that_of_the_draft(tmp_path):
    """A DFLASH head with a block of 8 drafts 7 tokens, not the 15 of published ones."""
    block = tmp_path / "block"
    block.mkdir()
    shape = published_shape(open_checkpoint("qwen3-8b", "dummy").config) | {"block_size": 8}
    (block / "config.json").write_text(json.dumps(shape))
    engine = EngineOptions(model="qwen3-8b", load_format="dummy", device="cpu")
    found = candidates(engine, ["dflash=dummy", f"dflash={block}", "ngram"], None, concurrency=2)
    assert [*found][1:] == [
        *(f"dflash dummy draft-tokens={count}" for count in (1, 8, 15)),
        *(f"dflash block draft-tokens={count}" for count in (1, 4, 7)),
        *(f"ngram draft-tokens={count}" for count in (1, 2, 4)),
    ]


@pytest.mark.parametrize(("given", "used"), [((), "auto"), (("--prefill-graph", "off"), "off")])
def test_candidates_have_the_usual_prefill_graphs(run, prompts, monkeypatch, given, used):
    """Advice compares drafts, so that nothing else of the engine is switched off, as `sweep` does."""
    seen = []

    def candidates(engine, *_, **settings):
        seen.append(engine.prefill_graph)
        raise SpecbatchError("stop")

    monkeypatch.setattr("specbatch.cli.advise.candidates", candidates)
    assert run("advise", prompts, *given, *SHORT).exit_code == 2
    assert seen == [used]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--draft", "none"), "--draft='none': the model without drafts is always measured"),
        (("--draft", "eagle3"), "write eagle3=DRAFT"),
        (("--draft", "ngram=x"), "takes no draft"),
        (("--dataset", "gsm8k"), "leave one out"),
        (("--configs", "x.toml", "--draft", "ngram"), "the candidates are those of --configs"),
        (("--configs", "baseline"), "name a file"),
        (("--draft-tokens", "0"), "0"),
    ],
)
def test_refusals(run, prompts, words, message):
    result = run("advise", prompts, *words, *SHORT)
    assert result.exit_code == 2
    assert message in result.stderr


SERVERS = """
[plain]
engine = "http"
base-url = "{plain}"

[heads]
engine = "http"
base-url = "{heads}"
algorithm = "eagle3"
draft = "org/head"
draft-tokens = 3
"""


@pytest.mark.slow
def test_advice_through_servers(run, tmp_path, prompts, engine, use_tokenizer):
    """A server cannot change its drafter: those given are compared, and fewer drafts follow from the positions."""
    use_tokenizer(engine.tokenizer_class())
    verifies = ((3, 2), (3, 0), (3, 3))
    with (
        rival(Rival("vllm", step_s=0.03)) as plain,
        rival(Rival("vllm", verifies, of_requests="detailed", step_s=0.03)) as heads,
    ):
        (tmp_path / "servers.toml").write_text(SERVERS.format(plain=plain, heads=heads))
        words = ("--configs", tmp_path / "servers.toml", "--concurrency", 1, "--output-len", 10)
        result = run("advise", prompts, *words, "--prompts-per-concurrency", 2, "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    advice = json.loads((tmp_path / "out" / "advice.json").read_text())
    assert advice["chosen"] == "heads"
    assert '"model": "org/head", "num_speculative_tokens": 3' in advice["flags"]["vLLM"]["command"]
    # Verifies of 3, 1, 4 and 1 of 3 tokens: of the last one only the first draft counts.
    assert f"{1 + 3 / 4} {1 + 2 * 3 / 4:.2f} {1 + 2 * 3 / 4 + 3 / 8:.2f}" in result.stdout
