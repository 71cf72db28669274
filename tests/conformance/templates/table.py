#!/usr/bin/env python3
"""Compares prompts with those of transformers: public chat templates x conversations; writes a table.

    table.py [BINARY [FOLDER [DIFFERENCES]]]

Each template is sent to a server of this tree in `chat_template` of /tokenize; /detokenize returns the prompt. transformers'
`apply_chat_template` renders the same conversation, in every form of forms.py until one is equal. BINARY is a built `hadron`
(default target/debug/hadron); packages and the virtual environment are in FOLDER (default target/clients). DIFFERENCES is a file
for all differences. The table goes to tests/conformance/templates/results/table.md.
"""

import collections
import concurrent.futures
import difflib
import json
import os
import pathlib
import re
import subprocess
import sys
import urllib.error
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "clients"))

import sdk_venv  # noqa: E402

PACKAGES = ("transformers==5.23.0", "jinja2==3.1.6")
OUTCOMES = {
    "equal": "equal to the prompt of the conversation as sent (arguments of tool calls as objects)",
    "equal, other form": "equal to the prompt of another form of the conversation",
    "both fail": "transformers fails in every form; 400",
    "400, text missing": "400; the prompt of transformers lacks the text of a message",
    "400": "400; transformers renders all texts",
    "transformers fails": "transformers fails in every form; rendered",
    "different": "different from the prompts of all forms",
}

# The server's error for a message that a template leaves out (text/src/error.rs).
LEFT_OUT_ROLE = r"leaves out messages of role (\w+):"


class Transformers:
    """Renders with `apply_chat_template` and the tokenizer of the demo model."""

    def __init__(self, root):
        import transformers
        self.version = transformers.__version__
        self.tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(root / "tests" / "data" / "demo")

    def prompts(self, source, conversation):
        """Yields (form, prompt, error) of each form."""
        import forms
        extra = dict(conversation.get("chat_template_kwargs", {}))
        for name, messages in forms.forms(conversation["messages"]):
            try:
                yield name, without_time(self.tokenizer.apply_chat_template(
                    messages, chat_template=source, tokenize=False, tools=conversation.get("tools"),
                    documents=conversation.get("documents"),
                    add_generation_prompt=conversation.get("add_generation_prompt", True),
                    continue_final_message=conversation.get("continue_final_message", False), **extra)), None
            except Exception as error:  # Templates fail in many ways; each is an outcome.
                yield name, None, f"{type(error).__name__}: {error}"


def without_time(prompt):
    """The prompt without the time of day, which some templates print."""
    return re.sub(r"\d\d:\d\d:\d\d", "00:00:00", prompt)


def post(url, path, body):
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return 200, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def hadron_prompt(url, source, conversation):
    """Returns (prompt, error message)."""
    body = {key: value for key, value in conversation.items() if key != "name"}
    while True:
        status, reply = post(url, "/tokenize", {**body, "chat_template": source, "add_special_tokens": False})
        if status != 429:
            break
    if status != 200:
        assert status == 400, (status, reply)
        return None, reply["error"]["message"]
    status, reply = post(url, "/detokenize", {"tokens": reply["tokens"]})
    assert status == 200, reply
    return without_time(reply["prompt"]), None


def outcome(conversation, prompts, prompt):
    """Returns (outcome, form, the prompt of transformers to compare with)."""
    import forms
    rendered = [(form, text) for form, text, _ in prompts if text is not None]
    equal = next((form for form, text in rendered if text == prompt), None)
    if equal is not None:
        return ("equal, other form" if equal else "equal"), equal, prompt
    if not rendered:
        return ("both fail" if prompt is None else "transformers fails"), "", None
    complete = [pair for pair in rendered if all(text in pair[1] for text in forms.texts(conversation["messages"]))]
    if prompt is None:
        return ("400" if complete else "400, text missing"), "", rendered[0][1]
    return "different", "", (complete or rendered)[0][1]


def compare(url, sources, conversations, transformers, differences):
    """Returns the outcomes {template: Counter}, a Counter of the forms, and the left-out roles {template: Counter}."""
    table, forms, roles = {}, collections.Counter(), {}
    pairs = [(name, conversation) for name in sources for conversation in conversations]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        answers = pool.map(lambda pair: hadron_prompt(url, sources[pair[0]], pair[1]), pairs)
        for (name, conversation), (prompt, error) in zip(pairs, answers):
            prompts = []
            for form in transformers.prompts(sources[name], conversation):
                prompts.append(form)
                if prompt is not None and form[1] == prompt:
                    break
            kind, form, expected = outcome(conversation, prompts, prompt)
            table.setdefault(name, collections.Counter())[kind] += 1
            forms[form] += kind == "equal, other form"
            if kind == "400, text missing":
                roles.setdefault(name, collections.Counter())[left_out_role(error)] += 1
            if kind not in ("equal", "equal, other form", "both fail"):
                why = next((e for _, _, e in prompts if e), "")
                differences.append(difference(name, conversation["name"], kind, expected or "", prompt, error or why))
    return table, forms, roles


def left_out_role(error):
    """The role that the server names in its error message."""
    found = re.search(LEFT_OUT_ROLE, error)
    assert found, error
    return found[1]


def difference(template, conversation, kind, expected, prompt, error):
    """A block that describes one difference."""
    lines = [f"## {template} | {conversation} | {kind}", "" if error is None else error]
    if prompt is not None:
        # Only the surroundings of the first differences: prompts may be long.
        diff = difflib.unified_diff(expected.splitlines(True), prompt.splitlines(True), "transformers", "hadron", n=1)
        lines += ["```diff", *[line.rstrip("\n")[:300] for line in diff][:20], "```"]
    return "\n".join(lines)


def role_lines(roles):
    """The table of the templates that leave out messages: templates x roles."""
    columns = sorted({role for counts in roles.values() for role in counts})
    return [
        "## Roles that templates leave out", "",
        "Prompts that are 400 although transformers renders the conversation: the template omits the text of the first message with this"
        " role, without an error.", "",
        "| template | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns),
        *[f"| {name} | " + " | ".join(str(counts[role]) for role in columns) + " |" for name, counts in roles.items()], ""]


def page(table, forms, roles, conversations, transformers, sources):
    """The committed page."""
    total = sum(table.values(), collections.Counter())
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=True).stdout.strip()
    good = total["equal"] + total["equal, other form"]
    lines = [
        "# Prompts compared with transformers", "",
        f"TL;DR: {len(table)} public templates x {len(conversations)} conversations: {good:,} of {total.total():,} prompts are equal,"
        f" {total['different']:,} differ.", "",
        f"- Command: `just template-table`; {', '.join(sources)}, transformers {transformers.version}; the commit after {revision}.",
        "- The templates are downloaded by the command and are not part of this repository.", "",
        "| outcome | prompts |", "|---|---:|",
        *[f"| {text} | {total[kind]:,} |" for kind, text in OUTCOMES.items()], "",
        "## Other forms", "",
        "Forms of the conversations whose prompt is equal, where the prompt of the conversation as sent is not.", "",
        "| form | prompts |", "|---|---:|",
        *[f"| {form} | {count:,} |" for form, count in forms.most_common() if form and count], "",
        *role_lines(roles),
        "## Templates", "",
        "| template | " + " | ".join(OUTCOMES) + " |", "|---|" + "---:|" * len(OUTCOMES),
        *[f"| {name} | " + " | ".join(str(counts[kind]) for kind in OUTCOMES) + " |" for name, counts in table.items()], ""]
    return "\n".join(lines)


def main():
    sdk_venv.enter(*PACKAGES)
    sys.path.insert(0, str(HERE))
    import conversations
    import hadron_server
    import sources
    root = HERE.parents[2]
    if len(sys.argv) > 1:
        os.environ["HADRON"] = str(pathlib.Path(sys.argv[1]).resolve())
    folder = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else root / "target" / "clients"
    found = sources.templates(folder / "templates")
    transformers = Transformers(root)
    differences = []
    with hadron_server.Server("--trust-request-chat-template") as server:
        table, forms, roles = compare(server.url, found, conversations.CONVERSATIONS, transformers, differences)
    results = HERE / "results" / "table.md"
    results.parent.mkdir(exist_ok=True)
    results.write_text(page(table, forms, roles, conversations.CONVERSATIONS, transformers, sources.PACKAGES))
    if len(sys.argv) > 3:
        pathlib.Path(sys.argv[3]).write_text("\n\n".join(differences) + "\n")
    print(results.read_text().split("## Templates")[0])


main()
