#!/usr/bin/env bash
# Builds what `turns.py` compares: build.sh REVISION FOLDER [PROFILE]
#
# FOLDER gets `hadron` and the benchmarks `step` (scheduler), `forward` (CPU kernels) and `http` (SSE) of REVISION, and `about.json`.
# PROFILE is a Cargo profile (default release). REVISION `.` builds the working tree. The build folder next to FOLDER is kept, so that a
# second revision compiles the workspace's own crates only.
set -euo pipefail
cd "$(dirname "$0")/../../.."
revision=$1
folder=$(realpath -m "$2")
profile=${3:-release}
mkdir -p "$folder"
# Read first: HEAD may change while the build runs.
commit=$(git rev-parse --short "$([ "$revision" = . ] && echo HEAD || echo "$revision")")
# Copies the tree with new modification times: Cargo shares one build folder among trees, and would treat older files as already built.
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
if [ "$revision" = . ]; then
    git ls-files -z --cached --others --exclude-standard | tar --null -T - -c | tar -x -m -C "$tree"
else
    git archive "$revision" | tar -x -m -C "$tree"
fi
export CARGO_TARGET_DIR=${SPEED_TARGET:-$(dirname "$folder")/target} CARGO_INCREMENTAL=0
cd "$tree"
# Revisions without the Cargo profile `dist` are shipped in their release profile.
grep -q "^\[profile\.$profile\]" Cargo.toml || profile=release
cargo build --locked --profile "$profile" --bin hadron
built=$CARGO_TARGET_DIR/$profile
cp "$built/hadron" "$folder/hadron"
if [ -z "${HADRON_ONLY:-}" ]; then
    # The benchmark's path is in Cargo's last message about it.
    executable() {
        cargo "$@" --locked --profile "$profile" --no-run --message-format json 2>/dev/null |
            python3 -c 'import json, sys; print([m["executable"] for m in map(json.loads, sys.stdin) if m.get("executable") and m["target"]["name"] == sys.argv[1]][-1])' "$name"
    }
    name=step && cp "$(executable bench -p scheduler --bench step)" "$folder/step"
    name=forward && cp "$(executable bench -p executor --bench forward)" "$folder/forward"
    name=bench && cp "$(executable test -p hadron --test bench)" "$folder/http"
fi
printf '{"commit": "%s", "profile": "%s"}\n' "$commit" "$profile" >"$folder/about.json"
