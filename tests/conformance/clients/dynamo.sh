#!/usr/bin/env bash
# Dynamo's standalone indexer, which receives Hadron's KV events, returns the number of cached tokens of each prompt on the server, also
# after connection failures, a late start and a server restart. REQUESTS (default 300) is the number of undisturbed requests of the first of
# three runs; `just indexer` sets 3,600, which makes 10,800 in total. A fourth run has REPLICAS (default 2) replicas, each with its own
# ports.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/server.sh"
venv "$2" dynamo ai-dynamo-runtime==1.6.1
"$PYTHON" "$here/dynamo_indexer.py" "$1" "$2/dynamo/indexer.log"
