"""langchain's loop of calls and results over this gateway, unmodified; answers are spelled out."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.compat import python_with
from tests.unit.client.gateway.paper import paper_gateway
from tests.unit.client.gateway.test_tool_answers import CALL, TEMPLATE, scripted

LIMIT_S = 240.0
AGENT = """
import json, sys
from langchain.agents import create_agent
from langchain_core.messages import AIMessageChunk
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

@tool
def weather(city: str) -> str:
    "The weather in a city."
    return f"snow in {city}"

url, responses = sys.argv[1], sys.argv[2] == "responses"
model = ChatOpenAI(
    model="brook", base_url=url, api_key="none", max_retries=0, use_responses_api=responses
)
agent = create_agent(model, [weather])
asked = {"messages": [{"role": "user", "content": "How is Oslo?"}]}
done = agent.invoke(asked)["messages"]
streamed = [
    message.text
    for message, _ in agent.stream(asked, stream_mode="messages")
    if isinstance(message, AIMessageChunk)
]
print(json.dumps([[[each.type, each.text] for each in done], "".join(streamed)]))
"""


async def test_tools_bound_by_langchain_are_called_and_their_results_read() -> None:
    from langchain_core.messages import HumanMessage, ToolMessage  # seconds of imports
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def weather(city: str) -> str:
        """The weather in a city."""
        return f"snow in {city}"

    async with paper_gateway(template=TEMPLATE) as gateway:
        asked = scripted(gateway, f"I look. {CALL}", "It snows.")
        model = ChatOpenAI(
            model="brook", base_url=gateway.url + "/v1", api_key="none", max_retries=0
        ).bind_tools([weather])
        first = await model.ainvoke([HumanMessage("How is Oslo?")])
        (call,) = first.tool_calls
        assert (call["name"], call["args"]) == ("weather", {"city": "Oslo"})
        result = await weather.ainvoke(call)
        assert isinstance(result, ToolMessage)
        last = await model.ainvoke([HumanMessage("How is Oslo?"), first, result])
        assert (last.content, last.tool_calls) == ("It snows.", [])
        tokenizer = gateway.swarm.text.tokenizer
        assert tokenizer is not None
        assert "snow in Oslo" in tokenizer.decode(asked[1].prompt_ids)


@pytest.mark.parametrize("form", ["chats", "responses"])
async def test_an_agent_of_langchain_calls_until_it_knows(form: str, tmp_path: Path) -> None:
    python = python_with("langchain.agents", "langchain_openai")
    (tmp_path / "agent.py").write_text(AGENT)

    async with paper_gateway(template=TEMPLATE) as gateway:
        asked = scripted(gateway, f"I look. {CALL}", "It snows.", CALL, "It snows again.")
        agent = await asyncio.create_subprocess_exec(
            python,
            str(tmp_path / "agent.py"),
            gateway.url + "/v1",
            form,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(LIMIT_S):
            out, err = await agent.communicate()
        assert agent.returncode == 0, err.decode()[-3000:]
        done, streamed = json.loads(out.splitlines()[-1])
        assert done == [
            ["human", "How is Oslo?"],
            ["ai", "I look."],
            ["tool", "snow in Oslo"],
            ["ai", "It snows."],
        ]
        assert streamed == "It snows again."
        assert len(asked) == 4
