#!/usr/bin/env bash
# Checks and measures Hadron on a machine with AMD GPUs, and writes one report: OUT/report.md, with a log per step.
#
#   first_day_amd.sh OUT                       everything, in the release build; takes hours
#   first_day_amd.sh OUT --emulator LIBRARY    tries this script without a GPU: the same steps in the debug build, with smaller arguments, on
#                                              the emulated HIP runtime LIBRARY (libhipemu.so); `just first-day-emulated`
#
# Steps: doctor, conformance of kernels and collectives, goldens, accuracy of the demo model, ops, the speed table, hardware counters. The
# report says what was not run and why, and lists failed tests. Exit status: 0 if no step failed. Environment: SPEED_MODELS and
# SPEED_LEVELS, as --models and --levels of tests/bench/speed/turns.py.
set -uo pipefail
shopt -s inherit_errexit

usage() { sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 2; }
[ $# -ge 1 ] || usage
out=$(realpath -m "$1") emulator=
shift
case ${1:-} in
'') ;;
--emulator) [ $# -eq 2 ] && emulator=$(realpath -e "$2") || usage ;;
*) usage ;;
esac
cd "$(dirname "$0")/.."
mkdir -p "$out"
rm -f "$out"/*.log
: >"$out/steps.tsv"

# Arguments of the steps on a GPU. An empty filter selects all tests.
profile=release cargo_profile=(--release)
conformance=() collectives=() goldens=()
questions=500 min_score=0.95 serve=() ops=() counted=(--repeats 1)
speed=(--within 100 --models "${SPEED_MODELS:-qwen3-0.6b,qwen3-8b,qwen3-8b-fp8,qwen3-30b-a3b}" --levels "${SPEED_LEVELS:-1,64,256}")
export HADRON_GPU=rocm

# Replaces the arguments by smaller ones, and ROCm by the emulated runtime, which the dynamic loader finds under the names of ROCm 7.
emulate() {
    profile=debug cargo_profile=()
    conformance=(norm:: linear::linear_agrees) collectives=(all_reduce_matches one_shot::) goldens=(qwen3_tied::matches)
    questions=1 min_score=0 serve=(--step-deadline 3600) ops=(--only o_proj --tokens 1 --context 8 --repeats 1) counted=("${ops[@]}")
    speed=(--within 1000 --shapes tests/data --models demo --files demo --levels 1,2 --input-len 8 --output-len 2 --prompts 2 --max-num-seqs 2
        --serve "${serve[*]} --max-num-batched-tokens 16")
    mkdir -p "$out/rocm"
    local name
    for name in libamdhip64.so.7 libhiprtc.so.7 librccl.so.1; do ln -sf "$emulator" "$out/rocm/$name"; done
    export LD_LIBRARY_PATH="$out/rocm${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" XDG_CACHE_HOME="$out/cache"
    export HIPEMU_CARD=MI300X HIPEMU_DEVICES=2 HIPEMU_MEMORY=1G
    # A stand-in for rocprofv3, which needs a GPU.
    PATH="$PWD/tests/bench/gpu/rocprofv3:$PATH"
}
if [ -n "$emulator" ]; then
    ! compgen -G '/opt/rocm*' >/dev/null || { echo "this machine has ROCm, which would be used instead of the emulator"; exit 2; }
    emulate
fi
hadron=target/$profile/hadron
failed=0 server=
commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
[ -z "$(git status --porcelain 2>/dev/null)" ] || commit+=" with changes"

# row NAME RESULT: adds a line to the table of the report.
row() {
    printf '%s\t%s\n' "$1" "$2" >>"$out/steps.tsv"
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

# Runs a test target of a package with filters of test names.
suite() {
    local package=$1 target=$2
    shift 2
    cargo test "${cargo_profile[@]}" -p "$package" --test "$target" -- --include-ignored --nocapture --test-threads 1 "$@"
}

serialized() { AMD_SERIALIZE_KERNEL=3 suite "$@"; }

golden() { HADRON_GPU_RANKS=$(gpu_count) cargo test "${cargo_profile[@]}" --test golden -- --nocapture --test-threads 1 "${goldens[@]}"; }

# Serves the demo model, and scores it with the shortest questions.
accuracy() {
    local asked=$out/questions.jsonl url=
    awk '{ print length, $0 }' tests/data/demo/questions.jsonl | sort -n | cut -d ' ' -f 2- | sed -n "1,${questions}p" >"$asked"
    : >"$out/server.log"
    "$hadron" serve --port 0 --device rocm "${serve[@]}" --kv-cache-memory-bytes 64MiB --max-num-seqs 8 --max-num-batched-tokens 256 \
        >"$out/server.log" 2>&1 &
    server=$!
    until url=$(grep -o -m 1 ' serves .*http://[0-9.:]*' "$out/server.log" | grep -o 'http://.*'); do
        kill -0 "$server" || { cat "$out/server.log"; return 1; }
        sleep 0.2
    done
    local code=0
    "$hadron" eval tasks --base-url "$url" --data "$asked" --concurrency 4 --min-score "$min_score" || code=$?
    kill -TERM "$server" && wait "$server"
    server=
    return $code
}
trap '[ -z "$server" ] || kill "$server"' EXIT

# Speed of one build, in the table of `just speed`; the ratio of the two columns is the noise of this machine, except for the rows `ready`: the first
# column fills the kernel cache of the second.
speed() {
    local build=$out/build
    mkdir -p "$build"
    cp "$hadron" "$build/hadron"
    printf '{"commit": "%s", "profile": "%s"}\n' "$commit" "$profile" >"$build/about.json"
    tests/bench/speed/turns.py gpu "$build" "$build" --device rocm --rounds 1 --out "$out" "${speed[@]}"
}

doctor() {
    "$hadron" doctor --device rocm --json >"$out/doctor.json"
    "$hadron" doctor --device rocm
}

steps() {
    step conformance suite kernels gpu "${conformance[@]}" || step conformance-serialized serialized kernels gpu "${conformance[@]}"
    local gpus
    gpus=$(gpu_count)
    if [ "$gpus" -ge 2 ]; then
        step collectives suite collectives devices "${collectives[@]}"
    else
        skip collectives "they need two GPUs, doctor found $gpus"
    fi
    step goldens golden
    step accuracy accuracy
    step ops "$hadron" bench ops --device rocm --output "$out/ops.json" "${ops[@]}"
    step speed speed
    if command -v rocprofv3 >/dev/null; then
        step counters tests/bench/gpu/counters.py "$hadron" bench ops --device rocm "${counted[@]}"
    else
        skip counters "rocprofv3 is not installed"
    fi
}

if step build cargo build "${cargo_profile[@]}" --bin hadron && step doctor doctor; then
    steps
else
    skip "all other steps" "the build failed, or the machine cannot serve"
fi
row total "$SECONDS s"

about=("$(date -u +%F), commit $commit, $profile build")
[ -z "$emulator" ] || about=("**Tried on the emulated HIP runtime, with small arguments: this report says nothing about a GPU. Hardware counters are invented.**" "${about[@]}")
deploy/first_day_report.py "$out" "${about[@]}" >"$out/report.md"
echo "$out/report.md"
exit $failed
