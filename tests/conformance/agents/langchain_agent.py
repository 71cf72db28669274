"""LangChain: `create_agent` with the OpenAI and the Anthropic chat models."""

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def get_weather(city: str) -> str:
    """Weather of a city."""
    return f"{city}: 20 degrees"


outputs = []
for model in (ChatOpenAI(model="puppet"), ChatOpenAI(model="puppet", use_responses_api=True), ChatAnthropic(model="puppet")):
    agent = create_agent(model, [get_weather])
    messages = agent.invoke({"messages": [{"role": "user", "content": "Weather in Paris?"}]})["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"], messages
    outputs.append(messages[-1].text if isinstance(messages[-1].text, str) else messages[-1].text())
assert len(set(outputs)) == 1, outputs
print(outputs[0])
