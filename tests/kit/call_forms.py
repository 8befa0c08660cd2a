"""Chat templates that show calls of functions in the forms of model families, and what their models write."""

# ruff: noqa: RUF001, E501
from __future__ import annotations

from typing import Any, NamedTuple

_TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
_BEGIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
_END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def _template(calls: str) -> str:
    """calls: what a message of the assistant has for its `m.tool_calls`."""
    return f"{_TOOLS}{_BEGIN}{{% if m.tool_calls %}}{calls}{{% endif %}}{_END}"


_EACH = "{% for c in m.tool_calls %}{% set f = c.function %}"
_NEXT = "{% if not loop.last %}"
TEMPLATES = {
    "Hermes'": _template(
        _EACH
        + """<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>"""
        + _NEXT
        + "{{ '\\n' }}{% endif %}{% endfor %}"
    ),
    "Qwen3-Coder's": _template(
        _EACH
        + "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n"
        + "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
        + _NEXT
        + "{{ '\\n' }}{% endif %}{% endfor %}"
    ),
    "GLM-4.5's": _template(
        _EACH
        + "<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
        + "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>"
        + _NEXT
        + "{{ '\\n' }}{% endif %}{% endfor %}"
    ),
    "Mistral's": _template(
        "[TOOL_CALLS] ["
        + _EACH
        + """{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}"""
        + _NEXT
        + ", {% endif %}{% endfor %}]"
    ),
    "Mistral's with [ARGS]": _template(_EACH + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}{% endfor %}"),
    "DeepSeek-V3's": _template(
        "<｜tool▁calls▁begin｜>"
        + _EACH
        + "<｜tool▁call▁begin｜>{{ c.type }}<｜tool▁sep｜>{{ f.name }}\n```json\n{{ f['arguments'] + '' }}\n```<｜tool▁call▁end｜>"
        + _NEXT
        + "{{ '\\n' }}{% endif %}{% endfor %}<｜tool▁calls▁end｜>"
    ),
    "DeepSeek-V3.1's": _template(
        "<｜tool▁calls▁begin｜>"
        + _EACH
        + "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f['arguments'] + '' }}<｜tool▁call▁end｜>"
        + "{% endfor %}<｜tool▁calls▁end｜>"
    ),
    "Llama 3's JSON": _template(
        _EACH + """{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% endfor %}{# ipython #}"""
    ),
}
SEVERAL = [name for name in TEMPLATES if name != "Llama 3's JSON"]  # whose models write several calls


class Written(NamedTuple):
    """What a model of a form writes, the content that is left, and the calls: names and arguments."""

    form: str
    text: str
    content: str
    calls: list[tuple[str, dict[str, Any]]]


F1, F2 = ("f", {"a": 1}), ("g-2", {"city": "Zürich"})
WRITTEN = [
    Written("Hermes'", 'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "Let me see.", [F1]),
    Written("Hermes'", '<tool_call>{"arguments": "{\\"a\\": 1}", "name": "f"}</tool_call>', "", [F1]),
    Written("Hermes'", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}', "", [F1]),
    Written("Hermes'", '<tool_call>\n{"name": "f", "arguments": {"a": 1', '<tool_call>\n{"name": "f", "arguments": {"a": 1', []),
    Written("Hermes'", "<tool_call>\n{'name': 'f'}\n</tool_call>", "<tool_call>\n{'name': 'f'}\n</tool_call>", []),
    Written(
        "Hermes'",
        '<tool_call>\nf(1)\n</tool_call><tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        "<tool_call>\nf(1)\n</tool_call>",
        [F1],
    ),
    Written("Hermes'", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', []),
    Written("Hermes'", '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>', "", [("f", {"a": "</tool_call>"})]),
    Written("Qwen3-Coder's", "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>", "", [F1]),
    Written(
        "Qwen3-Coder's",
        "Yes.\n<tool_call>\n<function=g-2>\n<parameter=city>\nZürich\n</parameter>\n</function>\n</tool_call>",
        "Yes.",
        [F2],
    ),
    Written("GLM-4.5's", "<tool_call>f\n</tool_call>", "", [("f", {})]),
    Written("Mistral's", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}]', "", [F1]),
    Written("Mistral's with [ARGS]", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}[TOOL_CALLS]g-2[ARGS]{"city": "Zürich"}', "", [F1, F2]),
    Written("Mistral's with [ARGS]", 'So.[TOOL_CALLS]f[ARGS]{"a": 1', 'So.[TOOL_CALLS]f[ARGS]{"a": 1', []),
    Written(
        "DeepSeek-V3's",
        'Well<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "Well",
        [F1],
    ),
    Written("Llama 3's JSON", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g-2", "parameters": {"city": "Zürich"}}', "", [F1, F2]),
    Written("Llama 3's JSON", 'The JSON is {"name": "f", "parameters": {"a": 1}}', 'The JSON is {"name": "f", "parameters": {"a": 1}}', []),
    Written("Llama 3's JSON", '{"name": "f"}', '{"name": "f"}', []),
]  # fmt: skip
