#!/usr/bin/env bash
# Unmodified vLLM and SGLang with Hadron's models, on a CPU: ABI, registration, refusals, golden tokens, HTTP.
#
#   run.sh [--turn N] [LIBRARY [HADRON [FOLDER [HOST...]]]]
#
# LIBRARY and HADRON are a built libhadron_plugin.so and `hadron` (default: those of target/release). Virtual environments are created in
# FOLDER (default target/plugins) and kept; the first run downloads about 1 GB per host. HOST is vllm or sglang (default: both;
# with --turn, one of them: vllm if N is even, sglang if N is odd).
# PLUGINS_PYTHON (default: python3.12 of pyenv or of PATH, else python3) is the Python of the environments.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
default_hosts=(vllm sglang)
if [ "${1:-}" = --turn ]; then
    default_hosts=("${default_hosts[$2 % 2]}")
    shift 2
fi
library=$(realpath "${1:-$root/target/release/libhadron_plugin.so}")
hadron=$(realpath "${2:-$root/target/release/hadron}")
folder=$(mkdir -p "${3:-$root/target/plugins}" && realpath "${3:-$root/target/plugins}")
hosts=("${@:4}")
[ ${#hosts[@]} -gt 0 ] || hosts=("${default_hosts[@]}")
base_python=${PLUGINS_PYTHON:-$(find ~/.pyenv/versions -path '*3.12*/bin/python3.12' 2>/dev/null | sort | tail -n 1 || true)}
base_python=${base_python:-$(command -v python3.12 || command -v python3)}
"$base_python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "run.sh: $base_python is older than Python 3.11" >&2
    exit 1
}
export PYTHONDONTWRITEBYTECODE=1 PYTHONWARNINGS=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1

# venv HOST: creates the environment once for the packages of the host.
venv() {
    local place="$folder/$1" packages="$here/requirements-$1.txt" site
    cmp -s "$packages" "$place/.packages" && return
    echo "== installs $1"
    rm -rf "$place"
    "$base_python" -m venv "$place"
    "$place/bin/pip" install --quiet --no-deps --requirement "$packages"
    site=$("$place/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    "$place/bin/python" "$here/cpu_stubs.py" "$site/torch/lib" "$place/stubs"
    cp "$packages" "$place/.packages"
}

# enter HOST: uses the environment of the host, with the packages under test in a folder of their own: the environment is not changed.
enter() {
    local place="$folder/$1" site
    venv "$1"
    python="$place/bin/python"
    site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    export LD_LIBRARY_PATH="$place/stubs:$site/nvidia/cu13/lib" VLLM_CACHE_ROOT="$folder/vllm-cache"
    rm -rf "$folder/$1-site" "$folder/dist"
    PYTHON="$python" "$root/python/build_wheel.sh" "$library" "$folder/dist"
    [ "$(ls "$folder/dist")" = "hadron_engine-$("$hadron" --version | grep -oE '[0-9.]+' | head -n 1)-py3-none-manylinux_2_28_x86_64.whl" ]
    rm -rf "$folder/harness"
    cp -r "$here/harness_$1" "$folder/harness"
    "$python" -m pip install --quiet --no-deps --no-build-isolation --target "$folder/$1-site" "$folder"/dist/*.whl "$folder/harness"
    export PYTHONPATH="$folder/$1-site:$here"
    [ "$1" = vllm ] || export SGLANG_USE_CPU_ENGINE=1 TRITON_INTERPRET=1
}

# check NAME COMMAND...: runs a command, and keeps its output in a file whose end is printed if the command fails.
check() {
    local name=$1 begun=$SECONDS
    shift
    if ! "$@" >"$folder/$name.log" 2>&1; then
        tail -n 120 "$folder/$name.log"
        echo "failed: $name"
        return 1
    fi
    grep -E '^(Ran |OK|.* answers over HTTP)' "$folder/$name.log" || true
    echo "== $name: $((SECONDS - begun)) s"
}

check package python3 -m unittest discover -s "$root/python/tests"
for host in "${hosts[@]}"; do
    enter "$host"
    if [ "$host" = "${hosts[0]}" ]; then
        check abi "$python" "$here/abi_checks.py"
        check ranks "$python" "$here/ranks_checks.py"
    fi
    # Two processes at once, because they mostly import modules.
    check "$host-engine" "$python" "$here/${host}_checks.py" &
    engine=$!
    failed=0
    check "$host-http" "$python" "$here/http_checks.py" "$host" "$hadron" || failed=1
    check "$host-ranks" "$python" "$here/server_ranks_checks.py" "$host" || failed=1
    wait "$engine" || failed=1
    [ $failed = 0 ]
done
