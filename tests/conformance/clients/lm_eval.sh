#!/usr/bin/env bash
# lm_eval with a local task over the demo model: its generations and log-probabilities equal those of `hadron eval logprobs` for the same
# ids.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/server.sh"
# Neither package needs torch here.
venv "$2" lm_eval "lm_eval[api]==0.4.13" transformers==5.23.0
start_server "$1" "$2" --threads 1
HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false \
    "$PYTHON" "$here/lm_eval_run.py" "$1" "$(cd "$here/../../data/demo" && pwd)" "$2"
