"""openai-agents: a tool loop over the Responses API and over chat completions, whole and streamed."""

import asyncio

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool
from openai import AsyncOpenAI


@function_tool
def get_weather(city: str) -> str:
    """Weather of a city."""
    return f"{city}: 20 degrees"


async def main():
    outputs = []
    for model in ("puppet", OpenAIChatCompletionsModel(model="puppet", openai_client=AsyncOpenAI())):
        agent = Agent(name="puppet", instructions="Use the tool.", model=model, tools=[get_weather])
        whole = await Runner.run(agent, "Weather in Paris?")
        streamed = Runner.run_streamed(agent, "Weather in Paris?")
        async for _ in streamed.stream_events():
            pass
        assert any(item.type == "tool_call_output_item" for item in whole.new_items), whole.new_items
        outputs += [whole.final_output, streamed.final_output]
    assert len(set(outputs)) == 1, outputs
    print(outputs[0])


asyncio.run(main())
