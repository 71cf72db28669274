#!/usr/bin/env bash
# vLLM's own event classes decode Hadron's KV events and encode them to identical bytes. Tests at least 100,000 events.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/server.sh"
venv "$2" msgspec msgspec==0.22.0 "pyzmq>=26" "setuptools>=77" setuptools_scm
folder=$2/msgspec

# Only one file of vLLM's source archive is needed. pip downloads, verifies and unpacks the archive, then queries its metadata, which
# imports torch: our torch.py copies the file and stops there, so vLLM is not built.
if [ ! -s "$folder/kv_events.py" ]; then
    mkdir -p "$folder/taker"
    cat >"$folder/taker/torch.py" <<PY
import os, shutil
if os.path.exists("vllm/distributed/kv_events.py"):
    shutil.copy("vllm/distributed/kv_events.py", "$folder/kv_events.py")
    raise SystemExit("taken")
PY
    PYTHONPATH="$folder/taker" "$PYTHON" -m pip download --no-deps --no-binary vllm --no-build-isolation \
        --dest "$folder/taker" vllm==0.33.0 >"$folder/pip.log" 2>&1 || true
    [ -s "$folder/kv_events.py" ] || { tail -20 "$folder/pip.log"; exit 1; }
fi

"$PYTHON" "$here/msgspec_events.py" "$1" "$folder/kv_events.py"
