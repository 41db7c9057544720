# usage: tests.sh COMMIT PROCESSES WORDS ...    tests that need GPUs
processes=$2; shift 2
python3 -m pytest -q -p no:cacheprovider -n "$processes" --dist worksteal -rf "$@"
