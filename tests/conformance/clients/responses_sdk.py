#!/usr/bin/env python3
"""The openai package against /v1/responses and /v1/conversations: whole, streamed, structured, calls of functions and custom tools, kept
and continued. The package checks every reply and event against its types."""

import json

from sdk_venv import enter

enter("openai==3.54.0")

import openai  # noqa: E402 (inside the environment)
from hadron_server import ROOT, Server  # noqa: E402

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Bonn", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
ANSWER = {
    "type": "object",
    "properties": {"answer": {"type": "string", "enum": ["yes", "no"]}},
    "required": ["answer"],
    "additionalProperties": False,
}
def no_space():
    """Prevents the small model from generating endless white space, which JSON permits between all tokens."""
    tokenizer = json.loads((ROOT / "tests" / "data" / "demo" / "tokenizer.json").read_text())
    blank = [id for token, id in tokenizer["model"]["vocab"].items() if not token.strip("ĠĊĉč")]
    return {"logit_bias": {str(id): -100 for id in blank}}


def whole_and_streamed(client, model):
    asked = {"model": model, "input": "What is 12 plus 30?", "temperature": 0, "max_output_tokens": 40}
    whole = client.responses.create(**asked, metadata={"who": "test"})
    assert whole.status in ("completed", "incomplete") and whole.output_text, whole
    assert whole.metadata == {"who": "test"} and whole.usage.total_tokens > whole.usage.output_tokens
    kinds, text = [], ""
    with client.responses.stream(**asked) as stream:
        for event in stream:
            kinds.append(event.type)
            if event.type == "response.output_text.delta":
                text += event.delta
        final = stream.get_final_response()
    assert text == whole.output_text == final.output_text, (text, whole.output_text)
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
    return whole


def kept(client, model, first):
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = client.responses.create(
        model=model, input="And 13 plus 30?", previous_response_id=first.id, max_output_tokens=20
    )
    assert second.usage.input_tokens > first.usage.input_tokens
    client.responses.delete(first.id)
    try:
        client.responses.retrieve(first.id)
        raise AssertionError("a deleted response came back")
    except openai.NotFoundError:
        pass


def structured(client, model):
    form = {"format": {"type": "json_schema", "name": "answer", "schema": ANSWER, "strict": True}}
    reply = client.responses.create(
        model=model, input="Yes or no?", text=form, max_output_tokens=400, extra_body=no_space()
    )
    assert json.loads(reply.output_text)["answer"] in ("yes", "no")


def called(client, model):
    asked = {"model": model, "input": "Weather in Bonn?", "tools": [WEATHER], "max_output_tokens": 300,
             "tool_choice": {"type": "function", "name": "weather"}, "parallel_tool_calls": False}
    reply = client.responses.create(**asked)
    [call] = [item for item in reply.output if item.type == "function_call"]
    assert json.loads(call.arguments)["city"] in ("Bonn", "Rome") and call.name == "weather"
    with client.responses.stream(**asked) as stream:
        parts = [e.delta for e in stream if e.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    [streamed] = [item for item in final.output if item.type == "function_call"]
    assert "".join(parts) == streamed.arguments and len(parts) > 1
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    client.responses.create(
        model=model, previous_response_id=reply.id, input=[output], tools=[WEATHER], max_output_tokens=10
    )


def background(client, model):
    asked = {"model": model, "input": "Count.", "background": True, "max_output_tokens": 400}
    reply = client.responses.create(**asked)
    assert reply.status == "queued"
    cancelled = client.responses.cancel(reply.id)
    assert cancelled.status == "cancelled", cancelled.status


def custom(client, model):
    """A forced call of a custom tool matches its regex; the stream has the events of custom tools."""
    tool = {"type": "custom", "name": "pick", "description": "Pick a letter",
            "format": {"type": "grammar", "syntax": "regex", "definition": "[abc]{4}"}}
    asked = {"model": model, "input": "Pick.", "tools": [tool], "max_output_tokens": 100,
             "tool_choice": {"type": "custom", "name": "pick"}, "parallel_tool_calls": False}
    reply = client.responses.create(**asked)
    [call] = [item for item in reply.output if item.type == "custom_tool_call"]
    assert len(call.input) == 4 and set(call.input) <= set("abc") and call.name == "pick", call
    text, done = "", None
    for event in client.responses.create(**asked, stream=True):
        if event.type == "response.custom_tool_call_input.delta":
            text += event.delta
        if event.type == "response.custom_tool_call_input.done":
            done = event.input
    assert text == done and len(text) == 4, (text, done)
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "good"}
    history = [{"role": "user", "content": "Pick."}, call.model_dump(exclude_unset=True), output]
    client.responses.create(model=model, input=history, tools=[tool], max_output_tokens=8)


def namespaces(client, model):
    """A call of a function in a namespace names both; tools of other types are skipped."""
    space = {"type": "namespace", "name": "sky", "description": "About the sky", "tools": [WEATHER]}
    choice = {"type": "allowed_tools", "mode": "required",
              "tools": [{"type": "function", "namespace": "sky", "name": "weather"}]}
    raw = client.responses.with_raw_response.create(
        model=model, input="Weather in Bonn?", tools=[{"type": "web_search"}, space], max_output_tokens=300,
        tool_choice=choice, parallel_tool_calls=False)
    assert raw.headers["x-hadron-ignored-fields"] == "tools[0], tools", raw.headers
    [call] = [item for item in raw.parse().output if item.type == "function_call"]
    assert (call.namespace, call.name) == ("sky", "weather"), call


def hints(client, model):
    """Fields that agents send by themselves are accepted."""
    client.responses.create(
        model=model, input="x", max_output_tokens=4, include=["reasoning.encrypted_content"], truncation="auto",
        reasoning={"effort": "low", "summary": "detailed"}, text={"verbosity": "low"}, prompt_cache_key="k",
        safety_identifier="s", service_tier="auto", store=False, extra_body={"client_metadata": {"a": "b"}})


def references(client, model):
    """Items of a stored response can be sent back by their ids."""
    first = client.responses.create(model=model, input="Hello", max_output_tokens=8)
    items = [{"type": "item_reference", "id": item.id} for item in first.output]
    whole = [{"role": "user", "content": "Hello"}, *items, {"role": "user", "content": "Again"}]
    client.responses.create(model=model, input=whole, max_output_tokens=4)
    try:
        client.responses.create(model=model, input=[{"type": "item_reference", "id": "msg_0_0"}])
        raise AssertionError("an unknown item was accepted")
    except openai.NotFoundError as error:
        assert error.body["param"] == "input[0].id", error.body


def conversations(client, model):
    conversation = client.conversations.create(items=[{"role": "user", "content": "My name is Ann."}])
    asked = {"model": model, "conversation": conversation.id, "max_output_tokens": 8}
    first = client.responses.create(**asked, input="What is 12 plus 30?")
    assert first.conversation.id == conversation.id
    second = client.responses.create(**asked, input="And 13 plus 30?")
    assert second.usage.input_tokens > first.usage.input_tokens
    listed = list(client.conversations.items.list(conversation.id, order="asc", limit=2))
    assert len(listed) >= 5 and listed[0].content[0].text == "My name is Ann.", listed
    added = client.conversations.items.create(conversation.id, items=[{"role": "user", "content": "x"}])
    item = client.conversations.items.retrieve(added.data[0].id, conversation_id=conversation.id)
    assert item.content[0].text == "x"
    client.conversations.items.delete(item.id, conversation_id=conversation.id)
    changed = client.conversations.update(conversation.id, metadata={"k": "v"})
    assert changed.metadata == {"k": "v"} == client.conversations.retrieve(conversation.id).metadata
    assert client.conversations.delete(conversation.id).deleted


def refused(client, model):
    skipped = {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}
    for extra in ({"truncation": "head"}, skipped, {"prompt": {"id": "p"}}):
        try:
            client.responses.create(model=model, input="x", **extra)
            raise AssertionError(f"{extra} was accepted")
        except openai.BadRequestError as error:
            assert error.body["param"], error.body


def main():
    with Server() as server:
        client = openai.OpenAI(
            base_url=server.url + "/v1", api_key="none", max_retries=0, _strict_response_validation=True
        )
        model = client.models.list().data[0].id
        first = whole_and_streamed(client, model)
        kept(client, model, first)
        structured(client, model)
        called(client, model)
        custom(client, model)
        namespaces(client, model)
        hints(client, model)
        references(client, model)
        conversations(client, model)
        background(client, model)
        refused(client, model)
    print(f"openai {openai.__version__}: /v1/responses and /v1/conversations agree")


main()
