#!/usr/bin/env bash
# Prints the numbers of the vocabulary and size checks, and of duplicate windows, for a commit.
#
# usage: tests/tidy/words_at.sh COMMIT        in the repository
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
git -C "$(git -C "$here" rev-parse --show-toplevel)" archive "$1" | tar x -C "$tree"
# The checks of this folder read the tree that CARGO_MANIFEST_DIR names when they are compiled.
for module in source_tree lexicon idioms tuples sizes; do
    echo "#[path = \"$here/$module.rs\"] mod $module;"
done >"$tree/words.rs"
CARGO_MANIFEST_DIR=$tree rustc --edition 2024 --test -A warnings -o "$tree/words" "$tree/words.rs"
rm "$tree/words.rs"
# The bounds hold for the newest commit only, so that checks of older commits may fail after they have printed their numbers.
"$tree/words" --nocapture --test-threads 1 2>&1 | sed -E 's/^test .* \.\.\. //' |
    grep -E '^[0-9]+ (types:|idioms in|functions take a tuple,|files,|functions,)' || true
for folders in "kernels/src" "kernels/src kernels/device/src"; do
    # shellcheck disable=SC2086
    (cd "$tree" && [ -d "${folders##* }" ] && echo "$folders: $("$here/duplicate_windows.py" $folders)") || true
done
