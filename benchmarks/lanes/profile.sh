# usage: profile.sh MODEL OPTION ...    where steps of a model in shapes/ spend their time
model=$1; shift
python3 -m benchmarks.engine.step_profile --model "benchmarks/shapes/$model" --load-format dummy \
    --prefill 8192 --decode 1 64 256 512 --context 512 "$@" \
    --out "$LANE/profile.jsonl" --commit "$COMMIT"
