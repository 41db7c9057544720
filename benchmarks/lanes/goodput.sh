# usage: goodput.sh LOAD LAYOUT[=RATES] ...    windows of benchmarks.goodput
# BEFORE names the folder with the tree of the layout `before`. The router's log, a line for each
# request, is kept in LANE/LOAD-LAYOUT.router.xz, and the workers' warnings are kept in
# LANE/LOAD-LAYOUT.warned.
load=$1; shift
for layout in "$@"; do
    IFS== read -r name rates <<< "$layout"
    python3 -m benchmarks.goodput --out "$LANE" --only "$load-$name" --commit "$COMMIT" \
        ${rates:+--rates "$rates"} ${BEFORE:+--before "$BEFORE"}
    find "$RAY_TMPDIR" -path '*/serve/*' -name '*outer*.log' -exec cat {} + \
        | xz > "$LANE/$load-$name.router.xz"
    grep -rhE --include='worker-*.err' "compiled while|WARNING|ERROR" "$RAY_TMPDIR" \
        | head -n 200 > "$LANE/$load-$name.warned"
    rm -rf "${RAY_TMPDIR:?}"
done
