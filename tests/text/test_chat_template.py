"""Chat templates: what they render, and the limits of those that are hostile."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from chat_templates import REFUSED, RENDERED
from crossed import slow_but
from transformers.utils.chat_template_utils import render_jinja_template

from specbatch.errors import SpecbatchError
from specbatch.text import chat_template
from specbatch.text.chat_template import ChatTemplate, TemplateRefusal

MESSAGES = [{"role": "user", "content": "hi"}]
QUICK = (
    "nested loops", "macros that call each other", "repeated string", "center", "doubling", "class",
    "globals of a class", "change of the messages", "include", "types", "surrogate", "nested loops in the source",
    "template of 50 MB",
)  # fmt: skip


def refusal(template: ChatTemplate, messages: Any = MESSAGES) -> str:
    with pytest.raises(SpecbatchError) as caught:
        template.render(messages=messages, add_generation_prompt=True)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 2_000
    return message


@pytest.mark.parametrize("name", slow_but(QUICK, REFUSED))
def test_hostile_templates_are_refused(name: str, short_renderings: None) -> None:
    started = time.monotonic()
    message = refusal(ChatTemplate(REFUSED[name], "mine"))
    assert message.startswith("chat_template='mine': it ")
    assert time.monotonic() - started < 10  # on a busy machine; the process has 0.3 seconds of CPU time


@pytest.mark.parametrize("name", slow_but(["null bytes", "date", "raw"], RENDERED))
def test_odd_templates_are_rendered(name: str) -> None:
    assert len(ChatTemplate(RENDERED[name], "mine").render(messages=MESSAGES)) < 1_000


def test_text_of_any_kind_passes_through() -> None:
    content = "".join(chr(point) for point in range(0xD800)) + "".join(chr(point) for point in range(0xE000, 0x11000))
    template = ChatTemplate("[{{ messages[0].content }}|{{ n }}|{{ none is none }}|{{ yes }}]", "mine")
    shown = template.render(messages=[{"role": "user", "content": content}], n=10**30, none=None, yes=True)
    assert shown == f"[{content}|{10**30}|True|True]"


def test_values_that_cannot_be_sent_are_refused() -> None:
    template = ChatTemplate("{{ messages }}", "mine")
    assert "messages=" in refusal(template, [object()])
    assert template.render(messages=MESSAGES) == str(MESSAGES)


@pytest.mark.slow
def test_a_template_that_exceeds_the_time_for_one_row_renders_the_others(short_renderings: None) -> None:
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate(
        "{% if messages[0].content == 'loop' %}" + loop + "{% endif %}{{ messages[0].content }}", "mine"
    )
    assert template.render(messages=MESSAGES) == "hi"
    assert "it needs more than 0.3 seconds for these messages" in refusal(template, [{"content": "loop"}])
    assert template.render(messages=MESSAGES) == "hi"


@pytest.mark.slow
def test_a_template_that_exceeds_limits_again_and_again_is_given_up() -> None:
    template = ChatTemplate("{{ 'a' * 10000000000 }}", "mine")
    for _ in range(chat_template.CHANCES):
        assert "it needs more than 512 MiB for these messages" in refusal(template)
    started = time.perf_counter()
    for _ in range(1_000):
        assert "nor for 7 others; use another template, or chat_template=False" in refusal(template)
    assert time.perf_counter() - started < 1


def test_a_template_that_rendered_a_row_is_never_given_up() -> None:
    """Else the outcome of a row would depend on the rows before it."""
    template = ChatTemplate("{% if messages == 'grow' %}{{ 'a' * 10000000000 }}{% endif %}{{ messages }}", "mine")
    assert template.render(messages="a") == "a"
    for _ in range(chat_template.CHANCES + 1):
        assert "it needs more than 512 MiB for these messages" in refusal(template, "grow")
    assert template.render(messages="a") == "a"


def test_output_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "LONGEST_OUTPUT", 1 << 20)
    assert len(ChatTemplate("{{ 'a' * 1048576 }}", "mine").render()) == 1 << 20
    assert "its output is longer than 1 MiB" in refusal(ChatTemplate("{{ 'a' * 1048577 }}", "mine"))


def counting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of replies of the exchanges from now on."""
    exchange, counts = chat_template.exchange, list[int]()

    def counted(process: Any, request: bytes, count: int = 1) -> Any:
        counts.append(count)
        return exchange(process, request, count)

    monkeypatch.setattr(chat_template, "exchange", counted)
    return counts


def test_renderings_ahead_take_one_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{% if m == 3 %}{{ raise_exception('no 3') }}{% endif %}<{{ m }}>", "mine")
    template.render_ahead([{"m": 0}])  # nothing was rendered yet: it may be hostile
    assert template.render(m=0) == "<0>"
    exchanges = counting(monkeypatch)
    template.render_ahead({"m": m} for m in (1, 2, 3, 2, float("nan"), object(), 4))
    assert [template.render(m=m) for m in (4, 2, 2, 1, float("nan"))] == ["<4>", "<2>", "<2>", "<1>", "<nan>"]
    with pytest.raises(SpecbatchError, match=r"does not accept these messages \(no 3\)"):
        template.render(m=3)
    assert exchanges == [6]
    assert template.render(m=5) == "<5>"
    template.render_ahead([])
    assert template.render(m=1) == "<1>"
    assert exchanges == [6, 1, 0, 1]


def test_renderings_ahead_have_the_limits_of_single_ones(
    short_renderings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    grow = "{{ 'a' * 10000000000 }}"
    conditions = "{% if m == 'loop' %}" + loop + "{% elif m == 'grow' %}" + grow + "{% endif %}"
    template = ChatTemplate(conditions + "<{{ m }}>", "mine")
    assert template.render(m=0) == "<0>"
    for hostile, reason in (("loop", "more than 0.3 seconds"), ("grow", "more than 512 MiB")):
        template.render_ahead({"m": m} for m in (1, hostile, 2))
        assert [template.render(m=m) for m in (1, 2)] == ["<1>", "<2>"]
        with pytest.raises(SpecbatchError, match=reason):
            template.render(m=hostile)
        assert template.render(m=1) == "<1>"

    slow = "{% for a in range(n) %}{% for b in range(1000) %}{% endfor %}{% endfor %}"
    template = ChatTemplate(slow + "{{ n }}", "mine")  # the limit is for each of them, and not for all
    assert template.render(n=1) == "1"
    exchanges = counting(monkeypatch)
    template.render_ahead({"n": 200 + n} for n in range(35))
    assert all(template.render(n=200 + n) == str(200 + n) for n in range(35))
    assert exchanges == [35]


def test_long_variables_are_not_rendered_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{{ m | length }}", "mine")
    assert template.render(m="") == "0"
    exchanges = counting(monkeypatch)
    template.render_ahead({"m": "a" * n} for n in (5, 2 * chat_template.AHEAD, 7, 8))
    assert [template.render(m="a" * n) for n in (5, 7)] == ["5", "7"]
    assert exchanges == [2, 1]


@pytest.mark.usefixtures("template_processes")
def test_a_process_that_ends_is_replaced() -> None:
    template = ChatTemplate("{{ messages[0].content }}", "mine")
    assert template.render(messages=MESSAGES) == "hi"
    assert template.process is not None
    os.kill(template.process.pid, signal.SIGKILL)
    template.process.wait()
    assert "it ended its process (status -9)" in refusal(template)
    assert template.render(messages=MESSAGES) == "hi"


@pytest.mark.usefixtures("template_processes")
def test_the_process_ends_with_its_template() -> None:
    template = ChatTemplate("x", "mine")
    template.render()
    process = template.process
    assert process is not None
    del template
    assert process.returncode is not None


@pytest.mark.usefixtures("template_processes")
def test_an_interrupted_rendering_does_not_leave_its_reply_to_the_next_one() -> None:
    template = ChatTemplate("{% for a in range(messages[0].n) %}{% endfor %}{{ messages[0].n }}", "mine")
    assert template.render(messages=[{"n": 1}]) == "1"
    timer = threading.Timer(0.1, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        all(template.render(messages=[{"n": 99_999}]) for _ in range(100_000))
    timer.join()
    assert template.render(messages=[{"n": 2}]) == "2"


def test_threads_share_a_template() -> None:
    template = ChatTemplate("{{ messages }}", "mine")
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda n: template.render(messages=n), range(200))) == [str(n) for n in range(200)]


@pytest.mark.usefixtures("template_processes")
def test_a_forked_process_starts_its_own() -> None:
    template = ChatTemplate("{{ messages }}", "mine")
    assert template.render(messages=1) == "1"
    child = os.fork()
    if not child:
        os._exit(0 if template.render(messages=2) == "2" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert template.render(messages=3) == "3"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("\n{% for %}", "it cannot be read (line 2: Expected an expression"),
        ("a\n{{ 1 | nofilter }}", "it cannot be read (line 2: No filter named 'nofilter'"),
        ("{% generation %}x", "it cannot be read (line 1: Unexpected end of template"),
        ("x{% endgeneration %}", "it cannot be read (line 1: Encountered unknown tag 'endgeneration'"),
        (
            "\n\n{{ messages[0].a.b }}",
            "it has an error, which may show with some messages only (line 3: 'dict object' has",
        ),
        (
            "{% if true %}{{ 1 | nofilter }}{% endif %}",
            "it has an error, which may show with some messages only (line 1: ",
        ),
        ("{{ messages | tojson(colour=1) }}", "it has an error, which may show with some messages only (line 1: "),
        ("{{ nothing | tojson }}", "line 1: Object of type Undefined is not JSON serializable"),
        ("{% set n = namespace(_a=1) %}{{ n._a }}", "line 1: a namespace cannot have '_a'"),
        ("{% set n = namespace() %}{% set n._a = 1 %}{{ n._a }}", "line 1: a namespace cannot have '_a'"),
        ("{{ raise_exception('no system') }}", "it does not accept these messages (no system)"),
        ("{% generation %}{{ raise_exception(5) }}{% endgeneration %}", "it does not accept these messages (5)"),
    ],
)
def test_a_template_at_fault_and_messages_at_fault_are_told_apart(template: str, reason: str) -> None:
    assert reason in (message := refusal(ChatTemplate(template, "mine")))
    assert ("does not accept these messages" in message) == ("raise_exception" in template)


def with_tags(template: str) -> str:
    return template.replace("{g}", "{% generation %}").replace("{e}", "{% endgeneration %}")


def rendered_by_transformers(template: str, messages: Any) -> str:
    return str(render_jinja_template([messages], chat_template=template)[0][0])


@pytest.mark.parametrize(
    "template",
    [
        "{g}{{ messages[0].content }}{e}",
        "{% for m in messages %}{%- generation -%}  {{ m.content }}  {%- endgeneration -%}{% endfor %}|",
        "{% for m in messages %}  {g}\n{{ m.content }}\n  {e}\n{% endfor %}|",
        "{% for m in messages %}{% if loop.last %}{g}{{ loop.index }}{e}{% endif %}{% endfor %}",
        "{g}{% for m in messages %}{% if m.content %}{{ m.role }}{% else %}-{% endif %}{% endfor %}{e}",
        "{g}a{e}{g}{e}{g}b{e}",
        "{g}{g}{{ messages | length }}{e}{e}",
        "{% set x = 'a' %}{g}{% set x = 'b' %}{{ x }}{e}{{ x }}",
        "{% set n = namespace(x='a') %}{g}{% set n.x = 'b' %}{e}{{ n.x }}",
        "{% macro f(x) %}{g}<{{ x }}>{e}{% endmacro %}{{ f('q') }}{{ f(messages[0].role) }}",
        "{% for m in messages %}{g}{% set t = m.content | trim %}{{ t | upper }}{e}{% endfor %}",
    ],
)
def test_the_generation_tag_renders_its_body(template: str) -> None:
    template = with_tags(template)
    messages = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "4"}]
    assert ChatTemplate(template, "mine").render(messages=messages) == rendered_by_transformers(template, messages)


def test_the_generation_tag_may_hold_a_break() -> None:
    """In transformers it ends with a SyntaxError, as the tag's body is a function there."""
    template = with_tags("{% for a in 'xyz' %}{g}{{ a }}{% if a == 'y' %}{% break %}{% endif %}{e}{% endfor %}")
    assert ChatTemplate(template, "mine").render() == "xy"


OPTIONS = (
    "", "ensure_ascii=False", "ensure_ascii=true", "true", "false, 2", "True, none, [',', ':'], True", "indent=4",
    "false, 1, [';', '='], true", "separators=(',', ':')", "sort_keys=true, indent=none", "indent='--'",
    "ensure_ascii=true, indent=2, separators=[',', ': '], sort_keys=true", "indent=0, ensure_ascii=false",
)  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
def test_tojson_takes_the_options_of_transformers(options: str) -> None:
    value = {"k": "Köln <>&'\"\u2028", "b": [1, 2.5, None, True, {"z": "ß", "a": []}], "a": {}}
    template = f"{{{{ messages[0].content | tojson({options}) }}}}|{{{{ messages | tojson({options}) }}}}"
    messages = [{"role": "user", "content": value}]
    assert ChatTemplate(template, "mine").render(messages=messages) == rendered_by_transformers(template, messages)


@pytest.mark.parametrize(
    "template",
    [
        "{% set n = namespace(a=1, self=2) %}{% set n.b = n.a + n.self %}{{ n.b }}{{ n.c }}",
        "{% set n = namespace({'a': 1}, b=[]) %}{% for m in messages %}{% set n.b = n.b + [m] %}{% endfor %}{{ n.b }}",
        "{{ dict(a=1) }}{{ dict(messages[0], role='x') | tojson }}{{ dict.fromkeys(['a']) }}",
    ],
)
def test_namespaces_and_dicts_are_those_of_transformers(template: str) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "4"}]
    assert ChatTemplate(template, "mine").render(messages=messages) == rendered_by_transformers(template, messages)


@pytest.mark.parametrize(
    ("template", "is_refusal"),
    [
        ("{{ raise_exception('no system') }}", True),
        ("{{ messages[0].name.first }}", True),  # Undefined
        ("{{ messages.append(1) }}", True),  # forbidden by the sandbox
        ("{{ messages[0].content + 5 }}", False),
        ("{{ 1 / 0 }}", False),
        ("{% if %}", False),
    ],
)
def test_errors_that_jinja_raises_are_refusals_of_the_messages(template: str, is_refusal: bool) -> None:
    """As lm-eval's model for transformers counts them: other errors end its run."""
    with pytest.raises(SpecbatchError) as caught:
        ChatTemplate(template, "mine").render(messages=MESSAGES)
    assert isinstance(caught.value, TemplateRefusal) == is_refusal
