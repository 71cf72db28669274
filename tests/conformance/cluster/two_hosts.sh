#!/usr/bin/env bash
# Two hosts on one machine: network namespaces with a link between them, which is cut; then a two-node job run by Slurm.
#
# usage: two_hosts.sh HADRON          as root; Debian: apt-get install slurm-wlm munge iproute2 curl jq
# Prints events with their times, and exits with 1 at the first failed check.
set -euo pipefail
hadron=$(realpath "$1")
repo=$(realpath "$(dirname "$0")/../../..")
work=$(mktemp -d /tmp/two-hosts.XXXXXX)
export HADRON_CLUSTER_SECRET=0123456789abcdef0123456789abcdef PATH="$(dirname "$hadron"):$PATH"
hosts=(10.77.0.1 10.77.0.2)

on() { local node=$1; shift; ip netns exec "hadron$node" unshare --uts sh -c "hostname node$node; exec \"\$0\" \"\$@\"" "$@"; }
now_ms() { echo $(($(date +%s%N) / 1000000)); }
fail() { echo "FAILED: $*"; tail -n 20 "$work"/*.log; exit 1; }
within() { # seconds, what, command...
    local until=$(($(now_ms) + $1 * 1000)) what=$2; shift 2
    until "$@" >/dev/null 2>&1; do [ "$(now_ms)" -lt "$until" ] || fail "$what"; sleep 0.05; done
}
ready() { on 0 curl -sf "http://${hosts[0]}:$1/readyz"; }
# Prints the token ids of a long greedy output of the replica that the second argument selects.
ids() { on 0 curl -s --fail-with-body --max-time 60 "http://${hosts[0]}:$1/v1/completions" "${@:3}" -H 'Content-Type: application/json' \
    -d "{\"prompt\":[3,4,5,6],\"max_tokens\":2000,\"ignore_eos\":true,\"temperature\":0,\"return_token_ids\":true${2:+,\"data_parallel_rank\":$2}}" | jq -c '.choices[0].token_ids'; }
clean() {
    set +e
    exec 2>/dev/null
    for node in 0 1; do ip netns pids "hadron$node" | xargs -r kill -KILL; ip netns del "hadron$node"; done
    [ -z "${munged:-}" ] || kill "$munged"
    cp "$work/hosts" /etc/hosts
    rm -rf "$work"
}
cp /etc/hosts "$work/hosts"
trap clean EXIT

for node in 0 1; do
    ip netns add "hadron$node"
    ip -n "hadron$node" link set lo up
done
ip link add link0 netns hadron0 type veth peer name link1 netns hadron1
for node in 0 1; do
    ip -n "hadron$node" addr add "${hosts[$node]}/24" dev "link$node"
    ip -n "hadron$node" link set "link$node" up
    echo "${hosts[$node]} node$node" >>/etc/hosts
done

serve() { # node, flags; run in its own shell, which becomes the server
    local node=$1; shift
    exec ip netns exec "hadron$node" "$hadron" serve --nnodes 2 --node-rank "$node" --master-addr "${hosts[0]}" "$@" --threads 1 \
        --dtype float32 --host "${hosts[$node]}" --port 8000 2>>"$work/node$node.log"
}

echo "== two namespaces"
serve 0 -dp 2 & node0=$!
(HADRON_CLUSTER_SECRET=ffffffffffffffffffffffffffffffff; serve 1 -dp 2) && fail "a wrong secret was accepted"
grep -q secret "$work/node1.log" || fail "the log of node 1 does not name the wrong secret"
echo "a wrong secret is rejected: $(grep -m1 -o '[^:]*secret.*' "$work/node1.log")"
serve 1 -dp 2 & node1=$!
within 30 "the start of two nodes" ready 8000
alone=$(ids 8000 0) || fail "node 0 rejects requests: $(on 0 curl -s "http://${hosts[0]}:8000/v1/models")"
[ "$(ids 8000 1)" = "$alone" ] || fail "node 1 generates other ids"
echo "both hosts answer with the same $(jq length <<<"$alone") ids"

# Each output has its own file: jq writes it in several parts, and the parts of concurrent outputs would mix.
for n in 1 2 3; do ids 8000 "" >"$work/answer$n" & asking+=($!); done
sleep 0.3
ip -n hadron0 link set link0 down
cut=$(now_ms)
within 15 "the exit of node 1" sh -c "! kill -0 $node1"
wait $node1 && fail "node 1 ended with 0" || code=$?
echo "link down: node 1 exited after $(($(now_ms) - cut)) ms with code $code"
for n in 1 2 3; do
    wait "${asking[n - 1]}" || fail "request $n failed"
    [ "$(<"$work/answer$n")" = "$alone" ] || fail "a token of request $n was changed or repeated: $(<"$work/answer$n")"
done
echo "three requests in flight ended with the same ids after $(($(now_ms) - cut)) ms; node 0 logged $(grep -c 'restarting\|node failed' "$work/node0.log") lines of the failure"
within 5 "node 0 continues to serve" ready 8000
ip -n hadron0 link set link0 up
serve 1 -dp 2 & node1=$!
back=$(now_ms)
within 30 "node 1 joins again" sh -c "grep -q 'executors restarted' '$work/node0.log'"
[ "$(ids 8000 1)" = "$alone" ] || fail "the restored node generates other ids"
echo "link up: node 1 serves again after $(($(now_ms) - back)) ms"
kill -TERM $node0
wait $node0 || fail "node 0 ended with $?"
within 10 "node 1 ends with node 0" sh -c "! kill -0 $node1"

echo "== one replica on both hosts"
ip netns exec hadron0 "$hadron" serve -tp 2 --threads 1 --dtype float32 --host "${hosts[0]}" --port 8001 2>>"$work/alone.log" & one_host=$!
within 30 "the start of both ranks on one host" ready 8001
split=$(ids 8001 "") || fail "two ranks on one host reject requests"
kill -TERM $one_host
wait $one_host || fail "two ranks on one host ended with $?"
rm "$work"/node?.log
serve 0 -tp 2 & node0=$!
serve 1 -tp 2 & node1=$!
within 30 "the start of one rank on each host" ready 8000
[ "$(ids 8000 "")" = "$split" ] || fail "two ranks on two hosts generate other ids than on one host"
asking=()
for n in 1 2 3; do ids 8000 "" >"$work/answer$n" & asking+=($!); done
sleep 0.3
ip -n hadron0 link set link0 down
within 15 "the exit of node 1" sh -c "! kill -0 $node1"
ip -n hadron0 link set link0 up
serve 1 -tp 2 & node1=$!
back=$(now_ms)
for n in 1 2 3; do
    wait "${asking[n - 1]}" || fail "request $n failed"
    [ "$(<"$work/answer$n")" = "$split" ] || fail "a token of request $n was changed or repeated: $(<"$work/answer$n")"
done
echo "three requests in flight waited for the link, and ended with the same ids $(($(now_ms) - back)) ms after node 1 was started again"
kill -TERM $node0
wait $node0 || fail "node 0 ended with $?"
within 10 "node 1 ends with node 0" sh -c "! kill -0 $node1"
unset HADRON_CLUSTER_SECRET

mkdir -p "$work/slurm" /run/munge
[ -f /etc/munge/munge.key ] || mungekey
chown munge: /run/munge /etc/munge/munge.key
if ! munge -n >/dev/null 2>&1; then
    runuser -u munge -- munged
    munged=$(cat /run/munge/munged.pid)
fi
cat >"$work/slurm/slurm.conf" <<CONF
ClusterName=hadron
SlurmctldHost=node0(${hosts[0]})
SlurmUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
StateSaveLocation=$work/slurm/state
SlurmdSpoolDir=$work/slurm/spool.%n
SlurmdPidFile=$work/slurm/slurmd.%n.pid
SlurmctldPidFile=$work/slurm/slurmctld.pid
SlurmdLogFile=$work/slurmd.%n.log
SlurmctldLogFile=$work/slurmctld.log
SlurmdParameters=config_overrides
NodeName=node0 NodeAddr=${hosts[0]} CPUs=$(nproc) State=UNKNOWN
NodeName=node1 NodeAddr=${hosts[1]} CPUs=$(nproc) State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
echo CgroupPlugin=cgroup/v1 >"$work/slurm/cgroup.conf"
mkdir -p "$work/slurm/"{state,spool.node0,spool.node1}
export SLURM_CONF=$work/slurm/slurm.conf
echo "== a job of two nodes, $(srun -V)"
(on 0 slurmctld -D >/dev/null 2>&1 &)
for node in 0 1; do (on "$node" slurmd -D -N "node$node" >/dev/null 2>&1 &) done
within 30 "the nodes of Slurm are idle" sh -c "ip netns exec hadron0 sinfo -h -o %D%t | grep -q 2idle"
echo key >"$work/keys"; chmod 600 "$work/keys"
job=$(HADRON_KEYS=$work/keys on 0 sbatch --parsable --output="$work/job.log" "$repo/deploy/slurm/hadron.sbatch" --device cpu --threads 1 --dtype float32)
within 60 "the job serves" on 0 curl -sf "http://${hosts[0]}:8000/readyz"
[ "$(ids 8000 0 -H 'Authorization: Bearer key')" = "$alone" ] || fail "node 0 of the job generates other ids"
[ "$(ids 8000 1 -H 'Authorization: Bearer key')" = "$alone" ] || fail "node 1 of the job generates other ids"
echo "job $job runs on $(ip netns exec hadron0 squeue -h -o %N -j "$job"): both nodes answer with the same ids"
on 0 scancel "$job"
within 40 "the job ends" sh -c "! ip netns exec hadron0 squeue -h -j $job | grep -q ."
job=$(HADRON_KEYS=$work/keys on 0 sbatch --parsable --output="$work/job2.log" "$repo/deploy/slurm/hadron.sbatch" --device cpu --threads 1 --dtype float32 -tp 2 -dp 1)
within 60 "the second job serves" on 0 curl -sf "http://${hosts[0]}:8000/readyz"
[ "$(ids 8000 "" -H 'Authorization: Bearer key')" = "$split" ] || fail "a replica over both nodes of the job generates other ids"
echo "job $job: a replica over both nodes answers with the same ids"
on 0 scancel "$job"
within 40 "the job ends" sh -c "! ip netns exec hadron0 squeue -h -j $job | grep -q ."
within 5 "the end of all processes of the job" sh -c "! (ip netns pids hadron0; ip netns pids hadron1) | xargs ps -o args= -p | grep -q 'hadron serve\|hadron executor'"
echo "cancelled: no process of the job is left"
