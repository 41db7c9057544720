# usage: tests.sh PROCESSES WORDS ...    tests that need GPUs, in so many processes
processes=$1; shift
python3 -m pytest -q -p no:cacheprovider -p no:benchmark -n "$processes" --dist worksteal -rf "$@"
