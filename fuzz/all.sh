#!/usr/bin/env bash
# Every fuzz target for so many seconds, from its committed corpus, as many at once as there are processors: fuzz/all.sh SECONDS [CORPORA].
# CORPORA: a folder where what libFuzzer finds worth keeping goes, and lies when it is started again; without it, nowhere.
# Prints how often each one ran. What breaks a decoder ends the whole; the input lies in fuzz/artifacts/TARGET then, unless the
# stack was used up: `just fuzz-one TARGET` has a stack for that.
# Built by the stable compiler with the profile of tests, without sanitizers: the decoders are safe Rust. No cargo-fuzz is needed.
set -euo pipefail
seconds=$1 found=$(realpath -m "${2:-$(mktemp -d)}")
cd "$(dirname "$0")/.."
RUSTC_WORKSPACE_WRAPPER=$PWD/fuzz/coverage.sh cargo build --locked -p hadron-fuzz --bins

one() {
    local target=$1 log=$found/$1.log
    mkdir -p "$found/$target" "fuzz/artifacts/$target"
    # No more memory than this, touched or not.
    local code=0 limit=30
    # A grammar may take for ever: whoever tries one does so in a process that is killed then. Elsewhere it is a finding.
    [ "$target" != grammars ] || limit=5
    (ulimit -v $((4 << 20)) && exec "$built/$target" "$found/$target" "fuzz/corpus/$target" -max_total_time="$seconds" -max_len=16384 \
        -timeout=$limit -timeout_exitcode=70 -rss_limit_mb=2048 -print_final_stats=1 -artifact_prefix="fuzz/artifacts/$target/") >"$log" 2>&1 || code=$?
    if [ "$target" = grammars ] && [ "$code" = 70 ]; then
        echo "grammars: one took more than $limit s, and ended the run"
    elif [ "$code" != 0 ]; then
        tail -n 60 "$log"
        echo "fuzz target $target failed: $log"
        return 255
    fi
    awk -v target="$target" '/stat::number_of_executed_units/ { runs = $2 } / cov: / { for (i = 1; i < NF; i++) if ($i == "cov:") edges = $(i + 1) }
        END { printf "%-12s %12d executions, %6d edges\n", target, runs, edges }' "$log"
}
export -f one
export seconds found built="${CARGO_TARGET_DIR:-target}/debug"
basename -s .rs fuzz/fuzz_targets/*.rs | xargs -P "$(nproc)" -I{} bash -c 'one {}'
