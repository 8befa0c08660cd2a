"""Hostile chat templates: they do not end, need gigabytes, reach for Python's objects or are malformed."""

# ruff: noqa: E501
from __future__ import annotations

# Each is refused.
REFUSED = {
    # steps without an end
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested loops of an empty body in a macro": "{% macro m() %}{% for a in range(99999) %}{% endfor %}{% endmacro %}"
    "{% for a in range(99999) %}{{ m() }}{% endfor %}",
    "macros that call each other": "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}",
    "macro that calls itself twice": "{% macro a(n) %}{% if n %}{{ a(n - 1) }}{{ a(n - 1) }}{% endif %}{% endmacro %}{{ a(60) }}",
    "recursive loop": "{% set l = [1] %}{% for x in l recursive %}{{ loop(l) }}{% endfor %}",
    "cycles of a joined range": "{% for a in range(99999) %}{{ range(99999) | join }}{% endfor %}",
    "sorting again and again": "{% for a in range(99999) %}{% set b = range(99999) | sort(reverse=true) %}{% endfor %}",
    "search for links": "{% for a in range(99999) %}{{ ('(www.a' * 30000 ~ a) | urlize | length }}{% endfor %}",
    "power": "{% set a = 7 ** 3000000 %}{% for b in range(9) %}{% set c = a ** 300 %}{% endfor %}",
    # memory
    "repeated string": "{{ 'a' * 10000000000 }}",
    "repeated list": "{{ [0] * 10000000000 }}",
    "repeated at compile time": "{% if 'a' * 4000000000 %}{% endif %}",
    "format width": "{{ '%1000000000d' % 1 }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "format method": "{{ '{:>9999999999}'.format(1) }}",
    "format method of a large number": "{{ '{:>999999999}'.format(1) }}",
    "center": "{{ 'a' | center(10000000000) }}",
    "center by the method": "{{ 'a'.center(1000000000) }}",
    "ljust": "{{ 'a'.ljust(1000000000) }}",
    "zfill": "{{ '1'.zfill(1000000000) }}",
    "expandtabs": "{{ '\\t'.expandtabs(1000000000) }}",
    "indent": "{{ 'a\\nb' | indent(1000000000) }}",
    "wordwrap": "{{ ('a ' * 1000000) | wordwrap(1, wrapstring='b' * 10000) }}",
    "replace": "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "join": "{{ range(99999) | join('b' * 100000) }}",
    "batch": "{{ [1] | batch(1000000000, 'x') | list }}",
    "slice": "{{ [1] | slice(1000000000) | list }}",
    "range": "{{ range(10000000000) | list }}",
    "doubling": "{% set n = namespace(a='aaaaaaaaaaaaaaaa') %}{% for x in range(60) %}{% set n.a = n.a ~ n.a %}{% endfor %}",
    "doubled lists": "{% set n = namespace(a=[1]) %}{% for x in range(60) %}{% set n.a = n.a + n.a %}{% endfor %}",
    "growing namespace": "{% set n = namespace(a='') %}{% for x in range(90000) %}{% set n.a = n.a + 'a' * 90000 %}{% endfor %}",
    "large output": "{% for x in range(90000) %}{{ 'a' * 90000 }}{% endfor %}",
    "lorem ipsum": "{{ lipsum(n=100000000) }}",
    "tojson indent": "{{ [[[1]]] | tojson(indent=1000000000) }}",
    "pprint": "{% set n = namespace(a=[1]) %}{% for x in range(40) %}{% set n.a = [n.a, n.a] %}{% endfor %}{{ n.a | pprint }}",
    "text of nested lists": "{% set n = namespace(a=[]) %}{% for x in range(50) %}{% set n.a = [n.a, n.a] %}{% endfor %}{{ n.a }}",
    "hash of nested tuples": "{% set n = namespace(a=()) %}{% for x in range(50) %}{% set n.a = (n.a, n.a) %}{% endfor %}{{ {n.a: 1} }}",
    "deep list": "{% set n = namespace(a=[]) %}{% for x in range(99999) %}{% set n.a = [n.a] %}{% endfor %}{{ n.a == [n.a] }}{{ n.a }}",
    "date": "{{ strftime_now('%c' * 100000000) }}",
    # Python's objects
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "class by filter": "{{ (''|attr('__class__')).mro() }}",
    "globals of a function": "{{ raise_exception.__globals__.os }}",
    "globals of a class": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "format with attributes": "{{ '{0.__class__.__mro__}'.format(1) }}",
    "format_map": "{{ '{a.__class__.__init__.__globals__}'.format_map({'a': cycler}) }}",
    "frame of a generator": "{{ (messages | map('upper')).gi_frame.f_globals }}",
    "template object": "{{ self._TemplateReference__context.environment }}{{ self.__init__.__globals__ }}",
    "change of the messages": "{{ messages.append(1) }}",
    "change of a dict": "{{ messages[0].update({'content': 'x'}) }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os }}",
    "extends": "{% extends '/etc/passwd' %}",
    # errors
    "raise_exception": "{{ raise_exception('no system role') }}",
    "raise_exception without a message": "{{ raise_exception() }}",
    "raise_exception of a long message": "{{ raise_exception('line\\n' * 1000000) }}",
    "raise_exception of a list": "{{ raise_exception([[]]) }}",
    "undefined attribute": "{{ messages[0].name.first }}",
    "undefined function": "{{ tools() }}",
    "unknown filter": "{{ messages | no_such_filter }}",
    "unknown test": "{{ messages is no_such_test }}",
    "types": "{{ messages + 1 }}",
    "division": "{{ 1 // 0 }}",
    "index": "{{ messages[0]['content'][{}].x }}",
    "number with thousands of digits": "{{ (10 ** 5000) }}",
    "format of a date": "{{ strftime_now(5) }}",
    "date with half of a surrogate pair": "{{ strftime_now('\\ud800') }}",
    "surrogate": "{{ '\\ud800' }}",
    "surrogate in the source": "\ud800",
    "integer": "{{ 'x' | int(base=99) + messages }}",
    "endless format": "{{ '%*d' % (1000000000, 1) }}",
    # malformed
    "empty tag": "{% for %}",
    "no end": "{% for m in messages %}{{ m.content }}",
    "unknown tag": "{% exec %}import os{% endexec %}",
    "nested parentheses": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
    "nested lists": "{{ " + "[" * 5_000 + "]" * 5_000 + " }}",
    "nested loops in the source": "{% for a in messages %}" * 500 + "{% endfor %}" * 500,
    "nested conditions": "{% if messages %}" * 5_000 + "{% endif %}" * 5_000,
    "nested negations": "{{ " + "not " * 50_000 + "1 }}",
    "long sum": "{{ " + "1+" * 100_000 + "1 }}",
    "long chain of attributes": "{{ messages" + ".a" * 100_000 + " }}",
    "unterminated string": "{{ '" + "a" * 100_000,
    "template of 50 MB": "a" * 50_000_000,
    "number of a million digits": "{{ " + "9" * 900_000 + " }}",
}  # fmt: skip

# Each renders, to a text of bounded length.
RENDERED = {
    "null bytes": "a\x00{{ messages[0].content }}\x00",
    "right-to-left override": "\u202e{{ messages[0].content }}",
    "undefined name": "{{ no_such_name }}",
    "loop with a break": "{% for a in range(99999) %}{% if a > 3 %}{% break %}{% endif %}{{ a }}{% endfor %}",
    "date": "{{ strftime_now('%Y-%m-%d') }}",
    "date of percent signs": "{{ strftime_now('%' * 1000) }}",
    "comment": "{# " + "{{" * 100_000 + " #}",
    "raw": "{% raw %}{{ 'a' * 10000000000 }}{% endraw %}",
    "empty": "",
}

# In the style of published ones.
PLAIN = [
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "{{- bos_token }}{%- for m in messages %}{%- if m.role == 'system' and not loop.first %}"
    "{{- raise_exception('system message must be first') }}{%- endif %}\n"
    "{{- '<|start_header_id|>' ~ m['role'] ~ '<|end_header_id|>\n\n' ~ m['content'] | trim ~ '<|eot_id|>' }}{%- endfor %}",
    "{%- set ns = namespace(last=messages | length - 1, tool=false) %}{%- for m in messages[::-1] %}"
    "{%- set index = messages | length - 1 - loop.index0 %}{%- if m.role == 'user' and not ns.tool %}"
    "{%- set ns.tool = true %}{%- set ns.last = index %}{%- endif %}{%- endfor %}{%- for m in messages %}"
    "{%- set content = m.content if m.content is string else '' %}{%- if '</think>' in content %}"
    "{%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{{- reasoning | tojson }}{%- endif %}"
    "{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>' }}{%- endfor %}{{ strftime_now('%d %b %Y') }}",
    "{% macro part(m, level=1) %}{{ m.role | upper }}: {{ m.content | replace('\n', ' ') | indent(2) }}{% endmacro %}"
    "{% for m in messages if m.content %}{{ part(m, level=loop.index) }}{{ loop.cycle('a', 'b') }}{% endfor %}",
]
