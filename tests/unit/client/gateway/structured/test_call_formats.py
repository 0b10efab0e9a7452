"""Which way to call is a model's: found in its chat template."""

import pytest

from client.gateway.structured.call_formats import (
    BARE_JSON,
    FENCED_JSON,
    FUNCTION_TAGS,
    KEYS_AND_VALUES,
    LISTED_JSON,
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
        ('{% if tools %}{"name": function name, "parameters": …}', BARE_JSON),
        ("{{ tools }}<|python_tag|>", BARE_JSON),
        ("{{ tools }}<unknown:call>", None),
        ("{{ messages }}", None),
        ("{{ tool_calls }}<tool_call>", None),
    ],
)
def test_the_way_to_call_is_in_the_template(template: str, form: CallFormat | None) -> None:
    assert call_format(template) is form
