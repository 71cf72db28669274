"""Pydantic AI: a tool loop over chat completions, the Responses API and the Messages API."""

from pydantic_ai import Agent

outputs = []
for model in ("openai-chat:puppet", "openai-responses:puppet", "anthropic:puppet"):
    agent = Agent(model)

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """Weather of a city."""
        return f"{city}: 20 degrees"

    outputs.append(agent.run_sync("Weather in Paris?").output)
assert len(set(outputs)) == 1, outputs
print(outputs[0])
