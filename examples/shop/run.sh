#!/usr/bin/env bash
# From a shop's csv to live recommendations, in an empty folder (docs/production.md tells each step).
#   bash run.sh [OPTIONS OF TRAINING, such as --epochs=1]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python "$here/make_orders.py" . "${CUSTOMERS:-1500}"

# 1. the csv becomes a dataset: dataset/shop/
recbole-pos convert orders.csv --name shop --user customer --item product --time "bought at" --drop "order no"

# 2. which model? one table, the same split and search for each
recbole-pos compare -d shop -m PosSASRec,TORoPE,Pop --seeds 2 "$@"

# 3. the one that is used
recbole-pos run -m TORoPE -d shop --run_dir live "$@"

# 4. for every customer what is in stock and not bought yet; for baskets of anybody
recbole-pos recommend live -k 20 --exclude_seen --items in_stock.txt --out recommendations.parquet
recbole-pos recommend live -k 3 --histories baskets.jsonl --out baskets.csv
recbole-pos similar live "red kites starter set" -k 5

# 5. a week later: known products are recommended at once, new ones after an update
recbole-pos convert later.csv --name shop --user customer --item product --time "bought at" --drop "order no" --overwrite
recbole-pos recommend live -k 20 --exclude_seen --out recommendations.parquet
recbole-pos update live --run_dir live-2 "$@"

# 6. out of Python, or behind HTTP
recbole-pos export live-2 --format onnx --to exported
recbole-pos serve live-2 --port "${PORT:-8080}" &
server=$!
trap 'kill $server' EXIT
until curl --silent --fail --output /dev/null "localhost:${PORT:-8080}/health"; do
    kill -0 $server && sleep 0.2
done
curl --silent --fail --header "Content-Type: application/json" --data '{"histories": [{"items": ["red kites starter set"], "times": [1767000000]}], "k": 3}' \
    "localhost:${PORT:-8080}/recommend"
