#!/usr/bin/env bash
# Serves models with random weights on this machine's GPU with Hadron, vLLM and Hadron in turn, sends each the same load over HTTP and
# writes one JSON line per concurrency level, with the names of the server and the model and the number of the round.
#
# usage: serve_vllm.sh HADRON MODELS OUT "LOAD COMMAND" MODEL...
#   arguments: see serve.sh; Hadron takes one round before and one after vLLM, and vLLM takes two after one start
# environment: VLLM (command that starts vLLM's command line: `vllm`), CONC (1,64,256)
set -euo pipefail
hadron=$1 models=$2 out=$3 load=$4
shift 4
port=8123
mkdir -p "$out"

ready() { # PATH PROCESS
    until curl -sf "http://127.0.0.1:$port$1" >/dev/null; do
        kill -0 "$2" 2>/dev/null || { echo "the server ended; its log is in $out"; exit 1; }
        sleep 0.2
    done
}
measure() { # SERVER MODEL ROUND
    $load --url "http://127.0.0.1:$port" --model "$2" --isl 1024 --osl 256 --rounds 2 --conc "${CONC:-1,64,256}" --vocab 150000 |
        sed "s/^{/{\"server\": \"$1\", \"model\": \"$2\", \"round\": $3, /" | tee -a "$out/serve_vllm.jsonl"
}
serve_hadron() { # MODEL ROUND
    "$hadron" serve "$models/$1" --served-model-name "$1" --load-format synth --device cuda --port $port --max-num-seqs 256 \
        --no-enable-prefix-caching 2>"$out/hadron_$1_$2.log" &
    server=$!
    ready /readyz $server
    measure hadron "$1" "$2"
    kill -TERM $server
    wait $server || true
}
serve_vllm() { # MODEL
    # shellcheck disable=SC2086
    VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0 ${VLLM:-vllm} serve "$models/$1" --served-model-name "$1" \
        --load-format dummy --dtype bfloat16 --port $port --max-num-seqs 256 --no-enable-prefix-caching >"$out/vllm_$1.log" 2>&1 &
    server=$!
    ready /health $server
    measure vllm "$1" 1
    measure vllm "$1" 2
    kill -INT $server
    wait $server || true
}
for model in "$@"; do
    serve_hadron "$model" 1
    serve_vllm "$model"
    serve_hadron "$model" 2
done
