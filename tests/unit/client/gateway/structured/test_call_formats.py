"""Which way to call is a model's: found in its chat template."""

import pytest

from client.gateway.structured.call_formats import (
    ACTIONS_JSON,
    BARE_JSON,
    FENCED_JSON,
    FUNCTION_CALL_JSON,
    FUNCTION_JSON,
    FUNCTION_ROLE_JSON,
    FUNCTION_TAGS,
    KEYS_AND_VALUES,
    LISTED_JSON,
    MARKED_JSON,
    NUMBERED_JSON,
    NUMBERED_SECTION_JSON,
    SEPARATED_JSON,
    TAGGED_JSON,
    CallFormat,
    call_format,
)

DEEPSEEK = "{% if tools %}…{% endif %}'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'"


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ tools }}<tool_call>", TAGGED_JSON),
        ("{{ tools }}<tool_call><function=x>", None),
        ("{% for tool in tools %}…<tool_call>\n<function=a>\n<parameter=b>", FUNCTION_TAGS),
        (
            "{% for tool in tools %}…<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n"
            "<arg_value>{arg-value-1}</arg_value>\n...\n</tool_call>",
            KEYS_AND_VALUES,
        ),
        (f"{DEEPSEEK} + 'function<｜tool▁sep｜>' + name + '\\n```json\\n'", FENCED_JSON),
        (f"{DEEPSEEK} + name + '<｜tool▁sep｜>' + arguments", SEPARATED_JSON),
        ("{{ tools }}[AVAILABLE_TOOLS][TOOL_CALLS]", LISTED_JSON),
        ("{{ tools }}[TOOL_CALLS]…[CALL_ID]…[ARGS]", NUMBERED_JSON),
        ("{{ tools }}[TOOL_CALLS]…[ARGS]", MARKED_JSON),
        (
            "{{ tools }}<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>",
            NUMBERED_SECTION_JSON,
        ),
        ('{{ tools }}<|START_ACTION|>[{"tool_name": …, "parameters": …', ACTIONS_JSON),
        ('{{ tools }}"parameters"<|function_call|>', FUNCTION_CALL_JSON),
        ("{{ tools }}\"parameters\"{{ 'function call' + '<|role_sep|>' }}", FUNCTION_ROLE_JSON),
        ('{{ tools }}"parameters"<function=a>{…}</function>', FUNCTION_JSON),
        ('{% if tools %}{"name": function name, "parameters": …}', BARE_JSON),
        ("{{ tools }}<|python_tag|>", BARE_JSON),
        ("{{ tools }}<unknown:call>", None),
        ("{{ messages }}", None),
        ("{{ tool_calls }}<tool_call>", None),
    ],
)
def test_the_way_to_call_is_in_the_template(template: str, form: CallFormat | None) -> None:
    assert call_format(template) is form


@pytest.mark.parametrize(
    ("written", "form"),
    [
        ("", BARE_JSON),
        ('\n{"name": "f", "parameters": {}}<|eot_id|>', BARE_JSON),
        ('<|python_tag|>{"name": "f", "parameters": {}}', BARE_JSON),
        ("<call>f</call>", None),
        ('[{"name": "f"}]', None),
    ],
)
def test_bare_json_is_what_the_template_writes(written: str, form: CallFormat | None) -> None:
    assert call_format('{% if tools %}{"name": x, "parameters": y}', written) is form
    assert call_format("{{ tools }}<tool_call>", written) is TAGGED_JSON
