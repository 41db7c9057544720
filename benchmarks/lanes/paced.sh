# usage: paced.sh NAME OPTION ...    benchmarks.engine.paced_steps of Llama-8B, with a line a step
name=$1; shift
python3 -m benchmarks.engine.paced_steps benchmarks/shapes/llama-3.1-8b --load-format dummy "$@" \
    --steps "$LANE/$name-steps.jsonl" --out "$LANE/$name.jsonl"
