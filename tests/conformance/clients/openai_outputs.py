"""Structured output, tool calls and reasoning with the openai SDK: part of openai_sdk.py.

The demo model generates neither tool calls nor reasoning by itself. Where one is required, a grammar forces the
family's syntax; the server's parser reads that syntax, and the SDK's parser reads the reply.
"""

import enum
import json
import pathlib

import openai
import pydantic

DEMO = pathlib.Path(__file__).resolve().parents[2] / "data" / "demo"
QUESTION = [{"role": "user", "content": "What is 12 plus 30?"}]
CALL = r'<tool_call>\n\{"name": "%s", "arguments": \{"city": "(Bonn|Rome)"\}\}\n</tool_call>'


class City(str, enum.Enum):
    BONN = "Bonn"
    ROME = "Rome"


class Weather(pydantic.BaseModel):
    """The weather of a city"""

    city: City


class Time(pydantic.BaseModel):
    """The time in a city"""

    city: City


class Answer(pydantic.BaseModel):
    sure: bool
    city: City


TOOLS = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Time)]


def no_space():
    """Prevents the small model from generating endless white space, which JSON permits between all tokens."""
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    blank = [id for token, id in tokenizer["model"]["vocab"].items() if not token.strip("ĠĊĉč")]
    return {str(id): -100 for id in blank}


class Outputs:
    """Checks of the outputs that one client gets from one model."""

    def __init__(self, client, model, check):
        self.client, self.model, self.check = client, model, check
        self.asked = {"model": model, "messages": QUESTION, "max_tokens": 300, "seed": 1}

    def parsed(self):
        """Checks that a pydantic class is accepted as the schema and that the SDK parses the output into an object."""
        parse = self.client.chat.completions.parse
        asked = {**self.asked, "response_format": Answer, "logit_bias": no_space()}
        answer = parse(**asked).choices[0].message.parsed
        self.check(isinstance(answer, Answer), f"json_schema is parsed by pydantic: {answer!r}")
        with self.client.chat.completions.stream(**asked) as stream:
            snapshots = [event.parsed for event in stream if event.type == "content.delta"]
            streamed = stream.get_final_completion().choices[0].message.parsed
        self.check(streamed == answer and len(snapshots) > 1, "and from a stream")
        try:
            parse(**{**asked, "max_tokens": 2})
        except openai.LengthFinishReasonError as error:
            self.check(error.completion.usage.completion_tokens == 2, "LengthFinishReasonError")
        else:
            self.check(False, "LengthFinishReasonError")

    def called(self, names, what, **asked):
        """Checks a tool call, unary and streamed, whose arguments the SDK joins and parses."""
        asked = {**self.asked, "tools": TOOLS, **asked}
        whole = self.client.chat.completions.parse(**asked).choices[0]
        parts = []
        with self.client.chat.completions.stream(**asked) as stream:
            for event in stream:
                if event.type == "tool_calls.function.arguments.delta":
                    parts.append(event.arguments_delta)
            streamed = stream.get_final_completion().choices[0]
        for choice in (whole, streamed):
            call = choice.message.tool_calls[0]
            good = call.function.name in names and call.function.parsed_arguments.city in City
            self.check(good and choice.finish_reason == "tool_calls" and call.id, what)
        joined = streamed.message.tool_calls[0].function.arguments
        same = joined == whole.message.tool_calls[0].function.arguments
        whole_parts = len(streamed.message.tool_calls) > 1 or "".join(parts) == joined
        self.check(same and whole_parts and len(parts) > 1, f"{what}: {len(parts)} parts of arguments")
        return whole.message

    def tools(self):
        grammar = {"structured_outputs": {"regex": CALL % "Weather"}}
        message = self.called({"Weather"}, "tool_choice auto", extra_body=grammar)
        self.called({"Weather", "Time"}, "tool_choice required", tool_choice="required")
        named = {"type": "function", "function": {"name": "Time"}}
        self.called({"Time"}, "a named tool", tool_choice=named)
        none = self.client.chat.completions.create(**self.asked, tools=TOOLS, tool_choice="none").choices[0]
        self.check(none.message.tool_calls is None and none.message.content, "tool_choice none")
        plain = self.client.chat.completions.create(**self.asked, tools=TOOLS).choices[0]
        self.check(plain.message.tool_calls is None and plain.finish_reason == "stop", "auto without a call")
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
        calls = [call.model_dump(exclude={"function": {"parsed_arguments"}}) for call in message.tool_calls]
        told = {"role": "assistant", "content": "I look.", "tool_calls": calls}
        turns = [*QUESTION, told, result]
        after = self.client.chat.completions.create(**{**self.asked, "messages": turns}, tools=TOOLS)
        self.check(after.choices[0].message.role == "assistant", "a tool's result goes on")

    def reasoning(self):
        thought = {"structured_outputs": {"regex": r"<think>\nit is (42|43)\n</think>\n\n4[0-9]"}}
        whole = self.client.chat.completions.create(**self.asked, extra_body=thought)
        message = whole.choices[0].message
        extra = message.model_extra
        good = extra["reasoning"].strip() in ("it is 42", "it is 43")
        self.check(extra["reasoning"] == extra["reasoning_content"], "both names of reasoning")
        self.check(good and message.content.strip().startswith("4"), f"reasoning stands apart: {extra['reasoning']!r}")
        details = whole.usage.completion_tokens_details
        self.check(0 < details.reasoning_tokens < whole.usage.completion_tokens, "reasoning tokens in usage")
        chunks = list(self.client.chat.completions.create(**self.asked, extra_body=thought, stream=True))
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        text = "".join((delta.model_extra or {}).get("reasoning") or "" for delta in deltas)
        content = "".join(delta.content or "" for delta in deltas)
        self.check((text, content) == (extra["reasoning"], message.content), "a stream says the same")
