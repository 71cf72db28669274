#!/usr/bin/env bash
# Cargo's RUSTC_WORKSPACE_WRAPPER of `all.sh`: compiles this workspace's crates with libFuzzer's coverage instrumentation, as cargo-fuzz
# does. Third-party crates are compiled without it, and shared with `cargo test`. Crates that decode no untrusted bytes are linked but not
# run by fuzz targets: they are compiled without instrumentation and optimisation.
set -euo pipefail
rustc=$1
shift
case ${CARGO_PKG_NAME:-} in
collectives | device | engine | executor | hip-runtime-sys | kernels | kvcache | ops | rccl-sys | scheduler) exec "$rustc" "$@" -Copt-level=0 ;;
esac
counters=(-Cpasses=sancov-module --cfg fuzzing -Cllvm-args=-simplifycfg-branch-fold-threshold=0)
for part in level=4 inline-8bit-counters pc-table trace-compares stack-depth; do
    counters+=("-Cllvm-args=-sanitizer-coverage-$part")
done
exec "$rustc" "$@" "${counters[@]}"
