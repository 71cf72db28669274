# One entry to everything; `just` lists it.

default:
    @just --list

# What a change must pass.
check:
    .ci/run

# How long the gate takes, from an empty build folder and again, and where; writes tests/bench/results/cpu/gate.md.
gate-times:
    tests/bench/gate/times.py

# Build a revision (`.` is the working tree) for `just speed` and `just speed-cpu` into target/speed/NAME.
speed-build REVISION NAME PROFILE="release":
    tests/bench/speed/build.sh {{REVISION}} target/speed/{{NAME}} {{PROFILE}}

# Two builds (NAMEs of `just speed-build`) in turn on one GPU, three rounds, medians; fails where one is more than 2 % slower.
speed OLD NEW *ARGS:
    tests/bench/speed/turns.py gpu target/speed/{{OLD}} target/speed/{{NEW}} {{ARGS}}

# The same for the CPU: forward passes, the scheduler's step, server-sent events, cached prefixes.
speed-cpu OLD NEW *ARGS:
    tests/bench/speed/turns.py cpu target/speed/{{OLD}} target/speed/{{NEW}} {{ARGS}}

# Executors on emulated GPUs, both widths of a wavefront.
emulated:
    cargo test --test emulated_gpu

# Every variant of the kernels under AddressSanitizer and ThreadSanitizer.
sanitized *TESTS:
    kernels/tests/sanitized.sh --all {{TESTS}}

# Replay one simulator seed, bit for bit.
sim SEED:
    HADRON_SIM_SEED={{SEED}} cargo test -q --test sim -- --ignored --exact suite::replay_seed --nocapture

# Explore seeds that no test has seen, and a fifth as many of groups of ranks and of links that break.
explore FROM COUNT:
    HADRON_SIM_FROM={{FROM}} HADRON_SIM_COUNT={{COUNT}} cargo test --release --test sim -- --ignored explore_seeds --nocapture

# Show that the simulator finds faults injected at the edges of the scheduler.
canary:
    cargo test --test sim injected_faults -- --nocapture

# Show that it finds these and every mistake of tests/sim/mutants, or those named; each patch is applied to a copy of the tree.
mutants *NAMES:
    tests/sim/mutants/run.py {{ if NAMES == "" { "--out tests/bench/results/cpu/injected_faults.md" } else { NAMES } }}

# The tests as a release is built: overflow checks on, assertions of debug builds gone.
released:
    cargo test --release

# Draw orders of the threads that hand requests, events and masks to each other.
interleavings:
    cargo test --lib --features hadron/interleavings interleavings -- --nocapture

# What unsafe code of kernels can run under Miri does; needs `rustup component add --toolchain nightly miri rust-src`.
miri:
    MIRIFLAGS=-Zmiri-disable-isolation CARGO_TARGET_DIR=target/miri cargo +nightly miri test -p kernels --lib -- \
        cpu::pool cpu::pack cpu::maths::tests::sums cpu::sample::tests::edits marks step:: host_mat

# The same crate, and the bindings of drivers and of collectives over what the emulator has of them, compiled for AddressSanitizer.
asan:
    #!/usr/bin/env bash
    set -euo pipefail
    export ASAN_OPTIONS=detect_leaks=0 RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address CARGO_TARGET_DIR=target/asan
    host=$(rustc --print host-tuple)
    cargo test --target "$host" -p kernels --lib --test conformance --test gpu
    cargo test --target "$host" -p collectives

# Let libFuzzer look for inputs that break a decoder, every one for so many seconds; again from what it found before.
fuzz SECONDS="60":
    fuzz/all.sh {{SECONDS}} target/fuzz

# The same for one of `ls fuzz/fuzz_targets`, with AddressSanitizer, optimised; needs `cargo install cargo-fuzz`.
fuzz-one TARGET SECONDS="60":
    mkdir -p target/fuzz/{{TARGET}}
    RUSTC_BOOTSTRAP=1 cargo fuzz run {{TARGET}} target/fuzz/{{TARGET}} fuzz/corpus/{{TARGET}} -- -max_total_time={{SECONDS}} -max_len=16384 -timeout=30 -rss_limit_mb=4096

# Mutations of a decoder's corpus, as many as asked for, without libFuzzer (fuzz/corpus and what libFuzzer left in target/fuzz).
decoders TARGET COUNT SEED="8":
    HADRON_DECODERS_TARGET={{TARGET}} HADRON_DECODERS_COUNT={{COUNT}} HADRON_DECODERS_SEED={{SEED}} cargo test --test decoders -- --ignored --exact --nocapture replay::unbounded_mutations

# Malformed HTTP requests, a million unless told otherwise: no 5xx, flat memory.
malformed COUNT="1000000":
    HADRON_MALFORMED_REQUESTS={{COUNT}} cargo test --test e2e -- --ignored --exact --nocapture http::malformed::malformed_requests_process

# Random mutants of the scheduler and the cache (cargo-mutants), one part of many (`0/12`): each must fail the unit tests, the walks or some seeds of the
# simulator. Needs `cargo install cargo-mutants`; what is missed stands in target/mutants.out/missed.txt, what was found so far in
# tests/bench/results/cpu/mutants.md.
mutants-random SHARD="0/12":
    cargo mutants -p kvcache -p scheduler --shard {{SHARD}} --sharding round-robin --profile mutants --timeout 400 --output target -- \
        -p kvcache -p scheduler --lib --test sim --test random_walk --test requeue_costs -- --include-ignored --skip patched_code --skip explore --skip replay --skip million_steps --skip lockstep_groups --skip broken_links

# Goldens whose names contain MODEL; all without it. On GPUs: HADRON_GPU=cuda, and HADRON_GPU_RANKS=2 for ranks, one test at a time.
golden MODEL="":
    cargo test --test golden {{MODEL}} -- --nocapture

# Regenerate golden fixtures (needs uv and network access to PyPI).
golden-make *CASES:
    uv run tests/golden/generate.py {{CASES}}

# Every kernel against its reference, on every instruction set this CPU has.
conformance:
    cargo test -p kernels -p ops

# The demo models' scores in every configuration, by all 500 questions; every change is checked by 100 of them.
accuracy:
    HADRON_ACCURACY=all cargo test --test e2e accuracy -- --nocapture

# Third-party tools against a built server: all, or those named.
clients *TOOLS:
    tests/conformance/clients/run.sh target/debug/hadron target/clients {{TOOLS}}

# Two hosts in network namespaces whose link is cut, and a job of Slurm on both; as root: tests/bench/results/cpu/two_hosts.md.
two-hosts:
    cargo build --release
    tests/conformance/cluster/two_hosts.sh target/release/hadron

# What listens and speaks where, as `ss` sees it; needs iproute2 and curl.
listening:
    cargo build --release
    tests/conformance/listening.sh target/release/hadron

# Ten thousand cases of schemathesis; commit what it prints last in tests/conformance/clients/results/.
schemathesis:
    tests/conformance/clients/run.sh target/debug/hadron target/clients schemathesis

# guidellm and `hadron bench serve` in turns, five rounds, within 5 %: tests/bench/results/cpu/load_generators.md.
load-generators:
    ROUNDS=5 WITHIN_PERCENT=5 tests/conformance/clients/run.sh target/debug/hadron target/clients load_generator.py

# Dynamo's indexer over more than ten thousand requests: tests/conformance/clients/results/dynamo.md.
indexer:
    REQUESTS=3600 tests/conformance/clients/run.sh target/debug/hadron target/clients dynamo

# What the trial of a grammar adds over 151,000 tokens; no result is committed yet.
trials:
    cargo test --release --test bench -- --ignored --exact --nocapture http::grammar_dry_run::latency_of_grammar_dry_runs

# Grammars that mean harm, drawn from a seed: each is refused or followed in time.
hostile-grammars COUNT="10000" SEED="1":
    HADRON_GRAMMARS_COUNT={{COUNT}} HADRON_GRAMMARS_SEED={{SEED}} cargo test --test e2e -- --ignored --exact --nocapture random_grammars::many_random_grammars

# Schemas that are all different: the cache keeps its bound, memory stays flat.
schemas COUNT="100000":
    HADRON_SCHEMAS_COUNT={{COUNT}} cargo test --test e2e -- --ignored --exact --nocapture random_grammars::many_distinct_schemas

# What costly grammars, accepted and refused, do to the steps of others: tests/bench/results/cpu/costly_grammars.md.
costly-grammars:
    cargo test --release --test bench -- --ignored --exact --nocapture http::grammar_cost::costly_grammars_do_not_slow_other_streams

# What parsers of tool calls and reasoning take for hostile outputs of a megabyte.
hostile-outputs:
    cargo test --release --test bench -- --ignored --exact --nocapture output_parsers::hostile_outputs_parse_in_linear_time

# What 200 slow readers, 100 scrapes a second and stuck KV-event subscribers do to steps.
bystanders:
    cargo test --test bench -- --ignored --exact --nocapture http::bystander_cost::slow_readers_and_scrapes_do_not_slow_steps

# Two hundred SIGKILLs and fifty SIGSTOPs of executors under load, one seed: tests/bench/results/cpu/kills.md. On two GPUs:
# `HADRON_GPU=cuda HADRON_KILLS=16 just kills`, on four with HADRON_GPU_RANKS=4: tests/bench/results/h200/ranks.md.
kills SEED="":
    {{ if SEED == "" { "" } else { "HADRON_KILLS_SEED=" + SEED } }} cargo test --test e2e -- --ignored --exact --nocapture kills::long_kill_drill

# Links that break, executors that die and stop, drawn for so many minutes; every answer beside them is checked.
chaos MINUTES="1":
    HADRON_CHAOS_MINUTES={{MINUTES}} cargo test --test e2e -- --ignored --exact --nocapture chaos::random_faults::long_chaos_run

# Five hundred faults, or as many as asked for, with all probes asked from outside the whole time: what they say must be so within a second.
health FAULTS="500" SEED="1":
    HADRON_HEALTH_FAULTS={{FAULTS}} HADRON_HEALTH_SEED={{SEED}} cargo test --test e2e -- --ignored --exact --nocapture health::probes_stay_true_over_hundreds_of_faults

# Requests with every option in mixes with every fault, on the demo model: each must get the bits that it gets alone.
mixes FROM="8" COUNT="100":
    HADRON_MIXES_FROM={{FROM}} HADRON_MIXES_COUNT={{COUNT}} cargo test --test e2e -- --ignored --exact --nocapture random_mixes::explore_random_mixes

# Mixed traffic for so many hours, `0.1` as well: slopes of memory, descriptors and p99, and what is left when all have gone.
soak HOURS="1":
    HADRON_SOAK_HOURS={{HOURS}} cargo test --test e2e -- --ignored --exact --nocapture soak::long_soak

# Prompts of a megabyte and shorter ones, for so many minutes: no step may be taken for a hang.
long-prompts MINUTES="60":
    HADRON_LONG_PROMPTS_MINUTES={{MINUTES}} cargo test --test bench -- --ignored --exact --nocapture http::long_prompts::long_prompts_cause_no_false_step_timeout

# Whether the time to the first token tells what is cached under another salt, in so many rounds.
salts COUNT="300":
    HADRON_SALTS_COUNT={{COUNT}} cargo test --test bench -- --ignored --exact --nocapture http::cache_salt_timing::cache_hit_timing_does_not_leak_across_salts

# A server and its executor whose wall clock jumps by days and years; needs Debian's libfaketime.
clock-jumps:
    cargo test --test e2e -- --ignored --exact http::clock_and_memory::wall_clock_jumps_change_only_dates

# An executor whose control group has no memory left; as root.
memory-limit:
    cargo test --test e2e -- --ignored --exact --nocapture http::memory_limit::cgroup_oom_kill_restarts_executor_without_token_loss

# Faults of a GPU itself: it stands still, breaks, or has no memory left; needs one.
device-faults:
    HADRON_GPU=cuda cargo test --test e2e device_faults:: -- --ignored --nocapture --test-threads 1

# What a step pays for KV events when their publisher stands still.
kv-overflow:
    cargo test --test bench -- --ignored --exact --nocapture kv_overflow::step_cost_with_a_stalled_publisher

# What one page of /metrics costs.
metrics-page:
    cargo test --test bench -- --ignored --exact --nocapture metrics_page::metrics_page_cost

# Ten thousand streams at once over a device that is a hash, for seconds or for so many minutes.
streams MINUTES="0":
    HADRON_STREAMS_MINUTES={{MINUTES}} cargo test --test bench -- --ignored --exact --nocapture http::many_streams::ten_thousand_streams

# A hundred thousand clients that leave at any moment, over a device that is a hash.
vanish:
    cargo test --test bench -- --ignored --exact --nocapture http::client_disconnects::blocks_are_freed_for_100k_disconnecting_clients

# How soon the blocks of a client that leaves are free: a thousand times, one after another.
freed:
    cargo test --test bench -- --ignored --exact --nocapture http::client_disconnects::time_from_disconnect_to_free_blocks

# A hundred thousand requests that want ten times the cache; each must end as it does alone.
storm:
    cargo test --test bench -- --ignored --exact --nocapture http::preemption_storm::storm_of_requests_over_a_tenth_of_the_cache

# Output tokens and events per second of the HTTP layer alone, over a device that is a hash: tests/bench/results/cpu/http.md.
http-speed:
    cargo test --release --test bench -- --ignored --exact --nocapture http::tokens_per_second

# Time of every GPU kernel in the shapes of several models, those whose names contain KERNEL if given; needs a GPU (cuda or rocm).
gpu-speed GPU="cuda" KERNEL="speed":
    HADRON_GPU={{GPU}} cargo test --release -p kernels --test gpu {{KERNEL}} -- --ignored --nocapture --test-threads 1

# Time of all-reduces between two GPUs of one host, alone and with the norm that follows; needs RCCL or NCCL.
ranks-speed GPU="cuda":
    HADRON_GPU={{GPU}} cargo test --release -p collectives --test devices speed -- --ignored --nocapture --test-threads 1

# Time, bandwidth and arithmetic rate of single ops, e.g. `just ops --device cuda --tokens 1,64`: docs/cli.md has all flags.
ops *ARGS:
    cargo run --release -- bench ops {{ARGS}}

# An hour of attacks on a server over loopback, or as many minutes as asked for: memory stays flat, probes are true, answers of others
# do not change, and nothing answers with 5xx.
attack MINUTES="60" SEED="1" KINDS="":
    HADRON_ATTACK_MINUTES={{MINUTES}} HADRON_ATTACK_SEED={{SEED}} HADRON_ATTACK_KINDS={{KINDS}} cargo test --test e2e -- --ignored --exact --nocapture attack::long_attack_run

# What two ranks take to gather words on this CPU, and a row of a real vocabulary to be sampled. Printed, not judged.
rows:
    cargo test --release -p collectives --test shared_memory -- --ignored --exact --nocapture all_gather_cost
    cargo test --release -p kernels --lib -- --ignored --exact --nocapture cpu::sample::tests::time_rows_of_a_real_vocabulary

# Time a scheduler step, the kernels, or whole forward passes.
bench WHAT="step":
    cargo bench --bench {{WHAT}} -p {{ if WHAT == "step" { "scheduler" } else if WHAT == "speed" { "kernels" } else { "executor" } }}

# Serve the demo model, or any folder or hub id.
serve *ARGS:
    cargo run --release -- serve {{ARGS}}
