"""A call in each way that models write them, as small templates and as text."""

from collections.abc import Mapping
from typing import Any

from client.gateway.structured.call_formats import (
    ACTIONS_JSON,
    BARE_JSON,
    CHANNEL_JSON,
    FENCED_JSON,
    FUNCTION_CALL_JSON,
    FUNCTION_JSON,
    FUNCTION_ROLE_JSON,
    FUNCTION_TAGS,
    INVOKE_TAGS,
    KEYS_AND_VALUES,
    LISTED_JSON,
    MARKED_JSON,
    NUMBERED_JSON,
    NUMBERED_SECTION_JSON,
    SEED_FUNCTION_TAGS,
    SEPARATED_JSON,
    TAGGED_JSON,
    CallFormat,
)
from client.text.chat_template import ChatTemplate

EACH = (
    "{%% for key, value in call.arguments.items() %%}%s{%% endfor %%}"  # its holes: key and value
)
VALUE = "{{ value if value is string else value | tojson }}"
KEYED = EACH % f"<arg_key>{{{{ key }}}}</arg_key>\n<arg_value>{VALUE}</arg_value>\n"
TAGGED = EACH % f"<parameter={{{{ key }}}}>\n{VALUE}\n</parameter>\n"
DENSE = EACH % f"<parameter={{{{ key }}}}>{VALUE}</parameter>\n"
INVOKED = EACH % f'<parameter name="{{{{ key }}}}">{VALUE}</parameter>\n'
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
WRITTEN: dict[CallFormat, str] = {
    NUMBERED_JSON: (
        "[TOOL_CALLS]{{ call.name }}[CALL_ID]{{ id }}[ARGS]{{ call.arguments | tojson }}"
    ),
    MARKED_JSON: ("[TOOL_CALLS]{{ call.name }}[ARGS]{{ call.arguments | tojson }}"),
    LISTED_JSON: ("[TOOL_CALLS][{{ call | tojson }}]"),
    ACTIONS_JSON: (
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "{{ call.name }}", '
        '"parameters": {{ call.arguments | tojson }}}\n]<|END_ACTION|>'
    ),
    FUNCTION_CALL_JSON: ("<|function_call|>{{ call | tojson }}"),
    FUNCTION_ROLE_JSON: ("function call{{ '<|role_sep|>' }}\n{{ call | tojson }}"),
    FUNCTION_JSON: ("<function={{ call.name }}>{{ call.arguments | tojson }}</function>"),
    KEYS_AND_VALUES: (f"<tool_call>{{{{ call.name }}}}\n{KEYED}</tool_call>"),
    FUNCTION_TAGS: (
        f"<tool_call>\n<function={{{{ call.name }}}}>\n{TAGGED}</function>\n</tool_call>"
    ),
    SEED_FUNCTION_TAGS: (
        f"<seed:tool_call>\n<function={{{{ call.name }}}}>\n{DENSE}</function>\n</seed:tool_call>"
    ),
    INVOKE_TAGS: (
        '<minimax:tool_call>\n<invoke name="{{ call.name }}">\n'
        f"{INVOKED}</invoke>\n</minimax:tool_call>"
    ),
    TAGGED_JSON: ("<tool_call>\n{{ call | tojson }}\n</tool_call>"),
    FENCED_JSON: (
        f"{BEGIN}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{{{ call.name }}}}\n```json\n"
        f"{{{{ call.arguments | tojson }}}}\n```<｜tool▁call▁end｜>{END}"
    ),
    SEPARATED_JSON: (
        f"{BEGIN}<｜tool▁call▁begin｜>{{{{ call.name }}}}<｜tool▁sep｜>"
        f"{{{{ call.arguments | tojson }}}}<｜tool▁call▁end｜>{END}"
    ),
    NUMBERED_SECTION_JSON: (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.{{ call.name }}:0"
        "<|tool_call_argument_begin|>{{ call.arguments | tojson }}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    ),
    CHANNEL_JSON: (
        "<|channel|>commentary to=functions.{{ call.name }} <|constrain|>json<|message|>"
        "{{ call.arguments | tojson }}"
    ),
    BARE_JSON: ('{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}'),
}
"""What a template writes a call with, by small templates of each shape."""


def template_of(form: CallFormat) -> str:
    """A template that knows functions and writes ``messages[0].call`` in this form."""
    source = "{% if tools %}{{ tools | tojson }}{% endif %}{% set call = messages[0].call %}"
    return source + "{% set id = 'a1B2c3D4e' %}" + WRITTEN[form]


def written_call(form: CallFormat, name: str, arguments: Mapping[str, Any]) -> str:
    """A call as a model of this form writes it."""
    call = {"name": name, "arguments": arguments}
    return ChatTemplate(template_of(form), {}).render([{"role": "assistant", "call": call}])
