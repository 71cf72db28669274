#!/usr/bin/env bash
# The conformance tests of the kernels on the emulator, with kernels compiled for AddressSanitizer and UndefinedBehaviorSanitizer, then
# for ThreadSanitizer. Only kernels are compiled for them; the rest of the process is not watched.
#
#   sanitized.sh --turn N [TEST...]     for each sanitizer one variant of the kernels and half of the files, chosen by N
#   sanitized.sh --all [TEST...]        every variant under both, every file
#
# Variants: wavefronts of 64 lanes with the branches of gfx942, the same with those of gfx950, warps of 32 lanes. Every six
# consecutive turns take each variant and each file under both sanitizers. TEST: arguments of the test binary, such as names of tests or --skip.
set -euo pipefail
shopt -s inherit_errexit
cd "$(dirname "$0")/../.."

case ${1:-} in
--turn) turn=$2 turns=1; shift 2 ;;
--all) turn=0 turns=6; shift ;;
*) sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
variants=("64 942" "64 950" "32 0")
host=$(rustc -vV | sed -n 's/^host: //p' | tr 'a-z-' 'A-Z_')
export RUNNER=CARGO_TARGET_${host}_RUNNER

# A fault that one order of wavefronts hides shows in another: random orders under AddressSanitizer, the first wavefront ahead under ThreadSanitizer.
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

# Names of the tests in every second file, from the first or the second on: half OFFSET ARGUMENT...
half() {
    local offset=$1
    shift
    local tests files
    tests=$(cargo test -q --test gpu -- --list --format terse --skip errors:: "$@" | sed -n 's/: test$//p')
    # The longest files first.
    files=$(printf '%s\n' mla_prefill sample mla kv_fp8 linear moe $(sed 's/::.*//' <<<"$tests") | awk '!seen[$0]++' | awk -v offset="$offset" 'NR % 2 == offset')
    for file in $files; do
        grep "^$file::" <<<"$tests" | paste -sd ' ' - || true
    done | sed '/^$/d'
}

# ThreadSanitizer is quickest in a process that tests one thing: two processes, each with the tests of one file at a time.
# Thousands of equal launches, or blocks, show no race that a few do not, and ThreadSanitizer takes minutes for them.
# A lone row's attention fetches the tile of the newest token while that token's slot is written: the bytes it gets of
# this slot are never used (`complete_tile` puts the token over them), but they are a race by the letter.
threads() {
    local offset=$1 variant=$2
    shift 2
    half "$offset" --skip frequencies_follow_the_softmax --skip fused_rope_attention_matches_two_launches --skip any_number_of_tokens "$@" |
        variant=$variant xargs -P 2 -d '\n' -I {} bash -c 'run thread libtsan.so 0 $variant --test-threads=1 --exact {}'
}

for ((i = turn; i < turn + turns; i++)); do
    offset=$((i / 3 % 2)) variant=${variants[i % 3]}
    echo "AddressSanitizer: $variant, half $offset"
    names=$(half $offset "$@")
    # shellcheck disable=SC2086
    [ -z "$names" ] || run address libasan.so $((3 + 4 * (i % 16))) $variant --test-threads=2 --exact $names
    variant=${variants[(i + 1) % 3]}
    echo "ThreadSanitizer: $variant, half $offset"
    threads $offset "$variant" "$@"
done
