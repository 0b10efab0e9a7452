"""Chat templates: rendered as ``transformers`` renders them, in a sandbox."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from client.text.chat_template import ChatTemplate, TakesTooLong
from dht.errors import UserError

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% generation %}{{ message['content'] | trim }}{% endgeneration %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_LIKE = """
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "skip" %}
        {%- continue %}
    {%- endif %}
    {{- "<|header|>" + message["role"] + "<|end|>\\n\\n" + (message | tojson) }}
    {%- if loop.last %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|header|>assistant<|end|>" }}
{%- endif %}
"""
WITH_OPTIONS = (
    "{% for message in messages %}"
    "{{ message | tojson(ensure_ascii=False, separators=(',', ':'), sort_keys=True) }}"
    "{{ message.content | tojson(ensure_ascii=True) }}{{ message | tojson(indent=2) }}"
    "{{ message.content | tojson(true) }}{{ message | tojson(false, 2) }}"
    "{% endfor %}"
)
CHAT = [
    {"role": "system", "content": "Sei <freundlich> & kurz"},
    {"role": "skip", "content": "never"},
    {"role": "user", "content": " Hi ☃ "},
]


@pytest.mark.parametrize("source", [CHATML, LLAMA_LIKE, WITH_OPTIONS])
@pytest.mark.parametrize("prompts", [True, False])
def test_prompts_are_those_of_transformers(source: str, prompts: bool) -> None:
    special = {"bos_token": "<s>"}
    got = ChatTemplate(source, special).render(CHAT, add_generation_prompt=prompts)
    expected, _ = render_jinja_template(
        [CHAT], chat_template=source, add_generation_prompt=prompts, **special
    )
    assert got == expected[0]


@pytest.mark.parametrize("source", [CHATML, CHATML.replace(" | trim", "")])
@pytest.mark.parametrize("said", ["Once upon", "<", "e", "{", "|>", "```python\n", " It is "])
def test_the_final_message_can_be_continued(said: str, source: str) -> None:
    messages = [*CHAT, {"role": "assistant", "content": said}]
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    got = ChatTemplate(source, {}).render(messages, **options)
    expected, _ = render_jinja_template([messages], chat_template=source, **options)
    assert got == expected[0]
    assert got.endswith(f"assistant\n{said.strip() if source == CHATML else said}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set x = messages.append(1) %}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ raise_exception('no') }}",
        "{{ messages[9].content.x }}",
        "{{ 1 / 0 }}",
        "{{ 5 | indent }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        # Before Jinja 3.1.6 it put the token for the hub into a prompt, which stages read.
        "{{ ('{0.__globals__[json].codecs.sys.modules[os].environ}'|attr('format'))"
        "(raise_exception) }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(UserError):
        ChatTemplate(source, {}).render(CHAT)


def test_a_template_ends_in_time_or_is_ended() -> None:
    """One that looks at all later messages for each call took 5 s for 32 kB, and hours for more."""
    with pytest.raises(TakesTooLong, match="too long"):
        ChatTemplate(CHATML, {}).render(CHAT, late=lambda: True)
    assert ChatTemplate(CHATML, {}).render(CHAT, late=lambda: False)


def test_a_template_that_is_none_is_refused() -> None:
    with pytest.raises(UserError, match="cannot be read"):
        ChatTemplate("{% for %}", {})


def test_where_a_template_is_found(tmp_path: Path) -> None:
    def config(**values: Any) -> None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))

    def rendered() -> str:
        template = ChatTemplate.load(tmp_path)
        assert template is not None
        return template.render(CHAT)

    assert ChatTemplate.load(tmp_path) is None
    config(**{"bos_token": "<s>"})
    assert ChatTemplate.load(tmp_path) is None
    config(chat_template="{{ bos_token }}1", bos_token={"content": "<s>"})
    assert rendered() == "<s>1"
    config(
        chat_template=[{"name": "tool_use", "template": "x"}, {"name": "default", "template": "2"}]
    )
    assert rendered() == "2"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "older"}))
    assert rendered() == "older"
    (tmp_path / "chat_template.jinja").write_text("3{{ eos_token }}")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    assert rendered() == "3</s>"
    config(eos_token=None, added_tokens_decoder={})
    assert rendered() == "3</s>"
    config(extra_special_tokens={"eos_token": "x", "image_token": "<i>"}, added_tokens_decoder={})
    (tmp_path / "chat_template.jinja").write_text("4{{ image_token }}")
    assert rendered() == "4<i>"


def test_chats_with_functions_have_the_template_for_them(tmp_path: Path) -> None:
    def rendered(*, tools: bool) -> str:
        template = ChatTemplate.load(tmp_path)
        assert template is not None
        assert template.tool_source.startswith("tools")
        return template.render(CHAT, tools=[{"type": "function"}] if tools else None)

    both = {"default": "default", "tool_use": "tools{{ tools | length }}", "rag": "{% for %}"}
    for named in (
        [{"name": name, "template": source} for name, source in both.items()],
        both,
        [{"name": "tool_use", "template": both["tool_use"]}, None, {"name": []}, "x"],
    ):
        config = {"chat_template": named}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        assert rendered(tools=True) == "tools1"
        assert len(named) == 4 or rendered(tools=False) == "default"
    (tmp_path / "chat_template.jinja").write_text("tools alone in a file")
    assert rendered(tools=True) == rendered(tools=False) == "tools alone in a file"
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools of a file")
    assert rendered(tools=True) == "tools of a file"
    assert rendered(tools=False) == "file"


def test_what_a_template_writes_for_a_call_is_found() -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% for c in m.tool_calls %}[{{ c.function.name }}]{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    call = {"name": "f", "arguments": {}}
    assert ChatTemplate(source, {}).written_call(call, {}) == "[f]"
    assert ChatTemplate("{{ raise_exception('no') }}", {}).written_call(call, {}) == ""
    assert ChatTemplate("{{ messages | length }}", {}).written_call(call, {}) == ""
