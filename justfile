# One entry to everything; `just` lists it.

default:
    @just --list

# What a change must pass.
check:
    .ci/run

# Replay one simulator seed, bit for bit.
sim SEED:
    HADRON_SIM_SEED={{SEED}} cargo test --release --test sim replay -- --nocapture

# Goldens of one model family (all without an argument).
golden MODEL="":
    cargo test --release --test golden {{MODEL}} -- --nocapture

# Serve the demo model, or any folder or hub id.
serve *ARGS:
    cargo run --release -- serve {{ARGS}}
