# usage: rows.sh COMMIT TABLE[:MODEL[:OPTION=VALUE]] ...    offline rows of tables in targets/
commit=$1; shift
for words in "$@"; do
    IFS=: read -r table model option <<< "$words"
    python3 -m benchmarks.targets --table "benchmarks/targets/$table.toml" --only offline \
        --model "benchmarks/shapes/${model:-$table}" ${option:+"--${option%%=*}" "${option#*=}"} \
        --repeats 2 --out "$LANE/rows.jsonl" --commit "$commit"
done
