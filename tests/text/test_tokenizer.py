"""Tokenizers: encoding, end tokens, chat templates, and comparison of vocabularies."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from limits import limited
from tokenizers import AddedToken, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from transformers.utils.chat_template_utils import render_jinja_template
from transformers_features import NO_NONE, REASONING_NAMES

from specbatch.errors import SpecbatchError
from specbatch.jobs.prompts import Prompt
from specbatch.text.tokenizer import ByteTokenizer, Tokenizer, refuse_longer, vocabulary_difference
from specbatch.weights import gguf_tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "Tom has 12  boxes with 3456 apples, isn't that   6789?",
    "def f(x):\n    return  x[10:20]\n\n\n",
    "Zürich, naïve café, 日本語 and 🙂",
    " 1  22   333\r\n\t",
    "",
]


@pytest.fixture(scope="module")
def backend() -> Backend:
    tokenizer = Backend(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=297, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def write(folder: Path, backend: Backend, **files: Any) -> Path:
    """A tokenizer's folder; `files` are JSON by stem, text where it is a str."""
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for stem, content in files.items():
        if isinstance(content, str):
            (folder / f"{stem}.jinja").write_text(content)
        else:
            (folder / f"{stem}.json").write_text(json.dumps(content))
    return folder


def clone(backend: Backend) -> Backend:
    return Backend.from_str(backend.to_str())


def test_round_trip(tmp_path: Path, backend: Backend) -> None:
    tokenizer = Tokenizer.from_folder(write(tmp_path, backend), name="mine")
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.bos_id) == ("mine", 300, None)
    assert tokenizer.eos_ids == frozenset()
    for text in TEXTS:
        assert tokenizer.encode(text) == backend.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
    marked = tokenizer.encode("<|im_start|>hi<|im_end|>")
    assert (marked[0], marked[-1]) == (298, 299)
    assert tokenizer.decode(marked) == "hi"
    assert tokenizer.decode(marked, skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"
    assert tokenizer.vocabulary()[297:] == SPECIAL
    assert tokenizer.vocabulary() == [backend.id_to_token(index) for index in range(300)]


def test_end_of_text_ids_come_from_every_file(tmp_path: Path, backend: Backend) -> None:
    folder = write(
        tmp_path,
        backend,
        config={"eos_token_id": 5, "text_config": {"eos_token_id": 11}},
        generation_config={"eos_token_id": [297, 7]},
        tokenizer_config={"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>"},
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_ids == {5, 7, 11, 297, 299}
    assert tokenizer.bos_id == 298


@pytest.mark.parametrize(("add_bos", "template", "expected"), [
    (None, False, False),
    (None, True, True),
    (False, True, False),
    (True, False, True),
    (True, True, True),
])  # fmt: skip
def test_bos_token_is_added_if_the_files_require_it(
    tmp_path: Path, backend: Backend, add_bos: bool | None, template: bool, expected: bool
) -> None:
    changed = clone(backend)
    if template:
        single = "<|im_start|> $A"
        special = [("<|im_start|>", 298)]
        changed.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    described = {"bos_token": "<|im_start|>"} | ({} if add_bos is None else {"add_bos_token": add_bos})
    lines: list[str] = []
    folder = write(tmp_path, changed, tokenizer_config=described)
    tokenizer = Tokenizer.from_folder(folder, log=lines.append)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    assert any("add_bos_token" in line for line in lines) == (theirs.encode("hello") != tokenizer.encode("hello"))
    plain = backend.encode("hello").ids
    assert tokenizer.encode("hello") == ([298, *plain] if expected else plain)
    assert tokenizer.encode("hello", add_special_tokens=False) == plain


@pytest.mark.parametrize("direction", ["Left", "Right"])
def test_truncation_and_padding_of_the_file_are_off(direction: str, tmp_path: Path, backend: Backend) -> None:
    """Both are the state of whoever saved the file. transformers clears them at each call."""
    truncation = {"direction": direction, "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    padding = {"direction": direction, "pad_to_multiple_of": None, "pad_id": 297, "pad_type_id": 0}
    padding["pad_token"] = "<|im_end|>"
    folder = write(tmp_path, backend)
    described = json.loads((folder / "tokenizer.json").read_text())
    for strategy, multiple in (({"Fixed": 100}, None), ("BatchLongest", 64), ({"Fixed": 2}, 8)):
        saved = padding | {"strategy": strategy, "pad_to_multiple_of": multiple}
        for cut in (truncation, None):
            (folder / "tokenizer.json").write_text(json.dumps(described | {"truncation": cut, "padding": saved}))
            tokenizer, theirs = Tokenizer.from_folder(folder), PreTrainedTokenizerFast.from_pretrained(folder)
            for text in TEXTS:
                assert tokenizer.encode(text) == theirs.encode(text) == backend.encode(text).ids


def test_truncation_of_files_that_transformers_reads_is_off(tmp_path: Path, backend: Backend) -> None:
    changed = clone(backend)
    changed.enable_truncation(3)
    changed.enable_padding(length=50)
    assert Tokenizer(changed, name="mine").encode(TEXTS[0]) == backend.encode(TEXTS[0]).ids


def test_chat_templates(tmp_path: Path, backend: Backend) -> None:
    messages = [{"role": "user", "content": "1 < 2 & 'x'"}]
    template = """{{ bos_token }}{% for m in messages %}
        {% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}
[{{ m.role }}]{{ m.content | trim | tojson }}{% endfor %}
{% if add_generation_prompt %}>>{% endif %}"""
    described = {"bos_token": "<|im_start|>", "chat_template": [{"name": "default", "template": template}]}
    tokenizer = Tokenizer.from_folder(write(tmp_path, backend, tokenizer_config=described))
    assert tokenizer.has_chat_template
    assert tokenizer.apply_chat_template(messages) == "<|im_start|>[user]\"1 < 2 & 'x'\">>"
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False).endswith('"')
    with pytest.raises(SpecbatchError, match="no system"):
        tokenizer.apply_chat_template([{"role": "system", "content": "be good"}])

    folder = write(tmp_path, backend, chat_template="own file {{ messages[0].content.__class__.__mro__ }}")
    unsafe = Tokenizer.from_folder(folder)
    with pytest.raises(SpecbatchError, match="unsafe"):
        unsafe.apply_chat_template(messages)
    folder = write(tmp_path, backend, chat_template="{% for %}")
    with pytest.raises(SpecbatchError, match=r"chat_template=.*cannot be read"):
        Tokenizer.from_folder(folder).apply_chat_template(messages)
    without = Tokenizer.from_folder(write(tmp_path / "plain", backend))
    assert not without.has_chat_template
    with pytest.raises(SpecbatchError, match="chat_template=None"):
        without.apply_chat_template(messages)


@NO_NONE.needed
def test_values_of_none_are_left_out_of_messages(tmp_path: Path, backend: Backend) -> None:
    """As in transformers: templates write "None" for them, or take a branch with tool calls."""
    template = "{% for m in messages %}{{ m.content }}{% if 'tool_calls' in m %}!{% endif %}{% endfor %}"
    messages = [{"role": "assistant", "content": None, "tool_calls": None}, {"role": "user", "content": "x"}]
    folder = write(tmp_path, backend, chat_template=template)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder).apply_chat_template(messages, tokenize=False)
    assert Tokenizer.from_folder(folder).apply_chat_template(messages) == theirs == "x"


@REASONING_NAMES.needed
@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_content": "r"},
        {"reasoning": "r"},
        {"thinking": "t"},
        {"reasoning": "r", "thinking": "t", "reasoning_content": None},
        {"reasoning": "r", "thinking": "t", "reasoning_content": "c"},
        {"reasoning": "r", "reasoning_content": ""},
        {"reasoning": None},
        {},
    ],
)
def test_reasoning_of_messages_has_the_names_that_templates_read(
    fields: dict[str, Any], tmp_path: Path, backend: Backend
) -> None:
    """As in transformers 5.23: templates of Qwen read `reasoning_content`, those of gpt-oss `thinking`."""
    folder = write(tmp_path, backend, chat_template="{% for m in messages %}{{ m | tojson }}{% endfor %}")
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", **fields}]
    theirs = PreTrainedTokenizerFast.from_pretrained(folder).apply_chat_template(messages, tokenize=False)
    assert Tokenizer.from_folder(folder).apply_chat_template(messages) == theirs


@pytest.mark.parametrize("split", [True, False])
def test_special_tokens_are_split_where_the_files_say_so(split: bool, tmp_path: Path, backend: Backend) -> None:
    folder = write(tmp_path, backend, tokenizer_config={"split_special_tokens": split})
    theirs = PreTrainedTokenizerFast.from_pretrained(folder).encode("<|im_start|>hi")
    assert Tokenizer.from_folder(folder).encode("<|im_start|>hi") == theirs
    assert (theirs[0] == 298) is not split


@pytest.mark.parametrize("name", ["tools", "documents"])
def test_templates_see_that_there_are_no_tools_and_documents(name: str, tmp_path: Path, backend: Backend) -> None:
    tests = ("is none", "is not none", "== none", "is defined", "| tojson", "", "| default('d')", "or 'o'")
    template = "".join(f"[{{{{ {name} {test} }}}}]" for test in tests)
    folder = write(tmp_path, backend, chat_template=template + f"{{% if {name} %}}yes{{% endif %}}")
    messages = [{"role": "user", "content": "x"}]
    theirs = PreTrainedTokenizerFast.from_pretrained(folder).apply_chat_template(messages, tokenize=False)
    assert Tokenizer.from_folder(folder).apply_chat_template(messages) == theirs
    assert theirs == "[True][False][True][True][null][None][None][o]"


def test_special_tokens_do_not_replace_other_variables(tmp_path: Path, backend: Backend) -> None:
    described = {"extra_special_tokens": {"messages": "<|im_start|>", "tools": "<|im_end|>"}}
    folder = write(tmp_path, backend, tokenizer_config=described, chat_template="{{ messages[0].content }}{{ tools }}")
    assert Tokenizer.from_folder(folder).apply_chat_template([{"role": "user", "content": "x"}]) == "xNone"


def test_tool_calls_need_a_template_that_renders_them(tmp_path: Path, backend: Backend) -> None:
    template = (
        "{% for m in messages %}{{ m.content is defined }}{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}"
    )
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": {"a": 1}}}]}]
    tokenizer = Tokenizer.from_folder(write(tmp_path / "a", backend, chat_template=template))
    assert tokenizer.apply_chat_template(messages) == 'False{"a": 1}'  # as in transformers
    other = Tokenizer.from_folder(write(tmp_path / "b", backend, chat_template="{{ messages[0].content }}"))
    with pytest.raises(SpecbatchError, match=r'^messages=\[\{.*"content": null.*does not render tool calls'):
        other.apply_chat_template(messages)
    with pytest.raises(SpecbatchError, match="only a chat template renders tool calls"):
        Prompt(1, "messages", messages).encode(tokenizer, chat_template=False)


def test_arguments_are_texts_where_the_template_fails_with_objects(tmp_path: Path, backend: Backend) -> None:
    template = "{% for m in messages %}{{ '' + m.tool_calls[0].function.arguments }}{% endfor %}"
    calls = [{"function": {"arguments": {"a": "é"}}}]
    tokenizer = Tokenizer.from_folder(write(tmp_path / "a", backend, chat_template=template))
    assert tokenizer.apply_chat_template([{"role": "assistant", "tool_calls": calls}]) == '{"a": "é"}'
    with pytest.raises(SpecbatchError, match="can only concatenate str"):  # the reason of the usual form
        tokenizer.apply_chat_template([{"role": "assistant", "tool_calls": [*calls]}, {"role": "user"}])


@pytest.mark.parametrize("in_files", [False, True])
def test_template_for_tools(tmp_path: Path, backend: Backend, in_files: bool) -> None:
    """Some models, such as Hermes 2 Pro and Hermes 3, have one of its own."""
    templates = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools | length }}<tool_call></tool_call>"}
    named = [{"name": name, "template": text} for name, text in templates.items()]
    config = {"tokenizer_config": {"chat_template": named}}
    folder = write(tmp_path / "a", backend, **({"chat_template": templates["default"]} if in_files else config))
    if in_files:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(templates["tool_use"])
    tokenizer = Tokenizer.from_folder(folder)
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(messages) == "x"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert tokenizer.apply_chat_template(messages, tools=tools) == "1<tool_call></tool_call>"
    assert (tokenizer.chat_template, tokenizer.tool_template) == tuple(templates.values())


def test_tools_need_a_template_that_shows_them(tmp_path: Path, backend: Backend) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    tokenizer = Tokenizer.from_folder(write(tmp_path / "a", backend, chat_template="{{ tools | tojson }}"))
    assert tokenizer.apply_chat_template([], tools=tools) == '[{"type": "function", "function": {"name": "f"}}]'
    assert tokenizer.apply_chat_template([]) == "null"
    other = Tokenizer.from_folder(write(tmp_path / "b", backend, chat_template="{{ tools_of }}x"))
    assert other.apply_chat_template([], tools=[]) == "x"
    with pytest.raises(
        SpecbatchError, match=r'^tools=\["f"\]: the chat template of b does not show tools to the model'
    ):
        other.apply_chat_template([], tools=tools)
    with pytest.raises(SpecbatchError, match=r'^tools=\["f"\]: only a chat template shows tools'):
        Prompt(1, "messages", [{"role": "user", "content": "x"}]).encode(tokenizer, chat_template=False, tools=tools)


def test_folders_without_a_readable_tokenizer(tmp_path: Path, backend: Backend) -> None:
    with pytest.raises(SpecbatchError, match="the folder has no tokenizer"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(SpecbatchError, match="it cannot be read"):
        Tokenizer.from_folder(tmp_path)
    write(tmp_path, backend)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(SpecbatchError, match=r"generation_config.json.*not JSON"):
        Tokenizer.from_folder(tmp_path)


def test_pre_tokenizer_of_the_file_is_kept(tmp_path: Path, backend: Backend) -> None:
    """The class name must not replace it: that of GPT-2 does not split digits."""
    digits = clone(backend)
    parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    digits.pre_tokenizer = pre_tokenizers.Sequence(parts)
    folder = write(tmp_path, digits, tokenizer_config={"tokenizer_class": "GPT2Tokenizer"}, config={})
    text = "a  12"
    assert digits.encode(text).ids != backend.encode(text).ids
    assert Tokenizer.from_folder(folder).encode(text) == digits.encode(text).ids


def test_folder_without_tokenizer_json_uses_transformers(tmp_path: Path, backend: Backend) -> None:
    described = json.loads(backend.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(backend.get_vocab()))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in described["merges"]))
    specials = {"eos_token": "<|im_end|>", "unk_token": "<|endoftext|>", "bos_token": "<|im_start|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", **specials}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode(TEXTS[0]) == backend.encode(TEXTS[0]).ids
    assert tokenizer.eos_ids == {299}


def test_thousands_of_prompts_are_encoded_fast(tmp_path: Path, backend: Backend) -> None:
    tokenizer = Tokenizer.from_folder(write(tmp_path, backend))
    text = " ".join(TEXTS * 3)
    start = time.perf_counter()
    for _ in range(2000):
        tokenizer.encode(text)
    assert time.perf_counter() - start < 10


def test_byte_tokenizer() -> None:
    tokenizer = ByteTokenizer(300)
    for text in TEXTS:
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_ids == {256}
    assert tokenizer.decode([104, 256, 299, 105]) == "h<299>i"
    assert tokenizer.decode([104, 256], skip_special_tokens=False) == "h<eos>"
    assert tokenizer.decode([0xC3]) == "\ufffd"
    assert len(tokenizer.vocabulary()) == tokenizer.vocab_size == 300
    assert len(set(tokenizer.vocabulary())) == 300
    assert not tokenizer.has_chat_template
    with pytest.raises(SpecbatchError, match="chat_template"):
        tokenizer.apply_chat_template([])
    assert vocabulary_difference(tokenizer, ByteTokenizer(300)) is None


def test_vocabularies_are_compared_by_id(backend: Backend) -> None:
    ours = Tokenizer(backend, name="target")
    assert vocabulary_difference(ours, Tokenizer(clone(backend), name="draft")) is None
    padded = clone(backend)
    padded.add_tokens([f"[PAD{index}]" for index in range(300, 310)])
    assert vocabulary_difference(ours, Tokenizer(padded, name="draft")) is None
    assert vocabulary_difference(Tokenizer(padded, name="draft"), ours) is None
    for name in ("[PAD]", "<pad>", "<|pad|>"):
        named = clone(backend)
        named.add_special_tokens([name])
        assert vocabulary_difference(Tokenizer(named, name="draft"), ours) is None
    longer = clone(backend)
    longer.add_tokens(["<tool>"])
    assert vocabulary_difference(ours, Tokenizer(longer, name="draft")) == "target has 300 tokens and draft has 301"
    other = Backend.from_str(backend.to_str().replace("<|im_end|>", "<|done|>"))
    difference = vocabulary_difference(ours, Tokenizer(other, name="draft"))
    assert difference == "id 299 is '<|im_end|>' in target and '<|done|>' in draft"


def split(name: str, text: str) -> list[str]:
    return [part for part, _ in gguf_tokenizer.pre_tokenizer(name).pre_tokenize_str(text)]


def test_pre_tokenizers_of_gguf_files() -> None:
    assert gguf_tokenizer.QWEN2_SPLIT == PRETOKENIZE_REGEX
    assert split("smollm", "a  12") == ["a", "ĠĠ", "1", "2"]
    assert split("qwen2", "a  12345") == ["a", "Ġ", "Ġ", "1", "2", "3", "4", "5"]
    assert split("llama-bpe", "a  12345") == ["a", "Ġ", "Ġ", "123", "45"]
    assert split("llama-bpe", "I'Ll go\n\n x") == ["I", "'Ll", "Ġgo", "ĊĊ", "Ġx"]
    with pytest.raises(SpecbatchError, match=r"tokenizer.ggml.pre='gpt-9'.*smollm, qwen2"):
        gguf_tokenizer.pre_tokenizer("gpt-9")


def test_templates_with_enable_thinking(tmp_path: Path, backend: Backend) -> None:
    template = "{{ messages[0].content }}{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"
    tokenizer = Tokenizer.from_folder(write(tmp_path, backend, chat_template=template))
    messages = [{"role": "user", "content": "x"}]
    shown = [tokenizer.apply_chat_template(messages, enable_thinking=on) for on in (None, True, False)]
    assert shown == ["x<think>", "x<think>", "x"]
    plain = Tokenizer.from_folder(write(tmp_path, backend, chat_template="{{ messages[0].content }}"))
    assert plain.apply_chat_template(messages) == "x"
    with pytest.raises(SpecbatchError, match=r"thinking=False: the chat template of .* has no enable_thinking"):
        plain.apply_chat_template(messages, enable_thinking=False)


LOOP = "{% for m in messages %}<{{ m.role }}>BODY{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
CONTINUED = {
    "plain": LOOP.replace("BODY", "{{ m.content }}"),
    "trims": LOOP.replace("BODY", "{{ m.content | trim }}"),
    "trims and adds a space": LOOP.replace("BODY", "{{ m.content | trim }} </s>\n"),
    "ends messages": LOOP.replace("BODY", "{{ m.content }}</s>\n"),
    "trims and ends messages": LOOP.replace("BODY", "{{ m.content | trim }}</s>\n"),
    "strips reasoning": LOOP.replace("BODY", "{{ m.content.split('</think>')[-1].lstrip('\\n') }}</s>"),
    "repeats the last message": LOOP.replace("BODY", "{{ m.content }}</s>") + "({{ messages[-1].content }})",
    "upper case": LOOP.replace("BODY", "{{ m.content | upper }}"),
    "first messages only": "{{ messages[0].content }}",
    "no content": "{% for m in messages %}{{ m.role }}{% endfor %}",
    "cuts": LOOP.replace("BODY", "{{ m.content[:9] }}"),
}
PREFIXES = ["The answer is", "The answer is ", "  a", "q", "\n```python\n", "<think>no</think>\n\nyes ", "", " "]


@pytest.mark.parametrize("template", CONTINUED.values(), ids=CONTINUED)
def test_a_final_message_is_continued_as_by_transformers(template: str, tmp_path: Path, backend: Backend) -> None:
    tokenizer = Tokenizer.from_folder(write(tmp_path, backend, chat_template=template))
    for prefix in PREFIXES:
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": prefix}]
        try:
            wanted = render_jinja_template([messages], chat_template=template, continue_final_message=True)[0][0]
        except ValueError:
            with pytest.raises(SpecbatchError, match=r"^messages=\[.*(cannot be continued|renders content)$"):
                tokenizer.apply_chat_template(messages, continue_final_message=True)
        else:
            assert tokenizer.apply_chat_template(messages, continue_final_message=True) == wanted
            assert tokenizer.apply_chat_template(messages) != wanted
        assert messages[1]["content"] == prefix
    with pytest.raises(SpecbatchError, match="a final message to continue needs a text as content"):
        tokenizer.apply_chat_template([{"role": "assistant"}], continue_final_message=True)


@pytest.mark.parametrize("text", ["a" * 30_000_000, "ab c" * 7_500_000], ids=["word", "words"])
def test_a_text_of_30_mb_is_refused_before_it_is_encoded(text: str, tmp_path: Path, backend: Backend) -> None:
    tokenizer = Tokenizer.from_folder(write(tmp_path, backend))
    with limited(5, 1 << 28), pytest.raises(SpecbatchError) as caught:
        refuse_longer(tokenizer, text, 512)
    assert str(caught.value).startswith("prompt='30000000 characters': its first 4096 characters have more than")
    assert "max_model_len=512" in str(caught.value)


def test_a_long_text_of_few_tokens_is_not_refused(backend: Backend) -> None:
    changed = clone(backend)
    changed.add_tokens([" " * 64])
    refuse_longer(Tokenizer(changed, name="spaces"), " " * 64 * 100, 100)
    refuse_longer(ByteTokenizer(300), "a" * 100, 100)


def test_tokenizers_with_absurd_ids_are_refused(tmp_path: Path, backend: Backend) -> None:
    described = json.loads(backend.to_str())
    described["model"]["vocab"]["zzz"] = 2**32 - 1
    write(tmp_path, backend)
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    with limited(5, 1 << 28), pytest.raises(SpecbatchError, match="it has a token with id 4294967295; ids are below"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"tokenizer_config": {"chat_template": 5}}, "chat_template=5: it must be a text"),
        ({"tokenizer_config": {"chat_template": [{"name": "default", "template": 5}]}}, "chat_template=5"),
        ({"tokenizer_config": {"add_bos_token": "yes"}}, "add_bos_token='yes': use true or false"),
        ({"tokenizer_config": [1]}, "tokenizer_config.json': it must hold a JSON object"),
        ({"generation_config": {"eos_token_id": [1, "a"]}}, "eos_token_id"),
        ({"config": {"text_config": 5}}, "text_config=5"),
    ],
)
def test_files_with_values_of_a_wrong_type(files: Any, reason: str, tmp_path: Path, backend: Backend) -> None:
    with pytest.raises(SpecbatchError, match=re.escape(reason)):
        Tokenizer.from_folder(write(tmp_path, backend, **files))


def test_chat_templates_without_a_default_are_left_out(tmp_path: Path, backend: Backend) -> None:
    for templates in ([], [5], [{"name": "tool_use", "template": "x"}], None):
        folder = write(tmp_path, backend, tokenizer_config={"chat_template": templates})
        assert not Tokenizer.from_folder(folder).has_chat_template


@pytest.mark.parametrize(
    ("described", "files"),
    [
        ([{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}], {}),
        ([{"name": "default", "template": "C"}, {"name": "default", "template": "D"}], {}),
        ({"default": "D", "tool_use": "T"}, {}),
        ("C", {"chat_template": "D"}),
        ([{"name": "default", "template": "C"}], {"chat_template": "D"}),
        (None, {"chat_template": "D", "additional_chat_templates/tool_use": "T"}),
        ("C", {"additional_chat_templates/default": "D"}),
        (None, {"chat_template": "C", "additional_chat_templates/default": "D"}),
    ],
)
def test_chat_templates_with_names(described: Any, files: dict[str, str], tmp_path: Path, backend: Backend) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    folder = write(tmp_path, backend, tokenizer_config={"chat_template": described}, **files)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    messages = [{"role": "user", "content": "x"}]
    assert theirs.apply_chat_template(messages, tokenize=False) == "D"
    assert Tokenizer.from_folder(folder).apply_chat_template(messages) == "D"
