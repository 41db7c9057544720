# usage: profile.sh MODEL ...    where steps of models in shapes/ spend their time
for model in "$@"; do
    python3 -m benchmarks.engine.step_profile --model "benchmarks/shapes/$model" \
        --load-format dummy --prefill 8192 --decode 1 64 512 --context 512 \
        --out "$LANE/profile.jsonl" --commit "$COMMIT"
done
