# ruff: noqa: E501  templates break no line that they do not mean
"""Small chat templates, one of each shape that public models have; none is a model's own."""

_CALLS = (
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}"
)
_TOOLS = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
_ASKS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

HERMES = (
    "{% if tools %}<|im_start|>system\n<tools>"
    + _TOOLS
    + "</tools><tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" + _CALLS + "<|im_end|>\n"
    "{% endfor %}" + _ASKS
)
"""Writes whatever role comes."""
QWEN3 = (
    "{% if tools %}<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
    "<tools>" + _TOOLS + "</tools><tool_call><|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n"
    "{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if loop.last and m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}" + _CALLS + "<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "<|im_end|>\n{% endif %}{% endfor %}"
    + _ASKS
    + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
"""Leaves out roles that it does not know."""
QWEN3_5 = (
    "{% if tools %}<tools>" + _TOOLS + "</tools><tool_call><function=><parameter=>{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{% if not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<|im_start|>system\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for name, value in call.function.arguments | items %}"
    "<parameter={{ name }}>\n{{ value if value is string else value | tojson }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>{{ m.content }}</tool_response>"
    "<|im_end|>\n{% else %}{{ raise_exception('Unexpected message role.') }}{% endif %}"
    "{% endfor %}" + _ASKS
)
"""Refuses roles that it does not know and later system messages; walks through arguments."""
LLAMA3 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{% set system = messages[0].content %}{% set messages = messages[1:] %}"
    "{% else %}{% set system = '' %}{% endif %}"
    "<|start|>system<|end|>{{ system }}<|eot|>"
    "{% if tools %}" + _TOOLS + '{"name": function name, "parameters": dictionary}{% endif %}'
    "{% for m in messages %}"
    "{% if not (m.role == 'tool' or 'tool_calls' in m) %}"
    "<|start|>{{ m.role }}<|end|>\n\n{{ m.content | trim }}<|eot|>"
    "{% elif 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{% set f = m.tool_calls[0].function %}<|start|>assistant<|end|>\n\n"
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}<|eot|>'
    "{% else %}<|start|>ipython<|end|>\n\n{{ m.content }}<|eot|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
"""One call a message, and no text beside it."""
MISTRAL = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% set ns = namespace(at=0) %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.at % 2 == 0) %}{{ raise_exception('conversation roles must"
    " alternate user/assistant/user/assistant/...') }}{% endif %}{% set ns.at = ns.at + 1 %}"
    "{% endif %}{% endfor %}{{ bos_token }}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.last %}[AVAILABLE_TOOLS]" + _TOOLS + "[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{% if loop.last and system is defined %}{{ system }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for call in m.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings"
    " with length 9!') }}{% endif %}{{ call.function | tojson }}{% endfor %}]</s>"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}</s>"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}"
    "{% endfor %}"
)
"""Turns in strict alternation, short ids, the system message beside the last question alone."""
GPT_OSS = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}\n"
    "# Valid channels: analysis, commentary, final.<|end|>"
    "{% if messages[0].role in ('developer', 'system') %}{% set told = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% if told or tools %}<|start|>developer<|message|>{{ told }}" + _TOOLS + "<|end|>{% endif %}"
    "{% set ns = namespace(last=none) %}{% for m in messages %}{% set later = messages[loop.index:] %}"
    "{% if m.role == 'assistant' and m.tool_calls %}"
    "{% if m.content and m.thinking %}{{ raise_exception('Cannot pass both content and thinking in"
    " an assistant message with tool calls!') }}{% endif %}"
    "{% if not later | selectattr('role', 'equalto', 'user') | list and (m.content or m.thinking) %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.content or m.thinking }}<|end|>{% endif %}"
    "{% set f = m.tool_calls[0].function %}{% set ns.last = f.name %}"
    "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
    "{{ f.arguments | tojson }}<|call|>"
    "{% elif m.role == 'tool' %}<|start|>functions.{{ ns.last }} to=assistant<|channel|>commentary"
    "<|message|>{{ m.content | tojson }}<|end|>"
    "{% elif m.role == 'assistant' %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""One call of several, a developer message in front alone, thoughts under a name of their own."""
GLM = (
    "[gMASK]<sop>{% if tools %}<|system|>\n<tools>" + _TOOLS + "</tools>"
    "<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>\n{{ m.content }}"
    "{% elif m.role == 'assistant' %}<|assistant|>\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}\n"
    "{% for name, value in call.function.arguments.items() %}<arg_key>{{ name }}</arg_key>\n"
    "<arg_value>{{ value | tojson if value is not string else value }}</arg_value>\n{% endfor %}"
    "</tool_call>{% endfor %}"
    "{% elif m.role == 'tool' %}<|observation|>\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% elif m.role == 'system' %}<|system|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
DEEPSEEK = (
    "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.system = ns.system ~ '\n\n' ~ m.content %}{% endif %}{% endfor %}"
    "{{ bos_token }}{{ ns.system }}{% if tools %}" + _TOOLS + "<｜tool▁calls▁begin｜>{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content }}{% if m.tool_calls %}"
    "<｜tool▁calls▁begin｜>{% for call in m.tool_calls %}<｜tool▁call▁begin｜>{{ call.function.name }}"
    "<｜tool▁sep｜>{{ call.function.arguments if call.function.arguments is string else"
    " call.function.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{% endif %}"
    "<｜end▁of▁sentence｜>"
    "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% if thinking %}<think>{% else %}</think>"
    "{% endif %}{% endif %}"
)
GEMMA3 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content ~ '\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set first = '' %}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ first if loop.first else '' }}{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
"""Knows neither tools nor calls; the system message stands in the first question."""
SYSTEMLESS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}<start_of_turn>{{ m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
KIMI_K2 = (
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>" + _TOOLS + "<|im_end|>{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_system|>tool<|im_middle|>## Return of {{ m.tool_call_id }}\n"
    "{{ m.content }}"
    "{% else %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for call in m.tool_calls %}"
    "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
    "{{ call.function.arguments if call.function.arguments is string else"
    " call.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>"
    "{% endif %}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
"""Shows the id of a call, and never its name."""

TEMPLATES = {
    "Hermes": HERMES,
    "Qwen3": QWEN3,
    "Qwen3.5": QWEN3_5,
    "Llama 3": LLAMA3,
    "Mistral": MISTRAL,
    "gpt-oss": GPT_OSS,
    "GLM": GLM,
    "DeepSeek": DEEPSEEK,
    "Kimi K2": KIMI_K2,
    "Gemma 3": GEMMA3,
    "Gemma 2": SYSTEMLESS,
}
"""By the families that have such templates."""
