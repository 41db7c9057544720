# usage: rows.sh TABLE[:MODEL[:OPTION=VALUE]] ...    offline rows of tables in targets/
for words in "$@"; do
    IFS=: read -r table model option <<< "$words"
    python3 -m benchmarks.targets --table "benchmarks/targets/$table.toml" --only offline \
        --model "benchmarks/shapes/${model:-$table}" ${option:+"--${option%%=*}" "${option#*=}"} \
        --repeats 2 --out "$LANE/rows.jsonl" --commit "$COMMIT"
done
