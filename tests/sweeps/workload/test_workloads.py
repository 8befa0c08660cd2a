"""Prompts are seeded, of fixed length, and the same for every configuration."""

from __future__ import annotations

import json
import re
import types
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from specbatch.config.job_size import JobSize
from specbatch.errors import SpecbatchError
from specbatch.evals.prompts import task_prompts
from specbatch.jobs.prompts import read_prompts
from specbatch.sweeps.run.benchmark import SweepOptions
from specbatch.sweeps.run.conversations import Call, label
from specbatch.sweeps.workload.description import describe, sha256_of
from specbatch.sweeps.workload.heading import lines_of
from specbatch.sweeps.workload.workloads import Workload

TOKENIZER = types.SimpleNamespace(
    vocab_size=50, eos_ids=frozenset({3, 4}), bos_id=5, encode=lambda text, add_special_tokens=True: list(text.encode())
)


def test_random_prompts_have_their_length_and_no_end_tokens():
    prompts = Workload(input_len=200).prompts(TOKENIZER, 6)
    assert [len(prompt) for prompt in prompts] == [200] * 6
    assert {token for prompt in prompts for token in prompt} == set(range(50)) - {3, 4, 5}


def test_larger_point_starts_with_the_prompts_of_a_smaller_one():
    workload = Workload(input_len=9)
    assert workload.prompts(TOKENIZER, 7)[:3] == workload.prompts(TOKENIZER, 3)


def test_seed_chooses_the_prompts():
    one, again, other = (Workload(seed=seed).prompts(TOKENIZER, 2) for seed in (1, 1, 2))
    assert one == again
    assert one != other
    assert one[0] != one[1]


def test_number_of_prompts_of_a_point():
    workload = Workload(prompts_per_concurrency=2)
    assert [workload.count(concurrency) for concurrency in (1, 2, 8)] == [4, 4, 16]


def test_questions_of_a_file_repeat(tmp_path):
    (tmp_path / "q.jsonl").write_text('{"question": "a", "answer": "1"}\n{"question": "b", "answer": "2"}\n')
    workload = Workload(dataset="gsm8k", data=tmp_path / "q.jsonl", output_len=5)
    prompts, seen = workload.prompts(TOKENIZER, 3), []
    assert bytes(prompts[0]).decode() == "Question: a\nAnswer:"
    assert prompts[2] == prompts[0]
    assert (workload.prompts(TOKENIZER, 3, lambda *at: seen.append(at)), seen) == (prompts, [(1, 2), (2, 2)])
    assert describe(workload, prompts)["distinct_prompts"] == 2
    assert not workload.params(1)[0].ignore_eos
    assert Workload(output_len=5).params(1)[0].ignore_eos


def test_size_of_a_job(tmp_path):
    """Token ids are counted; rows may have their own lengths of answers."""
    rows = [{"prompt_token_ids": [15_000] * 30, "sampling": {"max_new_tokens": 7}}, {"prompt": "abcd" * 10}]
    work = Workload(written(tmp_path, *rows), output_len=3)
    assert work.size(2) == JobSize(2, 20, 5)
    assert work.size(3) == JobSize(3, 20, 17 / 3)
    grouped = Workload("gsp", groups=1, shared_len=30, input_len=10, output_len=4)
    assert grouped.size(2) == JobSize(2, 40, 4, 30)


def test_different_prompts_have_different_hashes():
    workload = Workload()
    hashes = {describe(workload, prompts)["prompts_sha256"] for prompts in ([[1, 2], [3]], [[1], [2, 3]], [[1, 2, 3]])}
    assert len(hashes) == 3


def test_prompts_of_a_group_share_their_beginning_and_come_in_shuffled_order():
    workload = Workload(dataset="gsp", groups=5, group_prompts=4, shared_len=30, input_len=7)
    assert workload.count(1) == workload.count(9) == 20
    prompts = workload.prompts(TOKENIZER, 20)
    groups = [tuple(prompt[:30]) for prompt in prompts]
    assert {len(prompt) for prompt in prompts} == {37} == {workload.max_model_len - workload.output_len}
    assert sorted(groups.count(group) for group in set(groups)) == [4] * 5
    assert len({tuple(prompt[30:]) for prompt in prompts}) == 20
    assert groups != sorted(groups, key=groups.index), "shuffled"
    assert prompts == workload.prompts(TOKENIZER, 20)


def test_concurrency_above_the_prompts_is_refused():
    few = {"dataset": "gsp", "groups": 2, "group_prompts": 3, "shared_len": 8}
    with pytest.raises(SpecbatchError, match="concurrency=7: there are 6 prompts; use at most 6, or more groups"):
        SweepOptions((1, 7), workload=Workload(**few))
    SweepOptions((1, 6), workload=Workload(**few))
    SweepOptions((7,), workload=Workload(**few, request_rate=2.0))  # with arrivals it is only an upper limit


def test_arrivals_are_seeded_and_have_their_rate():
    one, again, other = (Workload(request_rate=10, seed=seed).arrivals(4000) for seed in (1, 1, 2))
    assert one == again != other
    assert one[0] == 0.0
    gaps = [after - before for before, after in pairwise(one)]
    assert min(gaps) > 0
    mean = sum(gaps) / len(gaps)
    assert 0.095 < mean < 0.105
    spread = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert 0.9 < spread / mean**2 < 1.1, "exponential: standard deviation = mean"
    assert Workload().arrivals(5) is None


def test_range_samples_lengths_and_fixed_lengths_keep_their_prompts():
    workload = Workload(input_len=(5, 40), output_len=(2, 9), seed=3)
    prompts, params = workload.prompts(TOKENIZER, 400), workload.params(400)
    lengths, outputs = [len(prompt) for prompt in prompts], [wanted.max_new_tokens for wanted in params]
    assert (set(lengths), set(outputs)) == (set(range(5, 41)), set(range(2, 10)))
    assert 20 < sum(lengths) / 400 < 25
    assert all(wanted.ignore_eos for wanted in params)
    assert workload.prompts(TOKENIZER, 7) == prompts[:7]
    assert workload.params(7) == params[:7]
    assert Workload(input_len=(5, 40), seed=4).prompts(TOKENIZER, 7) != prompts[:7]
    assert workload.max_model_len == 49
    described = describe(workload, prompts)
    assert (described["input_len"], described["input_range"], described["output_range"]) == (None, [5, 40], [2, 9])
    assert lines_of(described)["workload"] == "random, 5 to 40 input tokens each, output exactly 2 to 9, greedy, seed 3"
    exact = describe(Workload(input_len=6, output_len=4), [[1]])
    assert (exact["input_len"], exact["input_range"], exact["output_len"], exact["output_range"]) == (6, None, 4, None)
    assert sha256_of(Workload(input_len=9).prompts(TOKENIZER, 2)) == (
        "e66d96a0fd1b674b1646bbe7e63444b5b818c3bd32feb6254636227c9708c321"
    ), "records of earlier versions hold it"


def test_groups_have_system_prompts_of_random_lengths():
    workload = Workload(dataset="gsp", groups=6, group_prompts=3, shared_len=(10, 60), input_len=(1, 4))
    prompts = workload.prompts(TOKENIZER, 18)
    longest = {}  # beginnings in common, by their first tokens
    for one in prompts:
        same = [prompt for prompt in prompts if prompt[:10] == one[:10]]
        assert len(same) == 3
        longest[tuple(one[:10])] = sum(len(set(column)) == 1 for column in zip(*same, strict=False))
    assert len(longest) == 6
    assert min(longest.values()) >= 10
    assert len(set(longest.values())) > 2
    assert workload.input_range == (11, 64)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"groups": 3}, "groups=3: goes with dataset='gsp'"),
        ({"group_prompts": 2}, "group_prompts=2: goes with dataset='gsp'"),
        ({"shared_len": 9}, "shared_len=9: goes with dataset='gsp'"),
        ({"input_len": (9, 3)}, "input_len='9-3': the smaller number comes first; use 3-9"),
        ({"output_len": (0, 3)}, "output_len=0: use a whole number of at least 1"),
        ({"burst": 4}, "burst=4: goes with a finite request_rate"),
        ({"burst": -1}, "burst=-1: use a whole number"),
        ({"burst": 0, "request_rate": 5.0}, "request_rate=5.0: all prompts arrive at once"),
        ({"chat_template": True}, "chat_template=True: random prompts are not text"),
        ({"dataset": "gsp", "thinking": False}, "thinking=False: gsp prompts are not text"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(SpecbatchError) as found:
        Workload(**settings)
    assert message in str(found.value)


def test_bursts_arrive_together_at_the_same_mean_rate():
    one = Workload(request_rate=10, burst=8, seed=5).arrivals(8000)
    starts = one[::8]
    assert all(one[place] == one[place // 8 * 8] for place in range(8000))
    assert starts == sorted(set(starts))
    assert 0.9 < starts[-1] / 800 < 1.1
    eleven = Workload(request_rate=10, burst=8, seed=5).arrivals(11)
    assert eleven == [one[0]] * 8 + [one[8]] * 3


def test_burst_of_0_sends_all_prompts_at_once():
    workload = Workload(burst=0)
    assert workload.arrivals(5) == [0.0] * 5
    assert lines_of(describe(workload, [[1]]))["arrivals"].startswith("all prompts of a point at once")
    assert "4 together" in lines_of(describe(Workload(burst=4, request_rate=2), [[1]]))["arrivals"]


def written(tmp_path, *rows):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "in.jsonl")


class Chatty:
    """Renders the template's options and the messages."""

    encode = staticmethod(lambda text, add_special_tokens=True: list(f"{'<s>' * add_special_tokens}{text}".encode()))

    def apply_chat_template(self, messages, **switch):
        return f"{switch or ''}" + "".join(f"[{message['role']}]{message['content']}" for message in messages)


def texts(workload, count=2):
    return [bytes(prompt).decode() for prompt in workload.prompts(Chatty(), count)]


def test_texts_are_continued_or_rendered_as_messages(tmp_path):
    source = written(tmp_path, {"question": "6 x 7?"}, {"messages": [{"role": "user", "content": "Hi"}]})
    assert texts(Workload(source)) == ["<s>Question: 6 x 7?\nAnswer:", "[user]Hi"]
    assert texts(Workload(source, chat_template=True)) == ["[user]6 x 7?", "[user]Hi"]
    assert texts(Workload(source, chat_template=False)) == ["<s>Question: 6 x 7?\nAnswer:", "<s>Hi"]
    assert texts(Workload(source, chat_template=True, thinking=False))[0] == "{'enable_thinking': False}[user]6 x 7?"
    shown = [work.params(1)[0].skip_special_tokens for work in (Workload(), Workload(source))]
    assert shown == [True, False], "tags of a template are special tokens, too"
    assert [Workload(source, chat_template=on).is_rendered for on in (None, True, False)] == [True, True, False]
    line = lines_of(describe(Workload(source, thinking=True), [[1]]))["workload"]
    assert "text by the chat template, thinking on, output at most 128" in line


def test_thinking_needs_a_prompt_that_is_rendered(tmp_path):
    source = written(tmp_path, {"prompt": "a"})
    for template in (None, False):
        with pytest.raises(SpecbatchError, match=r"thinking=True: no prompt is rendered .* add chat_template=True"):
            Workload(source, thinking=True, chat_template=template)
    with pytest.raises(SpecbatchError, match="line 1 has token ids, which cannot be a message"):
        Workload(written(tmp_path, {"prompt_token_ids": [4]}), chat_template=True)
    with pytest.raises(SpecbatchError, match="answers of text end by themselves"):
        Workload(source, output_len=(3, 4))


def test_turns_of_a_conversation(tmp_path):
    source = written(
        tmp_path, {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]}, {"prompt": "x"}
    )
    workload = Workload(source)
    assert texts(workload, 1) == ["[user]Write."]
    assert (workload.rows[0].id, workload.rows[0].later, workload.rows[1].later) == (81, ("Rewrite.",), ())
    assert (workload.most_turns, workload.requests(1)) == (2, 6), "two rows twice"
    assert "conversations of up to 2 turns" in lines_of(describe(workload, [[1]]))["workload"]
    assert Workload(source, turns=1).most_turns == 1
    assert texts(Workload(source, chat_template=False), 1) == ["<s>Write."]
    for turns in (["a", 7], "text", [""]):
        with pytest.raises(SpecbatchError, match="turns must be a list of strings"):
            Workload(written(tmp_path, {"turns": turns}))
    with pytest.raises(SpecbatchError, match=r"one of the keys prompt, prompt_token_ids, question, messages$"):
        read_prompts(Path(written(tmp_path, {"turns": ["a"]})))  # generate would not answer the other turns


def test_ids_of_rows_with_turns(tmp_path):
    asked = {"role": "user", "content": "Write."}
    rows = [
        {"turns": ["Write."], "id": "a"},
        {"turns": ["Write."], "id": None, "question_id": 0},
        {"messages": [asked, asked], "question_id": "b"},
        {"prompt": "x", "id": "c", "question_id": 7},
    ]
    assert [row.id for row in Workload(written(tmp_path, *rows)).rows] == ["a", 0, "b", "c"]
    (alone,) = read_prompts(Path(written(tmp_path, {"prompt": "x", "question_id": 7})))
    assert (alone.id, alone.unread) == (None, ("question_id",))
    with pytest.raises(SpecbatchError, match="id=true: use a string or a whole number"):
        Workload(written(tmp_path, {"turns": ["Write."], "id": True}))


def test_turns_are_refused_where_there_are_none_and_with_a_clock(tmp_path):
    source = written(tmp_path, {"turns": ["Write.", "Rewrite."]})
    for how, message in (
        ({"request_rate": 2.0}, "request_rate=2.0: later turns wait for answers .* use turns=1"),
        ({"burst": 0}, "burst='all': later turns wait"),
        ({"turns": 0}, "turns=0: use a whole number of at least 1"),
    ):
        with pytest.raises(SpecbatchError, match=message):
            Workload(source, **how)
    assert Workload(source, turns=1, request_rate=2.0).is_open
    with pytest.raises(SpecbatchError, match="turns=2: the prompts have a single turn"):
        Workload(written(tmp_path, {"turns": ["Write."]}), turns=2)
    with pytest.raises(SpecbatchError, match="turns=2: random prompts are not text"):
        Workload(turns=2)


def test_task_has_examples_and_stop_texts():
    plain = Workload("lm-eval:one_digit_sums", output_len=5, read_task=task_prompts)
    first, second = texts(plain)
    assert first != second
    assert first.count("=") == 6, "five examples"
    assert plain.stop == plain.params(1)[0].stop != ()
    chat = Workload("lm-eval:one_digit_sums", chat_template=True, read_task=task_prompts)
    assert texts(chat)[0].count("[assistant]") == 5
    assert chat.rows[0].value[-1]["role"] == "user"
    assert len(plain.rows) > 20


def test_task_reads_questions_from_a_file(tmp_path):
    rows = [{"question": f"What is {n}?", "answer": f"It is #### {n}"} for n in range(8)]
    workload = Workload("lm-eval:gsm8k", Path(written(tmp_path, *rows)), read_task=task_prompts)
    first = texts(workload)[0]
    assert first.endswith("Question: What is 0?\nAnswer:")
    assert first.count("Question:") == 6
    assert "Question:" in workload.stop


def speed_bench(folder: Path, *rows: dict) -> Path:
    """Rows as the script of SPEED-Bench prepares them."""
    rows = rows or tuple(
        {"question_id": f"{name}{n}", "category": name, "messages": [{"role": "user", "content": f"{name} {n} {turn}"}
         for turn in range(1 + n)]} for name in ("coding", "math") for n in range(3 if name == "coding" else 1)
    )  # fmt: skip
    path = folder / "qualitative.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_categories_are_asked_in_turn_or_alone(tmp_path):
    path = str(speed_bench(tmp_path))
    found = Workload(path, output_len=5)
    assert [row.value for row in found.rows] == [
        [{"role": "user", "content": text}] for text in ("coding 0 0", "math 0 0", "coding 1 0", "coding 2 0")
    ], "the first turn of each"
    requests = [{"index": index} for index in (5, 1, 0, 4, 3, 2)]
    label(replace(found, turns=1), [Call(1, list(range(6)), [])], requests, 6)
    assert [request["category"] for request in requests[:3]] == ["math", "math", "coding"]
    math = Workload(path, output_len=5, category="math")
    assert [row.category for row in math.rows] == ["math"]
    described = describe(math, [[1]])
    assert described["category"] == "math"
    assert lines_of(described)["workload"].startswith(f"{path} (math), text")
    for category, dataset, works in (
        ("maths", path, "use one of coding, math"),
        ("math", "gsm8k", "the prompts have no categories"),
        ("math", "random", "random prompts are not text"),
    ):
        with pytest.raises(SpecbatchError, match=f"category='{category}': {works}"):
            Workload(dataset, output_len=5, category=category)


def test_requests_without_categories_and_turns_are_left_as_they_are():
    requests = [{"index": 0}]
    for workload in (Workload(), Workload("gsm8k", output_len=5)):
        label(workload, [Call(1, [0], [])], requests, 1)
    assert requests == [{"index": 0}]


@pytest.mark.parametrize(
    ("row", "works"),
    [
        ({"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"]}, "turns is a placeh"),
        ({"turns": ["a"], "category": 3}, "category=3: use a string"),
    ],
)
def test_unprepared_rows_are_refused(tmp_path, row, works):
    with pytest.raises(SpecbatchError, match=rf"qualitative.jsonl:1'?: {works}"):
        Workload(str(speed_bench(tmp_path, row)), output_len=5)


def test_answers_are_greedy_or_sampled_with_a_seed_of_their_own():
    sampling = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05}
    greedy, one, again, other = Workload(), *(Workload(seed=seed, **sampling) for seed in (1, 1, 2))
    assert {(wanted.temperature, wanted.seed) for wanted in greedy.params(3)} == {(0.0, None)}
    assert one.params(40) == again.params(40)
    assert one.params(9) == one.params(40)[:9]
    found = one.params(40)[3]
    assert {name: getattr(found, name) for name in sampling} == sampling
    seeds = {wanted.seed for workload in (one, other) for wanted in workload.params(40)}
    assert len(seeds) == 80
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert describe(one, [[1]])["sampling"] == sampling
    assert ", temperature 0.6, top-p 0.95, top-k 20, min-p 0.05, seed 1" in lines_of(describe(one, [[1]]))["workload"]
    assert describe(greedy, [[1]])["sampling"] is None
    for name, value, works in (
        ("temperature", -1.0, "use 0"),
        ("top_p", 0.9, "greedy answers are not sampled; add a temperature"),
        ("min_p", 2.0, "use a value from 0"),
    ):
        with pytest.raises(SpecbatchError, match=f"{name}={value}: {works}"):
            Workload(**{name: value})


def test_rows_with_their_own_sampling(tmp_path):
    rows = [
        {"prompt": "a", "sampling": {"max_new_tokens": 3}},
        {"messages": [{"role": "user", "content": "b"}], "sampling": {"max_new_tokens": 9, "regex": "yes|no"}},
        {"prompt_token_ids": [7], "sampling": {"temperature": 0.5, "seed": 4, "stop": "\n"}},
        {"question": "d", "sampling": {"temperature": 0.5, "min_tokens": 2}},
        {"prompt": "e"},
    ]
    workload = Workload(written(tmp_path, *rows), output_len=32)
    own = workload.params(7)
    assert [one.max_new_tokens for one in own] == [3, 9, 32, 32, 32, 3, 9]
    assert [one.temperature for one in own[:5]] == [0, 0, 0.5, 0.5, 0]
    assert (own[1].regex, own[2].seed, own[2].stop, own[3].min_tokens) == ("yes|no", 4, ("\n",), 2)
    assert own[3].seed is not None
    assert own[3].seed == workload.params(4)[3].seed
    found = describe(workload, [[1]] * 5)
    assert (found["output_len"], found["output_range"], found["sampling"]["temperature"]) == (32, [3, 32], 0.5)
    assert found["own_sampling"]["names"] == ["max_new_tokens", "min_tokens", "regex", "seed", "stop", "temperature"]
    line = lines_of(found)["workload"]
    assert "output at most 3 to 32" in line
    assert "4 of 5 rows with their own max_new_tokens, min_tokens, regex, seed, stop, temperature" in line
    alike = Workload(written(tmp_path, *({"prompt": text, "sampling": {"max_new_tokens": 9}} for text in "ab")))
    assert describe(alike, [[1]] * 2)["output_len"] == describe(alike, [])["output_len"] == 9
    rows[0]["sampling"]["max_new_tokens"] = 4
    other = Workload(written(tmp_path, *rows), output_len=32)
    assert describe(other, [[1]] * 5)["own_sampling"]["sha256"] != found["own_sampling"]["sha256"]
    assert "own_sampling" not in describe(Workload(written(tmp_path, {"prompt": "e"})), [[1]])


@pytest.mark.parametrize(
    ("sampling", "problem"),
    [
        ({"n": 2}, "sampling: n has no effect in a sweep; leave it out"),
        ({"logprobs": True, "top_logprobs": 2}, "sampling: logprobs, top_logprobs has no effect in a sweep"),
        ({"prompt_logprobs": True}, "sampling: prompt_logprobs has no effect"),
        ({"max_tokens": 3}, 'sampling has no parameter "max_tokens"; use max_new_tokens'),
        ({"temperature": "hot"}, 'sampling.temperature="hot": use 0 (greedy) or a positive number'),
        ({"min_tokens": 40}, "sampling: min_tokens=40: use at most max_new_tokens=32"),
        ({"regex": "("}, 'sampling.regex="(":'),
        ({"top_k": 5}, "sampling: top_k=5: greedy answers are not sampled; add a temperature"),
        (5, "sampling=5: use an object"),
    ],
)
@pytest.mark.parametrize("where", ["dataset", "data"])
def test_sampling_of_a_row_that_cannot_be_used_is_refused(tmp_path, sampling, problem, where):
    file = written(tmp_path, {"question": "a"}, {"question": "b", "sampling": sampling})
    options = {"dataset": file} if where == "dataset" else {"dataset": "gsm8k", "data": Path(file)}
    with pytest.raises(SpecbatchError, match=re.escape(problem)) as found:
        Workload(output_len=32, **options)
    assert str(found.value).startswith(f"{where}='{file}:2': ")


def test_sampling_of_a_row_that_is_not_sent_to_servers_is_refused(tmp_path):
    sent = {"max_new_tokens": 3, "temperature": 1, "top_p": 0.5, "top_k": 2, "min_p": 0.1, "seed": 1, "stop": "x"}
    Workload(written(tmp_path, {"prompt": "a", "sampling": sent})).refuse_unsent()
    workload = Workload(
        written(tmp_path, {"prompt": "a"}, {"prompt": "b", "sampling": {"regex": "a", "reasoning": ["b"]}})
    )
    with pytest.raises(SpecbatchError, match=r"dataset='.*:2': sampling: reasoning, regex is not sent to a server"):
        workload.refuse_unsent()


def test_parameters_beside_a_prompt_are_noted(tmp_path):
    rows = ({"prompt": "a"}, {"prompt": "b", "temperature": 1, "max_tokens": 3}, {"prompt": "c", "temperature": 1})
    file = written(tmp_path, *rows)
    assert Workload(file).notes() == [
        f"note: {file}:2: max_tokens, temperature beside the prompt has no effect; "
        'parameters of a row go into "sampling"'
    ]
    assert Workload(written(tmp_path, {"question": "a", "answer": "b"})).notes() == [
        f"note: {file}:1: keys that are not read: answer"
    ]


def test_commands_that_use_no_parameters_of_rows_refuse_them(tmp_path):
    """`check` and `train-draft`."""
    file = Path(written(tmp_path, {"prompt": "a"}, {"prompt": "b", "sampling": {"temperature": 1}}))
    with pytest.raises(SpecbatchError, match=r":2': has sampling, which this command does not use for single rows"):
        read_prompts(file)
