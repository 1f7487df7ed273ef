"""The variables of chat templates."""

from chat_templates import STYLES
from penstock.producers.rollout.chat_template import read_variables


def test_variables_that_a_template_reads_are_those_that_it_does_not_set_itself() -> None:
    rows = {
        "{{ a }}{{ b.c }}{{ d['e'] }}": "a b d",
        "{# a #}{{ 'b' }}{{ messages[0].c }}{{ messages['d'] }}": "messages",
        "{% if a is not defined %}{% set a = false %}{% endif %}{{ a }}": "a",
        "{% set a = a | default(true) %}{{ a }}": "a",
        "{% set a = true %}{{ a }}": "",
        "{% if messages %}{% set a = 3 %}{{ a }}{% endif %}": "messages",
        "{% if b %}{% set a = 3 %}{% else %}{% set a = 4 %}{% endif %}{{ a }}": "b",
        "{% if b %}{% set a = 3 %}{% endif %}{{ a }}": "a b",
        "{% for a in b if c %}{{ a ~ loop.index }}{% if d %}{% break %}{% endif %}{% endfor %}": "b c d",
        "{% for m in messages %}{% generation %}{{ m.a }}{{ b }}{% endgeneration %}{% endfor %}": "b messages",
        "{% for m in messages %}{% set a = 1 %}{% endfor %}{{ a }}": "a messages",
        "{% macro f(a, b=c) %}{{ a ~ b ~ d }}{{ f(1) }}{% endmacro %}{{ f(e) }}": "c d e",
        "{% set n = namespace(x=a) %}{% set n.x = b %}{{ n.x }}{{ raise_exception('c') if d }}": "a b d",
        "{% set a, b = c %}{{ a ~ b }}{% set d %}{{ e }}{% endset %}{{ d }}": "c e",
        "{% with a = b %}{{ a }}{% endwith %}": "b",
        "{{ 'x' if a else strftime_now('%d') }}": "a",
    }
    for template, names in rows.items():
        assert sorted(read_variables(template)) == names.split(), template
    assert read_variables({"default": "{{ a }}", "tool_use": "{{ b }}"}) == {"a", "b"}
    assert read_variables(STYLES["qwen3"].template) == {"messages", "add_generation_prompt", "enable_thinking"}
