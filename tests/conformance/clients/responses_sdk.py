#!/usr/bin/env python3
"""The openai package against /v1/responses: whole, streamed, structured, calls, kept and continued."""

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


def refused(client, model):
    for extra in ({"truncation": "auto"}, {"tools": [{"type": "web_search"}]}):
        try:
            client.responses.create(model=model, input="x", **extra)
            raise AssertionError(f"{extra} was accepted")
        except openai.BadRequestError as error:
            assert error.body["param"], error.body


def main():
    with Server() as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        model = client.models.list().data[0].id
        first = whole_and_streamed(client, model)
        kept(client, model, first)
        structured(client, model)
        called(client, model)
        background(client, model)
        refused(client, model)
    print(f"openai {openai.__version__}: /v1/responses agrees")


main()
