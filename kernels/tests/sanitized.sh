#!/usr/bin/env bash
# The conformance tests of the kernels on the emulator, with kernels compiled for AddressSanitizer and
# UndefinedBehaviorSanitizer, then for ThreadSanitizer; with the branches of gfx942 there and those of gfx950 here, beside those
# of narrow waves. Arguments go to the test binary: names of tests, --skip.
# Only kernels are compiled for them; what the rest of the process does is not watched.
set -euo pipefail
cd "$(dirname "$0")/../.."

host=$(rustc -vV | sed -n 's/^host: //p' | tr 'a-z-' 'A-Z_')
export RUNNER=CARGO_TARGET_${host}_RUNNER
# What is wrong at one order of waves may be right at another: a random one here, the first wave ahead there.
run() {
    local kind=$1 library=$2 seed=$3 gfx=$4
    shift 4
    env "$RUNNER=env LD_PRELOAD=$(c++ -print-file-name="$library")" \
        HIPEMU_SANITIZE="$kind" HIPEMU_SEED="$seed" HIPEMU_GFX="$gfx" \
        ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
        TSAN_OPTIONS=halt_on_error=1:ignore_noninstrumented_modules=1 \
        cargo test -p kernels --test gpu -- "$@"
}
export -f run
run address libasan.so 3 942 --test-threads=2 --skip errors:: "$@"

# ThreadSanitizer watches a process best while it tests one thing: two processes, each with the tests of one file at a
# time, the longest files first.
# Thousands of equal launches, or blocks, show no race that a few do not, and ThreadSanitizer takes minutes for them.
# A lone row's attention fetches the tile of the newest token while that token's slot is written: the bytes it gets of
# this slot are never used (`complete_tile` puts the token over them), but they are a race by the letter.
tests=$(cargo test -q -p kernels --test gpu -- --list --format terse \
    --skip errors:: --skip frequencies_follow_the_softmax --skip one_launch_gives_what_two_give --skip any_number_of_tokens "$@" | sed -n 's/: test$//p')
files=$(printf '%s\n' latent_long sample latent kv_fp8 linear moe $(sed 's/::.*//' <<<"$tests") | awk '!seen[$0]++')
for file in $files; do
    names=$(grep "^$file::" <<<"$tests" | paste -sd ' ' -) || continue
    echo "$names"
done | xargs -P 2 -d '\n' -I {} bash -c 'run thread libtsan.so 0 950 --test-threads=1 --exact {}'
