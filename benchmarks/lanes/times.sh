# usage: times.sh MODEL    the profile of a model in shapes/ that simulations take step times from
python3 -m pdserve.cluster.cli profile --model "benchmarks/shapes/$1" --load-format dummy \
    --out "$LANE/$1.json"
