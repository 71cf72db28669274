# Functions for the scripts of the tools: start a server that stops with the script, and create a virtual environment.

# start_server BINARY FOLDER FLAGS...: serves the demo model on a free port; sets URL, MODEL, SERVER and LOG.
start_server() {
    local binary=$1 folder=$2
    shift 2
    LOG=$(mktemp "$folder/server.XXXXXX.log")
    RUST_LOG=${RUST_LOG:-warn} "$binary" serve --port 0 "$@" 2>"$LOG" &
    SERVER=$!
    trap 'kill "$SERVER" 2>/dev/null || true; wait "$SERVER" 2>/dev/null || true; rm -f "$LOG"' EXIT
    for _ in $(seq 600); do
        URL=$(sed -n 's/.* serves .* on \(http:[^ ]*\).*/\1/p' "$LOG" | head -1)
        [ -z "$URL" ] || break
        kill -0 "$SERVER" 2>/dev/null || { cat "$LOG"; return 1; }
        sleep 0.1
    done
    [ -n "$URL" ] || { echo "not ready after a minute"; cat "$LOG"; return 1; }
    MODEL=$(sed -n 's/.* serves \(.*\) on http.*/\1/p' "$LOG" | head -1)
    export URL MODEL SERVER LOG
}

# venv FOLDER NAME PACKAGES...: creates the environment once for these packages; sets PYTHON.
venv() {
    local place="$1/$2"
    shift 2
    if [ "$(cat "$place/.packages" 2>/dev/null)" != "$*" ]; then
        rm -rf "$place"
        python3 -m venv "$place"
        "$place/bin/pip" install --quiet --disable-pip-version-check "$@"
        echo "$*" >"$place/.packages"
    fi
    PYTHON="$place/bin/python"
}
