#!/usr/bin/env bash
# Dynamo's standalone indexer, fed by our KV events, knows how many tokens of each prompt our server has cached: after
# cuts of the connection, a late start and a restart of the server, too. REQUESTS (default 300) is the number of
# undisturbed requests of the first of three runs; `just indexer` asks for 3,600, which makes 10,800 in all. A fourth run has
# REPLICAS (default 2) replicas, each at ports of its own.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/server.sh"
venv "$2" dynamo ai-dynamo-runtime==1.6.1
"$PYTHON" "$here/dynamo_indexer.py" "$1" "$2/dynamo/indexer.log"
