"""The forms in which transformers can be given one conversation of OpenAI's API.

Templates disagree about the form of messages: arguments of tool calls as an object or as text, content as a string or as parts,
missing content as null or as an empty string, instructions under the role developer or system, reasoning under one of three keys.
A user of transformers prepares the form that a template takes; the server has to find it.
"""

import copy
import itertools
import json

KEYS = ("reasoning_content", "reasoning", "thinking")


def object_arguments(messages):
    for message in messages:
        for one in message.get("tool_calls") or []:
            one["function"]["arguments"] = json.loads(one["function"]["arguments"])


def parts_content(messages):
    for message in messages:
        if isinstance(message.get("content"), str):
            message["content"] = [{"type": "text", "text": message["content"]}]


def text_content(messages):
    for message in messages:
        if isinstance(message.get("content"), list):
            message["content"] = "\n".join(part["text"] for part in message["content"])


def mixed_content(roles):
    """Joins the parts of the messages of `roles` only."""
    return lambda messages: text_content([message for message in messages if message["role"] in roles])


def empty_content(messages):
    for message in messages:
        if message.get("content") is None:
            message["content"] = ""


def system_role(messages):
    for message in messages:
        if message["role"] == "developer":
            message["role"] = "system"


def reasoning_key(key):
    def rename(messages):
        for at, message in enumerate(messages):
            messages[at] = {key if name in KEYS else name: value for name, value in message.items()}
    return rename


def forms(messages):
    """Yields (name, messages) for each form; first the one that transformers documents: as sent, with arguments as objects."""
    def any_message(test):
        return any(test(message) for message in messages)

    calls = any_message(lambda m: m.get("tool_calls"))
    lists = any_message(lambda m: isinstance(m.get("content"), list))
    dimensions = [[("", object_arguments), ("arguments as text", None)] if calls else [("", None)]]
    content = [("", None), ("content as parts", parts_content)]
    if lists:
        roles = sorted({m["role"] for m in messages if isinstance(m.get("content"), list)})
        subsets = (subset for count in range(1, len(roles)) for subset in itertools.combinations(roles, count))
        content += [("content as a string", text_content)]
        content += [(f"content of {' and '.join(subset)} as a string", mixed_content(subset)) for subset in subsets]
    dimensions.append(content)
    if any_message(lambda m: m.get("content") is None):
        dimensions.append([("", None), ("empty content", empty_content)])
    if any_message(lambda m: m["role"] == "developer"):
        dimensions.append([("", None), ("developer as system", system_role)])
    if any_message(lambda m: any(key in m for key in KEYS)):
        dimensions.append([("", None)] + [(f"reasoning as {key}", reasoning_key(key)) for key in KEYS])
    for choice in itertools.product(*dimensions):
        converted = copy.deepcopy(messages)
        for _, change in sorted(choice, key=lambda pair: pair[1] is parts_content):  # parts last: empty content is a string
            if change:
                change(converted)
        yield ", ".join(name for name, _ in choice if name), converted


def texts(messages):
    """The texts of all messages, which a prompt should contain."""
    for message in messages:
        content = message.get("content") or ""
        for text in [content] if isinstance(content, str) else [part["text"] for part in content]:
            if text.strip():
                yield text.strip()
