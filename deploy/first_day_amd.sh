#!/usr/bin/env bash
# Checks and measures Hadron on a machine with AMD GPUs, and writes one report: OUT/report.md, with a log per step.
#
#   first_day_amd.sh OUT                       everything, in the release build; takes hours
#   first_day_amd.sh OUT --emulator LIBRARY    tries this script without a GPU: LIBRARY is libhipemu.so (`cargo test -p kernels --test
#                                              emulator` builds it below target/tmp/hipemu). Checks a small part in the debug build.
#
# Steps: doctor, conformance of kernels and collectives, goldens, accuracy of the demo model, the speed table, hardware counters. The
# report says what was not run and why. Exit status: 0 if no step failed. Environment: SPEED_MODELS and SPEED_LEVELS, as --models and
# --levels of tests/bench/speed/turns.py.
set -uo pipefail
shopt -s inherit_errexit

usage() { sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 2; }
[ $# -ge 1 ] || usage
out=$(realpath -m "$1") emulator=
shift
case ${1:-} in
'') ;;
--emulator) [ $# -eq 2 ] && emulator=$(realpath "$2") || usage ;;
*) usage ;;
esac
cd "$(dirname "$0")/.."
mkdir -p "$out"
if [ -n "$emulator" ]; then
    profile=debug cargo_profile=() device=(--device rocm --device-libraries "$emulator,,,64") slow=(--step-deadline 3600)
else
    profile=release cargo_profile=(--release) device=(--device rocm) slow=()
    export HADRON_GPU=rocm
fi
hadron=target/$profile/hadron
rows=() failed=0 server=

# row NAME RESULT: adds a line to the table of the report.
row() {
    rows+=("| $1 | $2 |")
    echo "$1: $2"
}

# step NAME COMMAND...: runs a command, whose output goes to OUT/NAME.log, and adds its result.
step() {
    local name=$1 begun=$SECONDS code=0
    shift
    "$@" >"$out/$name.log" 2>&1 || code=$?
    if [ $code = 0 ]; then
        row "$name" "passed, $((SECONDS - begun)) s"
    else
        row "$name" "**failed** with status $code after $((SECONDS - begun)) s: \`$name.log\`"
        failed=1
    fi
    return $code
}

skip() { row "$1" "not run: $2"; }

gpu_count() { python3 -c 'import json, sys; print(len(json.load(open(sys.argv[1]))["gpus"][0]["devices"]))' "$out/doctor.json" 2>/dev/null || echo 0; }

# Serves the demo model, and scores it. Arguments: questions, least share of right answers.
accuracy() {
    local questions=$out/questions.jsonl url=
    head -n "$1" tests/data/demo/questions.jsonl >"$questions"
    "$hadron" serve --port 0 "${device[@]}" "${slow[@]}" --kv-cache-memory-bytes 64MiB --max-num-seqs 8 --max-num-batched-tokens 256 \
        >"$out/server.log" 2>&1 &
    server=$!
    until url=$(grep -o -m 1 ' serves .*http://[0-9.:]*' "$out/server.log" | grep -o 'http://.*'); do
        kill -0 "$server" || { cat "$out/server.log"; return 1; }
        sleep 0.2
    done
    local code=0
    "$hadron" eval tasks --base-url "$url" --data "$questions" --concurrency 4 --min-score "$2" || code=$?
    kill -TERM "$server" && wait "$server"
    server=
    return $code
}
trap '[ -z "$server" ] || kill "$server"' EXIT

# Speed of one build, in the table of `just speed`; the ratio of the two columns is the noise of this machine, except for the rows `ready`: the first
# column fills the kernel cache of the second.
speed() {
    HADRON_ONLY=1 tests/bench/speed/build.sh . target/speed/first-day &&
        tests/bench/speed/turns.py gpu target/speed/first-day target/speed/first-day --device rocm --rounds 1 --within 100 \
            --models "${SPEED_MODELS:-qwen3-0.6b,qwen3-8b,qwen3-8b-fp8,qwen3-30b-a3b}" --levels "${SPEED_LEVELS:-1,64,256}" --out "$out"
}

doctor() {
    "$hadron" doctor "${device[@]}" --json >"$out/doctor.json"
    "$hadron" doctor "${device[@]}"
}

whole() {
    step conformance cargo test --release -p kernels --test gpu -- --include-ignored --nocapture --test-threads 1 ||
        step conformance-serialized env AMD_SERIALIZE_KERNEL=3 \
            cargo test --release -p kernels --test gpu -- --include-ignored --nocapture --test-threads 1
    local gpus
    gpus=$(gpu_count)
    if [ "$gpus" -ge 2 ]; then
        step collectives cargo test --release -p collectives --test devices -- --include-ignored --nocapture --test-threads 1
    else
        skip collectives "they need two GPUs, doctor found $gpus"
    fi
    step goldens env HADRON_GPU_RANKS="$gpus" cargo test --release --test golden -- --nocapture --test-threads 1
    step accuracy accuracy 500 0.95
    step ops "$hadron" bench ops --device rocm --output "$out/ops.json"
    step speed speed
    if command -v rocprofv3 >/dev/null; then
        step counters tests/bench/gpu/counters.py "$hadron" bench ops --device rocm --repeats 1
    else
        skip counters "rocprofv3 is not installed"
    fi
}

reduced() {
    step conformance cargo test -p kernels --test gpu -- norm:: elementwise:: blas_library:: cards::
    step collectives cargo test -p collectives --test devices -- one_shot::
    skip goldens "they need a GPU"
    step accuracy accuracy 1 0
    step ops "$hadron" bench ops "${device[@]}" --only o_proj --tokens 1 --context 8 --repeats 1 --output "$out/ops.json"
    skip speed "times of an emulator say nothing about a GPU"
    # Counts of the emulator of machine code; rocprofv3 needs a GPU.
    if command -v clang-22 >/dev/null; then
        rm -f "$out/counters.tsv"
        step counters env HIPEMU_ISA=gfx942 HIPEMU_COUNTERS="$out/counters.tsv" HADRON_KERNEL_WAVES=64 \
            cargo test -p kernels --test gpu -- norm::
        cat "$out/counters.tsv" >>"$out/counters.log"
    else
        skip counters "clang-22 is not installed"
    fi
}

if step build cargo build "${cargo_profile[@]}" --bin hadron && step doctor doctor; then
    if [ -n "$emulator" ]; then reduced; else whole; fi
else
    skip "all other steps" "the build failed, or the machine cannot serve"
fi

{
    echo "# First day on AMD GPUs"
    echo
    [ -z "$emulator" ] || printf '**Tried on the emulator: this report says nothing about a GPU.**\n\n'
    echo "$(date -u +%F), commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown), $profile build"
    printf '\n| step | result |\n|---|---|\n'
    printf '%s\n' "${rows[@]}"
    for name in doctor accuracy ops speed counters; do
        [ -s "$out/$name.log" ] || continue
        printf '\n## %s\n\n```\n' "$name"
        tail -n 200 "$out/$name.log"
        echo '```'
    done
} >"$out/report.md"
echo "$out/report.md"
exit $failed
