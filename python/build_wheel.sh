#!/usr/bin/env bash
# Builds the wheel of hadron-engine.
#
#   build_wheel.sh [LIBRARY [FOLDER]]
#
# Without LIBRARY, the library is built in release mode and linked against glibc 2.28, and the tag of the wheel is checked. This needs
# cargo, and installs zig, cargo-zigbuild and auditwheel from PyPI to target/wheel-tools.
# LIBRARY is a built libhadron_plugin.so. A wheel of it is for tests: the tag is not checked.
# The wheel is written to FOLDER (default dist). PYTHON (default python3) needs pip, and setuptools 77 if LIBRARY is given.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/.." && pwd)
library=${1:+$(realpath "$1")}
folder=$(mkdir -p "${2:-dist}" && realpath "${2:-dist}")
python=${PYTHON:-python3}
triple=x86_64-unknown-linux-gnu
glibc=2.28
target=$(realpath -m "${CARGO_TARGET_DIR:-$root/target}")
tools="$target/wheel-tools"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# install_tools: creates the environment of the tools once for their versions.
install_tools() {
    cmp -s "$here/requirements-wheel.txt" "$tools/.packages" && return
    rm -rf "$tools"
    "$python" -m venv "$tools"
    "$tools/bin/pip" install --quiet --disable-pip-version-check --no-deps --requirement "$here/requirements-wheel.txt"
    cp "$here/requirements-wheel.txt" "$tools/.packages"
}

# build_library: builds the library against the glibc of the tag.
build_library() {
    (
        cd "$root"
        PATH="$tools/bin:$PATH" CARGO_TARGET_DIR="$target" cargo zigbuild --locked --release --package plugin --target "$triple.$glibc"
    )
    library="$target/$triple/release/libhadron_plugin.so"
}

# check_wheel WHEEL: fails if the library needs a later glibc than the tag of the wheel promises.
check_wheel() {
    local shown tag minor
    shown=$("$tools/bin/auditwheel" show "$1")
    tag=$(grep -zoE 'platform\s+tag:\s+"[a-z0-9_]+"' <<<"$shown" | tr -d '\0' | grep -oE '"[a-z0-9_]+"' | tr -d '"' || true)
    minor=$(sed -nE 's/^manylinux_2_([0-9]+)_x86_64$/\1/p' <<<"$tag")
    if [ -z "$minor" ] || [ "$minor" -gt "${glibc#2.}" ]; then
        echo "$shown"
        echo "error: auditwheel finds the tag $tag, but the tag of the wheel promises glibc $glibc" >&2
        return 1
    fi
    echo "auditwheel: $tag"
}

is_release=$([ -z "$library" ] && echo 1 || echo 0)
if [ "$is_release" = 1 ]; then
    install_tools
    build_library
    python="$tools/bin/python"
fi
cp -r "$here/pyproject.toml" "$here/setup.py" "$here/README.md" "$here/hadron" "$work"
find "$work" -name __pycache__ -prune -exec rm -rf {} +
cp "$library" "$work/hadron/libhadron_plugin.so"
"$python" -m pip wheel --quiet --no-deps --no-build-isolation --no-cache-dir --disable-pip-version-check --wheel-dir "$folder" "$work"
ls "$folder"/hadron_engine-*.whl
if [ "$is_release" = 1 ]; then
    check_wheel "$folder"/hadron_engine-*.whl
else
    found=$(grep -aoE 'GLIBC_2\.[0-9]+' "$library" | sort -t . -k 2 -n | tail -n 1)
    [ "${found#GLIBC_2.}" -le "${glibc#2.}" ] || echo "warning: the library needs ${found/_/ }, but the tag of the wheel promises glibc $glibc" >&2
fi
