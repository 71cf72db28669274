#!/usr/bin/env bash
# Teacher-forced log-probabilities of a model with the shape of Qwen3-0.6B and synthetic weights, compared with the CPU's in f32
# (tests/data/logprobs/qwen3-0.6b.jsonl: four lines of random ids, 764 scored tokens). Fails if they differ by more than these tolerances:
#
#   float32    mean difference 0.002, the same most likely id at 99.5 %: only the order of sums differs
#   float16    mean difference 0.1, the same most likely id at 98 %: an eighth of bfloat16's rounding; an H200 is 0.068 and 99.1 % away
#   bfloat16   mean difference 0.65, the same most likely id at 93 %. The CPU in bfloat16, which rounds at the same places, is
#              0.543 and 94.6 % away: the logits of random weights spread over some hundred nats, and their maxima are close
#
# usage: logprobs.sh HADRON MODELS     MODELS contains a folder qwen3-0.6b (config.json and tokenizer, no weights)
# environment: DEVICE (cuda), KERNELS (kernel cache folder), REFERENCE (the file above)
set -euo pipefail
hadron=$1 models=$2
reference=${REFERENCE:-$(dirname "$0")/../../data/logprobs/qwen3-0.6b.jsonl}
url=http://127.0.0.1:8124
check() {
    local dtype=$1 delta=$2 top=$3
    XDG_CACHE_HOME=${KERNELS:-/tmp/hadron-kernels} "$hadron" serve "$models/qwen3-0.6b" --served-model-name m --load-format synth \
        --device "${DEVICE:-cuda}" --dtype "$dtype" --port "${url##*:}" --max-num-seqs 16 2>/dev/null &
    local server=$! status=0
    until curl -sf "$url/readyz" >/dev/null; do kill -0 $server; sleep 0.1; done
    echo "$dtype:"
    "$hadron" eval logprobs --base-url "$url" --data "$reference" --reference "$reference" --concurrency 4 \
        --mean-delta-max "$delta" --top-share-min "$top" --output /dev/null || status=$?
    kill -TERM $server
    wait $server || true
    return $status
}
check float32 0.002 0.995
check float16 0.1 0.98
check bfloat16 0.65 0.93
