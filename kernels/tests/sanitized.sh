#!/usr/bin/env bash
# Runs the `gpu` tests of the kernels on the emulator, with kernels compiled for AddressSanitizer and
# UndefinedBehaviorSanitizer, then for ThreadSanitizer. Only kernels are instrumented, not the rest of the process.
#
#   sanitized.sh --turn N [TEST...]     for each sanitizer one kernel variant and a sixth of the test files, selected by N
#   sanitized.sh --all [TEST...]        every variant and every test file under both sanitizers
#
# Variants: wavefronts of 64 lanes with the branches of gfx942, wavefronts of 64 lanes with the branches of gfx950,
# warps of 32 lanes. Eighteen consecutive values of N cover each variant and each file under both sanitizers. TEST: arguments
# of the test binary, such as test names or --skip.
set -euo pipefail
shopt -s inherit_errexit
cd "$(dirname "$0")/../.."

case ${1:-} in
--turn) turn=$2 turns=1; shift 2 ;;
--all) turn=0 turns=18; shift ;;
*) sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
variants=("64 942" "64 950" "32 0")
host=$(rustc -vV | sed -n 's/^host: //p' | tr 'a-z-' 'A-Z_')
export RUNNER=CARGO_TARGET_${host}_RUNNER

# A bug hidden by one order of wavefronts appears in another one: random orders under AddressSanitizer, first wavefront
# first under ThreadSanitizer.
run() {
    local kind=$1 library=$2 seed=$3 waves=$4 gfx=$5
    shift 5
    env "$RUNNER=env LD_PRELOAD=$(c++ -print-file-name="$library")" \
        HIPEMU_SANITIZE="$kind" HIPEMU_SEED="$seed" HIPEMU_GFX="$gfx" HADRON_KERNEL_WAVES="$waves" \
        ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
        TSAN_OPTIONS=halt_on_error=1:ignore_noninstrumented_modules=1 \
        cargo test -q --test gpu -- "$@"
}
export -f run

# Prints the names of the tests in every sixth test file, one file per line: sixth OFFSET ARGUMENT... Not listed: tests of
# errors, and tests of the harness's child processes, which would have the sanitizer's library preloaded.
sixth() {
    local offset=$1
    shift
    local tests files
    tests=$(cargo test -q --test gpu -- --list --format terse --skip errors:: --skip watchdog_tests:: --skip cards:: "$@" | sed -n 's/: test$//p')
    # The slowest files first.
    files=$(printf '%s\n' mla_prefill sample mla kv_fp8 linear moe $(sed 's/::.*//' <<<"$tests") | awk '!seen[$0]++' | awk -v offset="$offset" 'NR % 6 == offset')
    for file in $files; do
        grep "^$file::" <<<"$tests" | paste -sd ' ' - || true
    done | sed '/^$/d'
}

# ThreadSanitizer is fastest with few tests per process: two processes, each with the tests of one file at a time.
# Skipped: tests with thousands of equal launches or blocks, which take minutes and find no further races.
threads() {
    local offset=$1 variant=$2
    shift 2
    sixth "$offset" --skip frequencies_follow_the_softmax --skip any_number_of_tokens "$@" |
        variant=$variant xargs -P 2 -d '\n' -I {} bash -c 'run thread libtsan.so 0 $variant --test-threads=1 --exact {}'
}

for ((i = turn; i < turn + turns; i++)); do
    offset=$((i / 3 % 6)) variant=${variants[i % 3]}
    echo "AddressSanitizer: $variant, sixth $offset"
    names=$(sixth $offset "$@")
    # shellcheck disable=SC2086
    [ -z "$names" ] || run address libasan.so $((3 + 4 * (i % 16))) $variant --test-threads=2 --exact $names
    variant=${variants[(i + 1) % 3]}
    echo "ThreadSanitizer: $variant, sixth $offset"
    threads $offset "$variant" "$@"
done
