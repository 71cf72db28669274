#!/usr/bin/env bash
# The openai SDK: models, unary requests, streams with usage, log-probabilities, structured output, tool calls, reasoning, and every error
# with its own class.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/server.sh"
venv "$2" openai_sdk openai==3.52.0
start_server "$1" "$2" --threads 1 --api-key sdk-key --max-num-queued-reqs 4 --shutdown-timeout 2s
"$PYTHON" "$here/openai_sdk.py"
wait "$SERVER"
