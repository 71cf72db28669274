#!/usr/bin/env python3
"""Runs coding agents and agent frameworks, unmodified, against a server with the puppet model, and prints a table of the results.

    run.py [--binary PATH] [--folder PATH] [AGENT...]

Every agent gets a task, must call its tool once, and must return the model's answer to the result of the call. Programs are installed in FOLDER
(default target/agents) from npm and PyPI. The table that is printed is kept in results.md.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(HERE.parent / "clients"))

import puppet_model  # noqa: E402
from hadron_server import Server  # noqa: E402

TASK = "Run the command and report what it prints."
LIMIT_S = 180


class Agent:
    """One program: packages with pinned versions, and the command that runs it."""

    def __init__(self, name, packages, command, api, registry="npm", files=None, environment=None):
        self.name, self.packages, self.command, self.api = name, packages, command, api
        self.registry, self.files, self.environment = registry, files or {}, environment or {}

    def install(self, folder):
        """Installs the packages once, and returns the environment of the command."""
        done = folder / "packages.json"
        if not done.exists() or json.loads(done.read_text()) != self.packages:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            if self.registry == "npm":
                (folder / "package.json").write_text('{"type": "module"}')
                subprocess.run(["npm", "install", "--no-fund", "--no-audit", "--loglevel=error", *self.packages], cwd=folder, check=True)
            else:
                venv.create(folder / "venv", with_pip=True)
                subprocess.run([folder / "venv/bin/pip", "install", "--quiet", *self.packages], check=True)
            done.write_text(json.dumps(self.packages))
        return {"PATH": f"{folder}/node_modules/.bin:{folder}/venv/bin:{os.environ['PATH']}", "NODE_PATH": f"{folder}/node_modules"}

    def run(self, folder, server):
        """Runs the command in an empty folder; returns its output."""
        paths = self.install(folder)
        with tempfile.TemporaryDirectory() as home:
            values = {"url": server.url, "here": str(HERE), "home": home, "folder": str(folder), "task": TASK}
            for name, text in self.files.items():
                path = pathlib.Path(home, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(fill(text, values))
            environment = {"HOME": home, "TERM": "dumb", "LANG": "C.UTF-8", **paths}
            environment |= {name: fill(value, values) for name, value in self.environment.items()}
            command = [fill(word, values) for word in self.command]
            work = pathlib.Path(home, "work")
            work.mkdir()
            if self.command[0] == "node":
                shutil.copy(HERE / self.command[1], folder / self.command[1])
                command[1] = str(folder / self.command[1])
            return subprocess.run(
                command, cwd=work, env=environment, stdin=subprocess.DEVNULL, timeout=LIMIT_S, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip


def fill(text, values):
    for name, value in values.items():
        text = text.replace("{" + name + "}", value)
    return text


CODEX = ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-c", "model=puppet",
         "-c", "model_provider=hadron", "-c",
         'model_providers.hadron={name="hadron", base_url="{url}/v1", wire_api="responses"}', "{task}"]  # fmt: skip
OPENCODE = """{"$schema": "https://opencode.ai/config.json", "autoupdate": false, "model": "hadron/puppet", "permission": {"bash": "allow"},
"provider": {"hadron": {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": "{url}/v1", "apiKey": "none"}, "models": {"puppet": {}}}}}"""
OPENAI = {"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "none"}
ANTHROPIC = {"ANTHROPIC_BASE_URL": "{url}", "ANTHROPIC_API_KEY": "none"}
CLAUDE = {**ANTHROPIC, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1", "IS_SANDBOX": "1"}

AGENTS = [
    Agent("Claude Code", ["@anthropic-ai/claude-code@2.1.332"],
          ["claude", "-p", "{task}", "--allowedTools", "Bash", "--output-format", "json"], "/v1/messages", environment=CLAUDE),
    Agent("Codex CLI", ["@openai/codex@0.171.0"], CODEX, "/v1/responses", environment=OPENAI),
    Agent("opencode", ["opencode-ai@1.18.33"], ["opencode", "run", "--model", "hadron/puppet", "{task}"], "/v1/chat/completions",
          files={".config/opencode/opencode.json": OPENCODE}, environment=OPENAI),
    Agent("Vercel AI SDK", ["ai@7.0.173", "@ai-sdk/openai@4.0.118", "zod@4.6.7"], ["node", "vercel_ai.mjs"],
          "/v1/responses, /v1/chat/completions", environment=OPENAI),
    Agent("openai-agents", ["openai-agents==0.24.0", "openai==3.57.0"], ["python", "{here}/openai_agents.py"], "/v1/responses, /v1/chat/completions", "PyPI",
          environment={**OPENAI, "OPENAI_AGENTS_DISABLE_TRACING": "1"}),
    Agent("LangChain", ["langchain==1.5.2", "langchain-openai==1.7.4", "langchain-anthropic==1.7.10"], ["python", "{here}/langchain_agent.py"],
          "/v1/chat/completions, /v1/responses, /v1/messages", "PyPI", environment={**OPENAI, **ANTHROPIC}),
    Agent("Pydantic AI", ["pydantic-ai-slim[openai,anthropic]==2.68.0"], ["python", "{here}/pydantic_agent.py"],
          "/v1/chat/completions, /v1/responses, /v1/messages", "PyPI", environment={**OPENAI, **ANTHROPIC}),
]  # fmt: skip


def versions(agent, folder):
    if agent.registry == "npm":
        name = agent.packages[0].rsplit("@", 1)[0]
        return json.loads((folder / "node_modules" / name / "package.json").read_text())["version"]
    name = re.split(r"[\[=]", agent.packages[0])[0]
    code = f"import importlib.metadata as m; print(m.version({name!r}))"
    return subprocess.run([folder / "venv/bin/python", "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", type=pathlib.Path)
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "target/agents")
    parser.add_argument("agents", nargs="*")
    arguments = parser.parse_args()
    if arguments.binary:
        os.environ["HADRON"] = str(arguments.binary.resolve())
    folder = arguments.folder.resolve()
    puppet_model.write(folder / "puppet")
    flags = ["--tool-call-parser", "hermes", "--served-model-name", "puppet", "*"]
    print("| program | version | API | what was run | result | seconds |\n|---|---|---|---|---|---:|")
    failed = []
    with Server(str(folder / "puppet"), *flags) as server:
        for agent in AGENTS:
            name = agent.name.lower().replace(" ", "_")
            if arguments.agents and name not in arguments.agents:
                continue
            place, begun = folder / name, time.monotonic()
            try:
                finished = agent.run(place, server)
                passed = finished.returncode == 0 and puppet_model.FINAL in finished.stdout
                output = f"exit code {finished.returncode}\n{finished.stdout}"
            except (subprocess.SubprocessError, OSError) as error:
                passed, output = False, f"{error}\n{getattr(error, 'stdout', '')}"
            if not passed:
                failed.append(agent.name)
                print(output[-4000:], file=sys.stderr)
            result = "calls its tool, returns the answer" if passed else "FAILED"
            seconds = time.monotonic() - begun
            version = versions(agent, place) if (place / "packages.json").exists() else "?"
            command = " ".join(agent.command[:2]).replace("{here}/", "")
            print(f"| {agent.name} | {version} | `{agent.api.replace(', ', '`, `')}` | `{command}` | {result} | {seconds:.0f} |", flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
