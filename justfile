# Developer commands; `just` lists them.

default:
    @just --list

# Run the gate that every change must pass.
check:
    .ci/run

# Measure the time of the gate's steps, with an empty and with a warm build folder; writes the measured part of tests/bench/results/cpu/gate.md.
gate-times:
    tests/bench/gate/times.py

# Build REVISION (`.` = the working tree) into target/speed/NAME, for `just speed` and `just speed-cpu`.
speed-build REVISION NAME PROFILE="release":
    tests/bench/speed/build.sh {{REVISION}} target/speed/{{NAME}} {{PROFILE}}

# Compare two builds (NAMEs of `just speed-build`) on one GPU, alternately, by medians of three rounds; fails if one is more than 2 % slower.
speed OLD NEW *ARGS:
    tests/bench/speed/turns.py gpu target/speed/{{OLD}} target/speed/{{NEW}} {{ARGS}}

# Compare two builds on the CPU: forward passes, scheduler step, server-sent events, prefix cache hits.
speed-cpu OLD NEW *ARGS:
    tests/bench/speed/turns.py cpu target/speed/{{OLD}} target/speed/{{NEW}} {{ARGS}}

# Test executors on emulated GPUs with warps of 32 and wavefronts of 64.
emulated:
    cargo test --test emulated_gpu

# Compare the machine code of all kernels for NVIDIA GPUs with that of a commit, without a GPU.
cubins COMMIT:
    kernels/csrc/cubins.py {{COMMIT}}

# Run the GPU tests on emulated machine code of gfx942 and gfx950, four orders of wavefronts each, without a GPU; results: tests/bench/results/cpu/amd_isa.md.
# Fails if LDS bank conflicts of a kernel grew; `just amd-isa --accept` records them.
amd-isa *ARGS:
    kernels/tests/amd_isa.py --all {{ARGS}}

# Run deploy/first_day_amd.sh with small arguments on the emulated HIP runtime, without a GPU; report: tests/bench/results/cpu/first_day_amd.md.
first-day-emulated OUT="target/first-day":
    cargo test -q -p kernels --test emulator peers::
    deploy/first_day_amd.sh {{OUT}} --emulator "$(ls -t target/tmp/hipemu/*/libhipemu.so | head -n 1)"
    cp {{OUT}}/report.md tests/bench/results/cpu/first_day_amd.md

# Test every kernel variant under AddressSanitizer and ThreadSanitizer.
sanitized *TESTS:
    kernels/tests/sanitized.sh --all {{TESTS}}

# Replay one simulator seed bit for bit.
sim SEED:
    HADRON_SIM_SEED={{SEED}} cargo test -q --test sim -- --ignored --exact suite::replay_seed --nocapture

# Run COUNT new simulator seeds, and a fifth of this number for lockstep groups and for broken links.
explore FROM COUNT:
    HADRON_SIM_FROM={{FROM}} HADRON_SIM_COUNT={{COUNT}} cargo test --release --test sim -- --ignored explore_seeds --nocapture

# Check that the simulator finds the faults that are injected at the interfaces of the scheduler.
canary:
    cargo test --test sim injected_faults -- --nocapture

# Check that the simulator finds the injected faults and the patches in tests/sim/mutants (all, or NAMES); patches apply to a copy of the tree.
mutants *NAMES:
    tests/sim/mutants/run.py {{ if NAMES == "" { "--out tests/bench/results/cpu/injected_faults.md" } else { NAMES } }}

# Run the tests in the release profile: with overflow checks, without debug assertions.
released:
    cargo test --release

# Test random interleavings of the threads that exchange requests, events and bitmasks.
interleavings:
    cargo clippy --lib --tests --features hadron/interleavings --locked -- -D warnings
    cargo test --lib --features hadron/interleavings interleavings -- --nocapture

# Run the tests of unsafe kernel code that Miri supports; needs `rustup component add --toolchain nightly miri rust-src`.
miri:
    MIRIFLAGS=-Zmiri-disable-isolation CARGO_TARGET_DIR=target/miri cargo +nightly miri test -p kernels -p device --lib -- \
        cpu::thread_pool cpu::pack cpu::maths::tests::sums cpu::sample::tests::edits timestamps step:: host_mat

# Test the kernels crate, and the driver and collectives bindings on the emulator, under AddressSanitizer.
asan:
    #!/usr/bin/env bash
    set -euo pipefail
    export ASAN_OPTIONS=detect_leaks=0 RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address CARGO_TARGET_DIR=target/asan
    host=$(rustc --print host-tuple)
    cargo test --target "$host" -p kernels --lib --test conformance --test gpu
    cargo test --target "$host" -p collectives

# Fuzz every decoder with libFuzzer for SECONDS each; continues from inputs that earlier runs found.
fuzz SECONDS="60":
    fuzz/all.sh {{SECONDS}} target/fuzz

# Fuzz one target of fuzz/fuzz_targets, optimised and with AddressSanitizer; needs `cargo install cargo-fuzz`.
fuzz-one TARGET SECONDS="60":
    mkdir -p target/fuzz/{{TARGET}}
    RUSTC_BOOTSTRAP=1 cargo fuzz run {{TARGET}} target/fuzz/{{TARGET}} fuzz/corpus/{{TARGET}} -- -max_total_time={{SECONDS}} -max_len=16384 -timeout=30 -rss_limit_mb=4096

# Run COUNT mutations of a decoder's corpus (fuzz/corpus and inputs in target/fuzz) without libFuzzer.
decoders TARGET COUNT SEED="8":
    HADRON_DECODERS_TARGET={{TARGET}} HADRON_DECODERS_COUNT={{COUNT}} HADRON_DECODERS_SEED={{SEED}} cargo test --test decoders -- --ignored --exact --nocapture replay::unbounded_mutations

# Send COUNT malformed HTTP requests: no reply may have status 5xx, and memory must not grow.
malformed COUNT="1000000":
    HADRON_MALFORMED_REQUESTS={{COUNT}} cargo test --test e2e -- --ignored --exact --nocapture http::malformed::malformed_requests_process

# Run random mutants of the scheduler and the KV cache (cargo-mutants), one shard (`0/12`) at a time: unit tests, random walks or simulator seeds must
# fail for each. Needs `cargo install cargo-mutants`; missed mutants: target/mutants.out/missed.txt, results: tests/bench/results/cpu/mutants.md.
mutants-random SHARD="0/12":
    cargo mutants -p kvcache -p scheduler --shard {{SHARD}} --sharding round-robin --profile mutants --timeout 400 --output target -- \
        -p kvcache -p scheduler --lib --test sim --test random_walk --test requeue_costs -- --include-ignored --skip patched_code --skip explore --skip replay --skip million_steps --skip lockstep_groups --skip broken_links

# Compare models with golden fixtures whose names contain MODEL (default: all). On GPUs: HADRON_GPU=cuda; for ranks HADRON_GPU_RANKS=2, one test at a time.
golden MODEL="":
    cargo test --test golden {{MODEL}} -- --nocapture

# Regenerate golden fixtures; needs uv and network access to PyPI.
golden-make *CASES:
    uv run tests/golden/generate.py {{CASES}}

# Compare every kernel with its reference on every instruction set of this CPU.
conformance:
    cargo test -p kernels -p ops

# Score the demo models in every configuration with all 500 questions; the gate uses 100 of them.
accuracy:
    HADRON_ACCURACY=all cargo test --test e2e accuracy -- --nocapture

# Test third-party clients (all, or TOOLS) against the debug build.
clients *TOOLS:
    tests/conformance/clients/run.sh target/debug/hadron target/clients {{TOOLS}}

# Test two hosts (network namespaces) with a link that fails, and a Slurm job on both; needs root; results: tests/bench/results/cpu/two_hosts.md.
two-hosts:
    cargo build --release
    tests/conformance/cluster/two_hosts.sh target/release/hadron

# Check the listening sockets and connections of a server with `ss`; needs iproute2 and curl.
listening:
    cargo build --release
    tests/conformance/listening.sh target/release/hadron

# Run coding agents and agent frameworks (all, or AGENTS) against a puppet model; results: tests/conformance/agents/results.md.
agents *AGENTS:
    tests/conformance/agents/run.py --binary target/debug/hadron {{AGENTS}}

# Compare prompts of public chat templates with transformers; writes tests/conformance/templates/results/table.md, and all differences to a file.
template-table DIFFERENCES="target/template_differences.md":
    tests/conformance/templates/table.py target/debug/hadron target/clients {{DIFFERENCES}}

# Compare tokenizers of public packages with their reference libraries; writes tests/conformance/tokenizers/results/table.md, and differences to a file.
tokenizer-table DIFFERENCES="target/tokenizer_differences.md":
    tests/conformance/tokenizers/tokenizer_table.py {{DIFFERENCES}} target/clients

# Train the small tokenizers of text/src/tests/tokenizers and write the ids of reference libraries; needs network access to PyPI.
tokenizer-fixtures:
    tests/conformance/tokenizers/fixtures.py

# Run 10,000 schemathesis cases; commit the summary that it prints to tests/conformance/clients/results/.
schemathesis:
    tests/conformance/clients/run.sh target/debug/hadron target/clients schemathesis

# Compare guidellm with `hadron bench serve` over five rounds, within 5 %; results: tests/bench/results/cpu/load_generators.md.
load-generators:
    ROUNDS=5 WITHIN_PERCENT=5 tests/conformance/clients/run.sh target/debug/hadron target/clients load_generator.py

# Check Dynamo's KV indexer over more than 10,000 requests; results: tests/conformance/clients/results/dynamo.md.
indexer:
    REQUESTS=3600 tests/conformance/clients/run.sh target/debug/hadron target/clients dynamo

# Measure the latency of a grammar's dry run over a vocabulary of 151,000 tokens; results: tests/bench/results/cpu/long_suites.md.
trials:
    cargo test --release --test bench -- --ignored --exact --nocapture http::grammar_dry_run::latency_of_grammar_dry_runs

# Run COUNT random adversarial grammars: each must be rejected or compiled in time.
hostile-grammars COUNT="10000" SEED="1":
    HADRON_GRAMMARS_COUNT={{COUNT}} HADRON_GRAMMARS_SEED={{SEED}} cargo test --test e2e -- --ignored --exact --nocapture random_grammars::many_random_grammars

# Send COUNT distinct JSON schemas: the grammar cache must stay within its limit, and memory must not grow.
schemas COUNT="100000":
    HADRON_SCHEMAS_COUNT={{COUNT}} cargo test --test e2e -- --ignored --exact --nocapture random_grammars::many_distinct_schemas

# Measure how expensive grammars, accepted or rejected, slow down other streams; results: tests/bench/results/cpu/costly_grammars.md.
costly-grammars:
    cargo test --release --test bench -- --ignored --exact --nocapture http::grammar_cost::costly_grammars_do_not_slow_other_streams

# Measure the time of tool-call and reasoning parsers for adversarial outputs of 1 MB.
hostile-outputs:
    cargo test --release --test bench -- --ignored --exact --nocapture output_parsers::hostile_outputs_parse_in_linear_time

# Measure how 200 slow readers, 100 metrics scrapes per second and stalled KV-event subscribers slow down steps.
bystanders:
    cargo test --test bench -- --ignored --exact --nocapture http::bystander_cost::slow_readers_and_scrapes_do_not_slow_steps

# Kill executors 200 times and stop them 50 times under load (one seed); results: tests/bench/results/cpu/kills.md. On two GPUs:
# `HADRON_GPU=cuda HADRON_KILLS=16 just kills`; on four add HADRON_GPU_RANKS=4: tests/bench/results/h200/ranks.md.
kills SEED="":
    {{ if SEED == "" { "" } else { "HADRON_KILLS_SEED=" + SEED } }} cargo test --test e2e -- --ignored --exact --nocapture kills::long_kill_test

# Break links, kill and stop executors at random for MINUTES, and check every response.
chaos MINUTES="1":
    HADRON_CHAOS_MINUTES={{MINUTES}} cargo test --test e2e -- --ignored --exact --nocapture chaos::random_faults::long_chaos_run

# Inject FAULTS faults and poll all probes: their state must be correct within a second.
health FAULTS="500" SEED="1":
    HADRON_HEALTH_FAULTS={{FAULTS}} HADRON_HEALTH_SEED={{SEED}} cargo test --test e2e -- --ignored --exact --nocapture health::probes_stay_true_over_hundreds_of_faults

# Run random mixes of request options and faults with the demo model: each request must give the bits that it gives alone.
mixes FROM="8" COUNT="100":
    HADRON_MIXES_FROM={{FROM}} HADRON_MIXES_COUNT={{COUNT}} cargo test --test e2e -- --ignored --exact --nocapture random_mixes::explore_random_mixes

# Run mixed traffic for HOURS (for example 0.1): checks growth of memory, descriptors and p99 latency, and what remains at the end.
soak HOURS="1":
    HADRON_SOAK_HOURS={{HOURS}} cargo test --test e2e -- --ignored --exact --nocapture soak::long_soak

# Send prompts of up to 1 MB for MINUTES: no step may be reported as overdue.
long-prompts MINUTES="60":
    HADRON_LONG_PROMPTS_MINUTES={{MINUTES}} cargo test --test bench -- --ignored --exact --nocapture http::long_prompts::long_prompts_cause_no_false_step_timeout

# Check in COUNT rounds that the time to first token does not reveal which prefixes are cached under another salt.
salts COUNT="300":
    HADRON_SALTS_COUNT={{COUNT}} cargo test --test bench -- --ignored --exact --nocapture http::cache_salt_timing::cache_hit_timing_does_not_leak_across_salts

# Test a server and an executor while the wall clock jumps by days and years; needs Debian's libfaketime.
clock-jumps:
    cargo test --test e2e -- --ignored --exact http::clock_and_memory::wall_clock_jumps_change_only_dates

# Test an executor that exceeds the memory limit of its control group; needs root.
memory-limit:
    cargo test --test e2e -- --ignored --exact --nocapture http::memory_limit::cgroup_oom_kill_restarts_executor_without_token_loss

# Test faults of a real GPU (hang, failure, out of memory); needs a GPU.
device-faults:
    HADRON_GPU=cuda cargo test --test e2e device_faults:: -- --ignored --nocapture --test-threads 1

# Measure the cost of KV events per step while their publisher is stalled.
kv-overflow:
    cargo test --test bench -- --ignored --exact --nocapture kv_overflow::step_cost_with_a_stalled_publisher

# Measure the cost of one /metrics page.
metrics-page:
    cargo test --test bench -- --ignored --exact --nocapture metrics_page::metrics_page_cost

# Run 10,000 concurrent streams over a simulated device for MINUTES (0 = some seconds).
streams MINUTES="0":
    HADRON_STREAMS_MINUTES={{MINUTES}} cargo test --test bench -- --ignored --exact --nocapture http::many_streams::ten_thousand_streams

# Disconnect 100,000 clients at random times, over a simulated device, and check that their blocks are freed.
vanish:
    cargo test --test bench -- --ignored --exact --nocapture http::client_disconnects::blocks_are_freed_for_100k_disconnecting_clients

# Measure the time from a client's disconnect to its free blocks, 1,000 times in sequence.
freed:
    cargo test --test bench -- --ignored --exact --nocapture http::client_disconnects::time_from_disconnect_to_free_blocks

# Run 100,000 requests that need ten times the KV cache: each must give the tokens that it gives alone.
storm:
    cargo test --test bench -- --ignored --exact --nocapture http::preemption_storm::storm_of_requests_over_a_tenth_of_the_cache

# Measure output tokens and events per second of the HTTP layer over a simulated device; results: tests/bench/results/cpu/http.md.
http-speed:
    cargo test --release --test bench -- --ignored --exact --nocapture http::tokens_per_second

# Measure every GPU kernel (or those whose names contain KERNEL) in the shapes of several models; GPU = cuda or rocm.
gpu-speed GPU="cuda" KERNEL="speed":
    HADRON_GPU={{GPU}} cargo test --release -p kernels --test gpu {{KERNEL}} -- --ignored --nocapture --test-threads 1

# Measure all-reduces between two GPUs of a host, with and without the norm that follows; needs RCCL or NCCL.
ranks-speed GPU="cuda":
    HADRON_GPU={{GPU}} cargo test --release -p collectives --test devices speed -- --ignored --nocapture --test-threads 1

# Measure time, bandwidth and FLOP rate of single ops, e.g. `just ops --device cuda --tokens 1,64`; flags: docs/cli.md.
ops *ARGS:
    cargo run --release -- bench ops {{ARGS}}

# Attack a server over loopback for MINUTES: memory must not grow, probes must be correct, other clients' responses must not change, no 5xx.
attack MINUTES="60" SEED="1" KINDS="":
    HADRON_ATTACK_MINUTES={{MINUTES}} HADRON_ATTACK_SEED={{SEED}} HADRON_ATTACK_KINDS={{KINDS}} cargo test --test e2e -- --ignored --exact --nocapture attack::long_attack_run

# Measure, for two CPU ranks, the time of an all-gather, and of sampling from rows of a real vocabulary; prints the times only.
rows:
    cargo test --release -p collectives --test shared_memory -- --ignored --exact --nocapture all_gather_cost
    cargo test --release -p kernels --lib -- --ignored --exact --nocapture cpu::sample::tests::time_rows_of_a_real_vocabulary

# Run a Cargo benchmark: step (scheduler), speed (kernels), forward or gpu (executor).
bench WHAT="step":
    cargo bench --bench {{WHAT}} -p {{ if WHAT == "step" { "scheduler" } else if WHAT == "speed" { "kernels" } else { "executor" } }}

# Serve the demo model, or a model folder or hub id.
serve *ARGS:
    cargo run --release -- serve {{ARGS}}
