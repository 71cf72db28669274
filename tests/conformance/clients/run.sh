#!/usr/bin/env bash
# Third-party tools from their registries, unmodified, against a server of this tree.
#
#   run.sh [BINARY [FOLDER [TOOL...]]]
#
# BINARY is a built `hadron` (default target/debug/hadron, which `cargo test` builds); virtual environments are created in FOLDER (default
# target/clients) and kept. Each executable in this script's folder is one tool: it gets BINARY and FOLDER, and fails if one of its checks
# fails. Without names all tools run but those of `manual`, whose packages take minutes of a processor to install.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
binary=$(realpath "${1:-$root/target/debug/hadron}")
folder=${2:-$root/target/clients}
mkdir -p "$folder"
folder=$(realpath "$folder")
export HADRON=$binary
[ -x "$binary" ] || { echo "no hadron at $binary: cargo build, or cargo test"; exit 1; }
shift $(($# < 2 ? $# : 2))
if ! python3 -c 'import ensurepip, venv' 2>/dev/null; then
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends python3-venv
fi

manual=" overflow_errors.py "
tools=("$@")
if [ ${#tools[@]} -eq 0 ]; then
    for script in "$here"/*; do
        [ ! -x "$script" ] || [ "$script" = "$here/run.sh" ] || [ -d "$script" ] || [[ $manual = *" $(basename "$script") "* ]] || tools+=("$(basename "$script")")
    done
fi
failed=()
attempt() { # TOOL: runs it, and keeps its output in a file
    "$here/$1" "$binary" "$folder" 2>&1 | tee "$folder/last_output.txt"
}
for tool in "${tools[@]}"; do
    echo "== $tool"
    begun=$SECONDS
    [ -x "$here/$tool" ] || tool=$tool.sh
    # Registries and machines may fail temporarily, so a tool is run again once if it fails.
    attempt "$tool" || { echo "== $tool failed once"; attempt "$tool"; } || {
        failed+=("$tool")
        cp "$folder/last_output.txt" "$folder/$tool.failed"
    }
    echo "== $tool: $((SECONDS - begun)) s"
done
# The reasons are the last lines, because the gate prints the end of its logs.
for tool in "${failed[@]}"; do
    echo "failed: $tool"
    tail -n 12 "$folder/$tool.failed"
done
[ ${#failed[@]} -eq 0 ] || exit 1
