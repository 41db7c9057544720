"""`python -m benchmarks.targets`: see measure.py."""

import signal
import sys

from benchmarks.targets.measure import exit_at_signal, main

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, exit_at_signal)
    sys.exit(main())
