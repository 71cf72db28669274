#!/usr/bin/env python3
"""The anthropic package against /v1/messages: whole, streamed, calls, counting, every error class."""

import json
import re

from sdk_venv import enter

enter("anthropic==2.12.0")

import anthropic  # noqa: E402 (inside the environment)
from hadron_server import Server  # noqa: E402

WEATHER = {
    "name": "weather",
    "description": "The weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Bonn", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
HELLO = [{"role": "user", "content": "What is 12 plus 30?"}]
def whole_and_streamed(client, model):
    asked = {"model": model, "max_tokens": 40, "messages": HELLO, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**asked)
    assert whole.type == "message" and whole.content[0].type == "text"
    assert whole.stop_reason in ("end_turn", "max_tokens") and whole.usage.output_tokens > 0
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    counted = client.messages.count_tokens(model=model, messages=HELLO)
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    word = text.split()[-1]
    stopped = client.messages.create(**asked, stop_sequences=[word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)


def called(client, model):
    asked = {"model": model, "max_tokens": 300, "messages": HELLO, "tools": [WEATHER],
             "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}}
    reply = client.messages.create(**asked)
    [call] = [block for block in reply.content if block.type == "tool_use"]
    assert call.input["city"] in ("Bonn", "Rome") and reply.stop_reason == "tool_use"
    with client.messages.stream(**asked) as stream:
        parts = [e.partial_json for e in stream if e.type == "input_json"]
        final = stream.get_final_message()
    [streamed] = [block for block in final.content if block.type == "tool_use"]
    assert streamed.input["city"] in ("Bonn", "Rome") and len(parts) > 1
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    turns = [*HELLO, {"role": "assistant", "content": [call.model_dump()]},
             {"role": "user", "content": [result]}]
    client.messages.create(model=model, max_tokens=5, messages=turns, tools=[WEATHER])


def formatted(client, model):
    """A schema in the format of the Messages API; thinking has an effort. The demo model repeats spaces endlessly."""
    schema = {"type": "object", "properties": {"answer": {"enum": ["yes", "no"]}}, "required": ["answer"],
              "additionalProperties": False}
    config = {"effort": "max", "format": {"type": "json_schema", "schema": schema}}
    reply = client.messages.create(model=model, max_tokens=40, messages=HELLO, output_config=config)
    assert reply.content[0].text.startswith("{"), reply.content


def refused(client, model):
    def fails(kind, **fields):
        try:
            client.messages.create(**{"model": model, "max_tokens": 4, "messages": HELLO, **fields})
        except kind as error:
            assert error.body["type"] == "error" and error.body["error"]["message"], error.body
            return error.body["error"]["type"]
        raise AssertionError(f"{fields} were accepted")

    image = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}]
    assert fails(anthropic.BadRequestError, messages=image) == "invalid_request_error"
    assert fails(anthropic.BadRequestError, max_tokens=0) == "invalid_request_error"
    for wrong in ({"effort": "utmost"}, {"format": {"type": "xml"}}, {"format": {"type": "json_schema"}}):
        assert fails(anthropic.BadRequestError, output_config=wrong) == "invalid_request_error"
    assert fails(anthropic.NotFoundError, model="another") == "not_found_error"


def agent(client, model):
    """A request as Claude Code sends it: beta fields, a server tool, a system message within the conversation."""
    turns = [*HELLO, {"role": "system", "content": "The date has changed."}, *HELLO]
    reply = client.beta.messages.with_raw_response.create(
        model=model, max_tokens=8, messages=turns, system=[{"type": "text", "text": "Be brief."}],
        tools=[WEATHER, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        thinking={"type": "adaptive"}, metadata={"user_id": "u"}, mcp_servers=[], service_tier="auto",
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        betas=["context-management-2025-06-27"])
    ignored = reply.headers["x-hadron-ignored-fields"].split(", ")
    assert {"metadata", "service_tier", "tools", "tools[1]"} == set(ignored), ignored
    assert reply.parse().usage.output_tokens > 0
    counted = client.beta.messages.count_tokens(model=model, messages=turns, mcp_servers=[])
    assert counted.input_tokens > 0


def too_long(client, model):
    """Both sentences of Anthropic's API about the context length, with their numbers."""
    def message(**fields):
        try:
            client.messages.create(**{"model": model, "max_tokens": 4, "messages": HELLO, **fields})
        except anthropic.BadRequestError as error:
            return error.message
        raise AssertionError(f"{fields} were accepted")

    long = [{"role": "user", "content": "hello world, " * 50_000}]
    found = re.search(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", message(messages=long))
    assert int(found[1]) > int(found[2]), found
    both = r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)"
    found = re.search(both, message(max_tokens=20_000))
    assert int(found[1]) + int(found[2]) > int(found[3]), found


def cached(client, model):
    """The attribution line of Claude Code changes with every request; the prompt after it is cached."""
    def usage(number, turns):
        line = f"x-anthropic-billing-header: cc_version=2.1.332; cch={number:05x};"
        system = [{"type": "text", "text": line}, {"type": "text", "text": "Be brief. " * 30}]
        return client.messages.create(model=model, max_tokens=4, messages=turns, system=system).usage

    usage(1, HELLO)
    second = usage(2, [*HELLO, {"role": "assistant", "content": "42"}, *HELLO])
    assert second.cache_read_input_tokens > second.input_tokens, second


def main():
    with Server() as server:
        client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
        model = json.loads(server.get("/v1/models"))["data"][0]["id"]
        whole_and_streamed(client, model)
        called(client, model)
        formatted(client, model)
        refused(client, model)
        agent(client, model)
        too_long(client, model)
        cached(client, model)
    print(f"anthropic {anthropic.__version__}: /v1/messages agrees")


main()
