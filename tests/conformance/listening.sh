#!/usr/bin/env bash
# Addresses that a server and its executors listen on and connect to by default, according to `ss`: this machine only.
#
# usage: listening.sh HADRON          Debian: apt-get install iproute2 curl
set -euo pipefail
hadron=$(realpath "$1") log=$(mktemp)
"$hadron" serve --port 0 --executor process --data-parallel-size 2 --threads 1 \
    --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq"}' 2>"$log" &
server=$!
trap 'kill -KILL $server 2>/dev/null || true; rm -f "$log"' EXIT
fail() { echo "FAILED: $*"; cat "$log"; exit 1; }

for _ in $(seq 600); do
    at=$(sed -n 's/.* on \(http:\/\/[^ ]*\).*/\1/p' "$log" | head -n 1)
    [ -z "$at" ] || break
    kill -0 "$server" || fail "no start"
    sleep 0.1
done
curl -sf "$at/v1/completions" -H 'Content-Type: application/json' -d '{"prompt":"a","max_tokens":5}' >/dev/null || fail "no answer"

mine="pid=($(pgrep -P "$server" | paste -sd '|')|$server),"
sockets=$(ss -Htuanp | grep -E "$mine") || fail "no socket at all"
echo "$sockets"
# Columns of `ss`: state, two queue sizes, local address, peer address.
beyond=$(awk '$5 !~ /^(127\.|\[::1\]|\[::ffff:127\.)/ || ($2 != "LISTEN" && $6 !~ /^(127\.|\[::1\]|\[::ffff:127\.)/)' <<<"$sockets")
[ -z "$beyond" ] || fail "beyond this machine: $beyond"
listening=$(awk '$2 == "LISTEN" { print $5 }' <<<"$sockets" | sort -u)
expected=$(printf '%s\n' "${at#http://}" 127.0.0.1:5557 127.0.0.1:5558 | sort)
[ "$listening" = "$expected" ] || fail "listening on" $listening "instead of" $expected
grep -q "pid=$server," <<<"$sockets" || fail "the sockets of others"
echo "all on loopback"
