#!/usr/bin/env bash
# Builds the wheel of hadron-engine.
#
#   build_wheel.sh LIBRARY [FOLDER]
#
# LIBRARY is a built libhadron_plugin.so; the wheel is written to FOLDER (default dist). PYTHON (default python3) needs pip and setuptools.
# A release needs a library that was linked against glibc 2.28, e.g. `cargo zigbuild --release --target x86_64-unknown-linux-gnu.2.28`.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
library=$(realpath "$1")
folder=$(mkdir -p "${2:-dist}" && realpath "${2:-dist}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r "$here/pyproject.toml" "$here/setup.py" "$here/README.md" "$here/hadron" "$work"
cp "$library" "$work/hadron/libhadron_plugin.so"
"${PYTHON:-python3}" -m pip wheel --quiet --no-deps --no-build-isolation --no-cache-dir --disable-pip-version-check --wheel-dir "$folder" "$work"
ls "$folder"/hadron_engine-*.whl
glibc=$(grep -aoE 'GLIBC_2\.[0-9]+' "$library" | sort -t . -k 2 -n | tail -n 1)
[ "${glibc#GLIBC_2.}" -le 28 ] || echo "warning: the library needs ${glibc/_/ }, but the tag of the wheel promises glibc 2.28" >&2
