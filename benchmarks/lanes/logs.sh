# usage: logs.sh NAME    keeps what a cluster wrote, and removes the rest: the router's log, a line
# for each request, in LANE/NAME.router.xz, and the workers' warnings in LANE/NAME.warned
find "$RAY_TMPDIR" -path '*/serve/*' -name '*outer*.log' -exec cat {} + | xz > "$LANE/$1.router.xz"
grep -rhE --include='worker-*.err' "compiled while|WARNING|ERROR" "$RAY_TMPDIR" \
    | head -n 200 > "$LANE/$1.warned"
rm -rf "${RAY_TMPDIR:?}"
