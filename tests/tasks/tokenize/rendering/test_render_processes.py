"""Processes that render: limits of time and memory, and conversations that end a process."""

import gc
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jinja2
import pyarrow as pa
import pytest

from tasks.tokenize.engines import large_string_array
from tasks.tokenize.rendering import processes
from tasks.tokenize.rendering.processes import BadText, Renderers, TextParts
from tasks.tokenize.rendering.request import ORDINARY, Limits, Settings
from tests.calls import before_each_call
from tests.examples import first_fast
from tests.processes import in_threads
from tests.refusal import refusal

LIMITS = Limits(seconds=4, memory=1 << 33)
"""0.4 seconds of processor time for a short conversation."""
ALL = "{% for m in messages %}{{ m.content }}{% endfor %}"

TOO_MUCH = [
    "{{ 'x'|center(6000000000) }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% set ns = namespace(x=10) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{{ '{:>6000000000}'.format(1) }}",
    "{{ 'x'.center(6000000000) }}",
    "{{ 'x'.ljust(6000000000)|length }}",
    "{{ 'x'.rjust(6000000000)|length }}",
    "{{ 'x'.zfill(6000000000) }}",
    "{{ '\t'.expandtabs(2000000000) }}",
    "{{ '%6000000000d' % 1 }}",
    "{{ '%*d' % (2000000000, 1) }}",
    "{{ '%.2000000000f' % 1.0 }}",
    "{{ '{:.2000000000f}'.format(1.0) }}",
    "{{ '{0:>{1}}'.format(1, 6000000000) }}",
    "{{ '{x:>6000000000}'.format_map({'x': 1}) }}",
    "{{ '%s'|format('x'|center(6000000000)) }}",
    "{{ 'x'|indent(6000000000) }}",
    "{{ 'a b'|wordwrap(1, wrapstring='x'|center(600000000)) }}",
    "{{ [1]|batch(6000000000, 0)|list }}",
    "{{ messages|slice(6000000000, 0)|list }}",
    "{{ ('x' * 1000000).replace('x', 'y' * 1000000) }}",
    "{{ ('x' * 1000000)|replace('x', 'y' * 1000) }}",
    "{{ (['x' * 1000000] * 1000)|join('z' * 1000000) }}",
    "{{ range(99999)|map('center', 100000)|join }}",
    "{{ (1).to_bytes(6000000000, 'big') }}",
    "{{ 'x'.encode().center(6000000000) }}",
    "{{ 'ab'.encode() * 10000000000 }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x]|join %}{% endfor %}",
    "{% set ns = namespace(x=2) %}{% for i in range(60) %}{% set ns.x = ns.x ** 64 %}{% endfor %}",
    "{% set ns = namespace(x=7) %}{% for i in range(99) %}{% set ns.x = ns.x ** 9 // 3 %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f(n) %}{% if n %}{% set x = f(n - 1) ~ f(n - 1) %}{{ x ~ x }}{% else %}x{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for a in range(99999) recursive %}{% if loop.depth < 9 %}{{ loop(range(99999)) }}{% endif %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{{ range(99999)|sum }}{% endfor %}",
    "{% for a in range(99999) %}{% set x = range(99999)|list|tojson %}{% endfor %}",
    "{% for a in range(99999) %}{% filter upper %}{{ 'x' * 100000 }}{% endfilter %}{% endfor %}",
    "{% set x %}{% for a in range(99999) %}{{ 'x' * 100000 }}{% endfor %}{% endset %}{{ x|length }}",
    "{{ messages[0].content.join('x' * 1000000)|list|map('center', 1000)|list|length }}",
    "{{ (range(99999)|list * 10)|map('string')|map('center', 9999)|list|length }}",
    "{{ ('{' * 1000)|pprint }}{% for a in range(99999) %}{{ ('a' * 1000000)|wordcount }}{% endfor %}",
    "{% for a in range(99999) %}{{ ('<' * 1000000)|striptags }}{% endfor %}",
    "{% for a in range(99999) %}{{ ('a.b ' * 100000)|urlize }}{% endfor %}",
    "{% for a in range(99999) %}{{ ('a ' * 100000)|title }}{% endfor %}",
    "{% for a in range(99999) %}{{ range(99999)|groupby('real')|list|length }}{% endfor %}",
    "{% for a in range(99999) %}{{ range(99999)|sort(reverse=true)|length }}{% endfor %}",
    "{% for a in range(99999) %}{{ range(99999)|unique|list|length }}{% endfor %}",
    "{% for a in range(99999) %}{{ ('ab' * 500000)|list|length }}{% endfor %}",
    "{% for a in range(99999) %}{{ {'a': 'x' * 1000000}|tojson|length }}{% endfor %}",
    "{% for a in range(99999) %}{% if ('x' * 1000000) in ('x' * 999999 ~ 'y') %}{% endif %}{% endfor %}",
    "{% for a in range(99999) %}{{ strftime_now('%Y' * 10000)|length }}{% endfor %}",
]
"""Templates that take all time or memory, by what they do it with."""


@pytest.fixture(autouse=True)
def _no_process_stays() -> Iterator[None]:
    """Neither of another file's tests nor of these."""
    processes._end_all()
    yield
    processes._end_all()
    gc.collect()


def renderers(template: str, limits: Limits = LIMITS, **more: Any) -> Renderers:
    return Renderers(Settings(template, specials=("<s>",), **{"day": "2024-07-26", **more}), limits)


def talks(*contents: str) -> pa.LargeStringArray:
    return large_string_array(*(json.dumps([{"role": "user", "content": text}]) for text in contents))


def outcomes(found: Iterator[TextParts]) -> list[str | BadText]:
    """Of each conversation its text, or why it is refused."""
    told = []
    for one in found:
        parts = iter(one.texts.to_pylist())
        kinds = iter(one.kinds.tolist())
        for i, count in enumerate(one.counts.tolist()):
            texts = ["<s>" if next(kinds) != ORDINARY else next(parts) for _ in range(count)]
            told.append(one.faults.get(i) or "".join(texts))
    return told


PLACED = [(i, place) for i in range(len(TOO_MUCH)) for place in (True, False)]


@pytest.mark.parametrize(
    "placed", first_fast(PLACED, 4, every=9), ids=[f"{i}-{'everywhere' if of else 'once'}" for i, of in PLACED]
)
def test_a_template_has_limits(placed):
    """It is refused when it is tried, or the one conversation is for which it takes too much. This process takes no memory."""
    template, everywhere = TOO_MUCH[placed[0]], placed[1]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if everywhere:
        with refusal(r"the chat template (takes more than|ends its process)"):
            renderers(template + ALL)
    else:
        render = renderers("{% if messages[0].content == 'now' %}" + template + "{% endif %}" + ALL)
        first, refused, last = outcomes(render(talks("a", "now", "b")))
        assert (first, last) == ("a", "b")
        assert isinstance(refused, BadText)
        assert refused.reason == "limits"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_the_advice_of_a_library_is_not_why_a_process_ended():
    with refusal(r"^the chat template ends its process (?!.*: note: )"):
        renderers(TOO_MUCH[28] + ALL, LIMITS._replace(memory=1 << 26))


SIZED = [
    "{{ 'x'|center(SIZE) }}",
    "{{ 'x'.ljust(SIZE) }}",
    "{{ '7'.zfill(SIZE) }}",
    "{{ 'x' * SIZE }}",
    "{{ ('%SIZEd' % 1)|length }}",
    "{{ '{:>SIZE}'.format('x')|length }}",
    "{{ '\t'.expandtabs(SIZE)|length }}",
    "{{ 'a\nb'|indent(SIZE) }}",
    "{{ [1]|batch(SIZE, 0)|list }}",
    "{{ messages|slice(SIZE, 0)|list|length }}",
    "{% for a in range(SIZE) %}x{% endfor %}",
    "{{ range(SIZE)|sum }}",
    "{{ ([1] * SIZE)|join('-') }}",
    "{{ ('ab' * SIZE)|replace('a', 'cd')|length }}",
    "{{ '%.SIZEf' % 1.0 }}",
]


@pytest.mark.parametrize("size", [3, 3000])
def test_templates_render_what_jinja_renders(size):
    """Small amounts are rendered, whatever limits there are."""
    source = "".join(SIZED).replace("SIZE", str(size)) + ALL
    messages = [{"role": "user", "content": "end"}]
    assert outcomes(renderers(source)(talks("end"))) == [jinja2.Environment().from_string(source).render(messages=messages)]


def test_a_template_is_tried_and_why_it_is_slow_is_known_before_any_conversation():
    with refusal(r"the chat template asks for the day. Set source.chat_date"):
        renderers("{{ strftime_now('%Y') }}", day=None)
    assert renderers(ALL).why_slow is None
    assert renderers("{% for m in messages[::-1] %}{{ m.content }}{% endfor %}").why_slow is None
    changed = (
        "{% for m in messages %}{{ m.content|upper }}{% if m.content is string and m.content[0] == 'm' %}!{% endif %}{% endfor %}"
    )
    assert renderers(changed).why_slow == "it changes what its messages hold"


def test_answers_come_in_parts_and_in_order():
    """A batch that is larger than an answer: all conversations of it, with their places."""
    contents = [f"{i}<s>" + "x" * (300_000 + i) for i in range(40)]
    template = "{% for m in messages %}<s>{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    found = list(renderers(template)(talks(*contents)))
    assert len(found) > 1
    assert outcomes(iter(found)) == ["<s>" + text for text in contents]
    sizes = [stop - start for one in found for start, stop in one.spans.tolist()]
    assert sizes == list(map(len, contents))
    assert all(one.spans[0, 0] == 2 for one in found)


def test_a_conversation_that_ends_the_process_is_refused(monkeypatch):
    """Those before and after it are rendered by other processes."""
    render = renderers(ALL)

    def end(process: processes.RenderProcess, texts: pa.LargeStringArray) -> None:
        if any("end" in text for text in texts.to_pylist()):
            process._process.kill()

    before_each_call(monkeypatch, "tasks.tokenize.rendering.processes.RenderProcess.render", end)
    told = outcomes(render(talks("a", "b", "end 1", "c", "end 2")))
    assert [text if isinstance(text, str) else text.reason for text in told] == ["a", "b", "limits", "c", "limits"]


def test_a_process_that_somebody_ends_is_replaced():
    """No conversation is refused for it."""
    render = renderers(ALL)
    for _ in range(3):
        for _, one in processes._idle:
            one._process.send_signal(signal.SIGKILL)
        assert outcomes(render(talks("a", "b"))) == ["a", "b"]


def test_a_process_whose_reader_is_gone_ends():
    """Nothing is left behind by a build that is killed."""
    render = renderers(ALL)
    assert outcomes(render(talks("a"))) == ["a"]
    ((_, one),) = processes._idle
    process = one._process
    process.stdin.close()
    assert process.wait(30) == 0


def test_threads_have_processes_of_their_own():
    render = renderers(ALL)
    found = {}

    def work(number: int) -> None:
        found[number] = [outcomes(render(talks(f"{number} {k}"))) for k in range(50)]

    in_threads(work, range(3))
    assert found == {n: [[f"{n} {k}"] for k in range(50)] for n in range(3)}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_uses_processes_of_its_own():
    """Two processes never speak with the same one."""
    render = renderers(ALL)
    assert outcomes(render(talks("a"))) == ["a"]
    child = os.fork()
    if child == 0:
        is_right = not processes._idle and outcomes(render(talks("b"))) == ["b"]
        processes._end_all()
        os._exit(0 if is_right else 1)
    assert outcomes(render(talks("c"))) == ["c"]
    assert os.waitpid(child, 0)[1] == 0


def test_a_process_has_no_setting_of_the_machine_and_no_secret(monkeypatch):
    """Such as time zone, language and hash seed. Of the environment it has what it needs to begin."""
    for name, value in (("TZ", "Asia/Tokyo"), ("LC_ALL", "tr_TR.UTF-8"), ("PYTHONHASHSEED", "7"), ("AWS_SECRET_ACCESS_KEY", "x")):
        monkeypatch.setenv(name, value)
    given, real = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: given.append(kwargs["env"]) or real(*args, **kwargs))
    assert outcomes(renderers("{{ strftime_now('%s %A %Z') }} " + ALL)(talks("a"))) == ["1721952000 Friday  a"]
    assert given
    assert all("AWS_SECRET_ACCESS_KEY" not in env for env in given)


def test_a_process_that_renders_does_not_import_numpy():
    subprocess.check_call(
        [sys.executable, "-c", "import sys, tasks.tokenize.rendering.process; assert 'numpy' not in sys.modules"]
    )
