#!/usr/bin/env bash
# Runs every fuzz target for SECONDS from its committed corpus, one per processor at a time: fuzz/all.sh SECONDS [CORPORA].
# CORPORA: a folder that keeps the inputs libFuzzer adds, and is read by the next run; default: a temporary folder.
# Prints the number of executions of each target. A failing input ends the run and is in fuzz/artifacts/TARGET, unless it caused a stack
# overflow: `just fuzz-one TARGET` has a larger stack for that.
# Built by the stable compiler with the test profile, without sanitizers: the decoders are safe Rust. cargo-fuzz is not needed.
set -euo pipefail
seconds=$1 found=$(realpath -m "${2:-$(mktemp -d)}")
cd "$(dirname "$0")/.."
RUSTC_WORKSPACE_WRAPPER=$PWD/fuzz/coverage.sh cargo build --locked -p hadron-fuzz --bins

one() {
    local target=$1 log=$found/$1.log
    mkdir -p "$found/$target" "fuzz/artifacts/$target"
    # Limits address space, whether or not it is used.
    local code=0 limit=30
    # A grammar may take very long: dry runs are done in a process that is killed then. In other targets a timeout is a failure.
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
