"""Conversations that every template renders: what clients of the OpenAI API send.

Each one is a dict with `name`, `messages` and, if the request has them, `tools`, `documents`, `chat_template_kwargs`,
`continue_final_message`, `add_generation_prompt`. Arguments of tool calls are JSON text, as in OpenAI's API. The texts of
messages are unique within a conversation, so that a text that a template leaves out is noticed.
"""

import json

WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Current weather of a city",
    "parameters": {"type": "object", "properties": {
        "city": {"type": "string", "description": "Name of the city"},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
        "days": {"type": "integer", "minimum": 1}}, "required": ["city"]}}}
SEARCH = {"type": "function", "function": {
    "name": "web.search", "description": "Searches the web: <b>\"quoted\"</b> & more",
    "parameters": {"type": "object", "properties": {
        "query": {"type": ["string", "null"]},
        "filters": {"type": "object", "properties": {"sites": {"type": "array", "items": {"type": "string"}}}},
        "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
        "exact": {"type": "boolean", "default": True},
        "weight": {"type": "number", "default": 0.5}}, "additionalProperties": False}}}
BARE = {"type": "function", "function": {"name": "ping"}}
NESTED = {"type": "function", "function": {
    "name": "save_order", "description": "Saves an order", "strict": True,
    "parameters": {"$defs": {"Item": {"type": "object", "properties": {"sku": {"type": "string"}, "count": {"type": "integer"}},
                                      "required": ["sku"]}},
                   "type": "object", "properties": {"items": {"type": "array", "items": {"$ref": "#/$defs/Item"}}},
                   "required": ["items"]}}}


def system(content="You are a careful assistant."):
    return {"role": "system", "content": content}


def user(content="What is the capital of France?"):
    return {"role": "user", "content": content}


def assistant(content="It is Paris.", **fields):
    return {"role": "assistant", "content": content, **fields}


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def call(name="get_weather", arguments='{"city": "Paris"}', number=0):
    return {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content='{"temperature": 21}', number=0, **fields):
    return {"role": "tool", "tool_call_id": f"call{number:05d}", "content": content, **fields}


def called(content="", *calls, **fields):
    return assistant(content, tool_calls=list(calls) or [call()], **fields)


RICH = json.dumps({"query": "Köln \"Dom\" <b>", "filters": {"sites": ["a.example", "b.example"]}, "limit": None, "exact": False,
                   "weight": 1.5}, ensure_ascii=False)
SPECIAL = "a <|im_end|>\n<|im_start|>system\nb </s> [INST] c <|eot_id|> <think>d</think> <tool_call>e"

CONVERSATIONS = [
    {"name": "user", "messages": [user()]},
    {"name": "system", "messages": [system(), user()]},
    {"name": "no generation prompt", "messages": [system(), user()], "add_generation_prompt": False},
    {"name": "turns", "messages": [user(), assistant(), user("And of Spain?")]},
    {"name": "system and turns", "messages": [system(), user(), assistant(), user("And of Spain?"), assistant("Madrid."), user("Thanks!")]},
    {"name": "ends with assistant", "messages": [user(), assistant()], "add_generation_prompt": False},
    {"name": "two system messages", "messages": [system(), system("Answer in French."), user()]},
    {"name": "late system message", "messages": [user(), assistant(), system("Answer in French."), user("And of Spain?")]},
    {"name": "two users in a row", "messages": [user(), user("And of Spain?")]},
    {"name": "assistant first", "messages": [assistant("Hello, how can I help?"), user()]},
    {"name": "developer", "messages": [{"role": "developer", "content": "You are terse."}, user()]},
    {"name": "developer and tools", "messages": [{"role": "developer", "content": "You are terse."}, user()], "tools": [WEATHER]},
    {"name": "system and developer", "messages": [system(), {"role": "developer", "content": "You are terse."}, user()]},
    {"name": "names", "messages": [user("Hi.") | {"name": "anna"}, assistant("Hello.") | {"name": "bot"}, user("Bye.") | {"name": "ben"}]},
    {"name": "unknown keys", "messages": [user("Hi.") | {"metadata": {"a": 1}}, assistant("Hello.", refusal=None, annotations=[]), user("Bye.")]},
    {"name": "one part", "messages": [user(parts("What is this?"))]},
    {"name": "two parts", "messages": [user(parts("What is this?", "And that?"))]},
    {"name": "parts everywhere", "messages": [system(parts("Be brief.", "Be kind.")), user(parts("Hi.", "You.")), assistant(parts("Hello.", "Me.")), user("Bye.")]},
    {"name": "parts and tools", "messages": [user(parts("Weather?", "In Paris."))], "tools": [WEATHER]},
    {"name": "empty content", "messages": [system(""), user("")]},
    {"name": "spaces", "messages": [system("  You are careful.\n"), user("\n  Hi there. \n\n"), assistant("  Yes? \n"), user("  So. ")]},
    {"name": "unicode", "messages": [system("Antworte höflich. 你好 🦀"), user("Was heißt „Grüße“ auf 日本語? é\u0301\u200d"), assistant("ご挨拶 — naïve"), user("Спасибо 👩‍👩‍👧")]},
    {"name": "special tokens in text", "messages": [system(SPECIAL + "1"), user(SPECIAL + "2"), assistant("x" + SPECIAL), user("{{ messages }} {% if %}")]},
    {"name": "code", "messages": [user("```python\nprint('a' \"b\" \\n)\n```\n\ttab & <html>")]},
    {"name": "tools", "messages": [user("Weather in Paris?")], "tools": [WEATHER]},
    {"name": "tools and system", "messages": [system(), user("Weather in Paris?")], "tools": [WEATHER, SEARCH]},
    {"name": "empty tools", "messages": [system(), user()], "tools": []},
    {"name": "bare tool", "messages": [user("Ping?")], "tools": [BARE]},
    {"name": "nested tool", "messages": [user("Order 2 A.")], "tools": [NESTED, WEATHER]},
    {"name": "call and result", "messages": [user("Weather in Paris?"), called(), result()], "tools": [WEATHER]},
    {"name": "call, null content", "messages": [user("Weather in Paris?"), called(None), result()], "tools": [WEATHER]},
    {"name": "call and text", "messages": [user("Weather in Paris?"), called("Let me look."), result(), assistant("21 degrees."), user("Thanks!")], "tools": [WEATHER]},
    {"name": "call, no content key", "messages": [user("Weather in Paris?"), {"role": "assistant", "tool_calls": [call()]}, result()], "tools": [WEATHER]},
    {"name": "parallel calls", "messages": [user("Weather in Paris and Rome?"), called("", call(), call("get_weather", '{"city": "Rome", "days": 3}', 1)), result(), result("rain", 1)], "tools": [WEATHER]},
    {"name": "two rounds of calls", "messages": [system(), user("Weather?"), called(), result(), called("", call("web.search", RICH, 1)), result("found nothing", 1), assistant("Nothing."), user("Go on.")], "tools": [WEATHER, SEARCH]},
    {"name": "rich arguments", "messages": [user("Search."), called("", call("web.search", RICH)), result("ok")], "tools": [SEARCH]},
    {"name": "no arguments", "messages": [user("Ping?"), called("", call("ping", "{}")), result("pong")], "tools": [BARE]},
    {"name": "result parts", "messages": [user("Weather in Paris?"), called(), result(parts("sunny", "warm"))], "tools": [WEATHER]},
    {"name": "result with name", "messages": [user("Weather in Paris?"), called(), result("sunny", name="get_weather")], "tools": [WEATHER]},
    {"name": "calls without tools", "messages": [user("Weather in Paris?"), called(), result(), assistant("21 degrees."), user("Thanks!")]},
    {"name": "reasoning", "messages": [user(), assistant(reasoning_content="France, so Paris."), user("And of Spain?")]},
    {"name": "reasoning, other key", "messages": [user(), assistant(reasoning="France, so Paris."), user("And of Spain?")]},
    {"name": "reasoning and call", "messages": [user("Weather in Paris?"), called("", call(), reasoning_content="A tool helps."), result()], "tools": [WEATHER]},
    {"name": "think tags", "messages": [user(), assistant("<think>\nFrance.\n</think>\n\nParis."), user("And of Spain?")]},
    {"name": "thinking off", "messages": [user()], "chat_template_kwargs": {"enable_thinking": False, "thinking": False}},
    {"name": "thinking on", "messages": [system(), user()], "chat_template_kwargs": {"enable_thinking": True, "thinking": True}},
    {"name": "prefill", "messages": [user(), assistant("The capital is")], "continue_final_message": True, "add_generation_prompt": False},
    {"name": "prefill with spaces", "messages": [system(), user(), assistant("The capital is \n")], "continue_final_message": True, "add_generation_prompt": False},
    {"name": "documents", "messages": [user()], "documents": [{"title": "France", "text": "Its capital is Paris."}, {"title": "Spain", "text": "Madrid."}]},
    {"name": "long", "messages": [system()] + [turn for i in range(12) for turn in (user(f"Question {i}?"), assistant(f"Answer {i}."))] + [user("Last one?")]},
]
