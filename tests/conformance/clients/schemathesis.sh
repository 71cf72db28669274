#!/usr/bin/env bash
# schemathesis over /openapi.json: no 5xx status, and no reply that the document does not describe. CASES (default 10,000) is the minimum
# number of cases.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/server.sh"
venv "$2" schemathesis schemathesis==4.32.5
start_server "$1" "$2" --threads 1 --admin-key admin --max-model-len 256
"$PYTHON" "$here/schemathesis_run.py" "$(dirname "$PYTHON")/st" "${CASES:-10000}" "$2"
