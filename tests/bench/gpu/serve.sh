#!/usr/bin/env bash
# Serves models with synthetic weights on this machine's GPU, sends them load over HTTP and writes one JSON line per concurrency level.
#
# usage: serve.sh HADRON MODELS OUT "LOAD COMMAND" MODEL...
#   HADRON        the binary
#   MODELS        folder of model folders (config.json and tokenizer, no weights)
#   OUT           folder for results and logs
#   LOAD COMMAND  prints the lines; called with --url, --model, --isl 1024 --osl 256 --rounds 2 --conc 1,64,256 --vocab
# environment: DEVICE (cuda), CONC (1,64,256), VOCAB (150000, prompt ids are below it), FLAGS (additional server flags), KERNELS (kernel
# cache folder)
set -euo pipefail
hadron=$1 models=$2 out=$3 load=$4
shift 4
port=8123
mkdir -p "$out"
for model in "$@"; do
    # shellcheck disable=SC2086
    XDG_CACHE_HOME=${KERNELS:-/tmp/hadron-kernels} "$hadron" serve "$models/$model" --served-model-name "$model" \
        --load-format synth --device "${DEVICE:-cuda}" --port $port --max-num-seqs 256 --no-enable-prefix-caching ${FLAGS:-} 2>"$out/$model.log" &
    server=$!
    started=$(date +%s%N)
    until curl -sf "http://127.0.0.1:$port/readyz" >/dev/null; do
        kill -0 $server 2>/dev/null || { echo "$model: the server ended"; tail -5 "$out/$model.log"; break; }
        sleep 0.05
    done
    kill -0 $server 2>/dev/null || continue
    echo "$model: ready after $((($(date +%s%N) - started) / 1000000)) ms"
    $load --url "http://127.0.0.1:$port" --model "$model" --isl 1024 --osl 256 --rounds 2 --conc "${CONC:-1,64,256}" \
        --vocab "${VOCAB:-150000}" | tee "$out/$model.jsonl"
    kill -TERM $server
    wait $server || true
done
