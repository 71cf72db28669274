#!/usr/bin/env bash
# Every fuzz target for a while, from its committed corpus: fuzz/all.sh SECONDS [CORPORA]. Needs `cargo install cargo-fuzz`.
# CORPORA: a folder where what libFuzzer finds worth keeping goes, and lies when it is started again; without it, nowhere.
# Prints how often each one ran; ends at the first input that breaks a decoder, which lies in fuzz/artifacts then.
set -euo pipefail
seconds=$1 found=${2:-$(mktemp -d)}
cd "$(dirname "$0")/.."
# The stable compiler knows what libFuzzer needs, and is told to admit it.
export RUSTC_BOOTSTRAP=1
cp Cargo.lock fuzz/Cargo.lock
cargo fuzz build
for target in $(cargo fuzz list); do
    mkdir -p "$found/$target"
    cargo fuzz run "$target" "$found/$target" "fuzz/corpus/$target" -- -max_total_time="$seconds" -max_len=16384 -timeout=30 \
        -rss_limit_mb=4096 -print_final_stats=1 >"$found/$target.log" 2>&1 || { tail -n 60 "$found/$target.log"; exit 1; }
    awk -v target="$target" '/stat::number_of_executed_units/ { runs = $2 } / cov: / { for (i = 1; i < NF; i++) if ($i == "cov:") edges = $(i + 1) }
        END { printf "%-12s %12d executions, %6d edges\n", target, runs, edges }' "$found/$target.log"
done
