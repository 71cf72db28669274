#!/usr/bin/env bash
# Cargo's RUSTC_WORKSPACE_WRAPPER of `all.sh`: compiles the crates of this workspace with the counters that lead libFuzzer, as cargo-fuzz
# would. Crates of others are compiled without, and shared with `cargo test`.
set -euo pipefail
rustc=$1
shift
counters=(-Cpasses=sancov-module --cfg fuzzing -Cllvm-args=-simplifycfg-branch-fold-threshold=0)
for part in level=4 inline-8bit-counters pc-table trace-compares stack-depth; do
    counters+=("-Cllvm-args=-sanitizer-coverage-$part")
done
exec "$rustc" "$@" "${counters[@]}"
