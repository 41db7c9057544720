"""Writes the text that `pdserve calibrate-kv` uses by default: documents like those on which the
demo model was trained.

    python -m demo.sample_text > pdserve/calibration/sample.txt
"""

import random
import sys

from demo.documents import document

NUM_DOCUMENTS = 40
TOKENS = 250
SEED = "calibration"


def sample_text() -> str:
    rng = random.Random(SEED)
    return "\n\n".join(document(rng, TOKENS, recall_share=0.4) for _ in range(NUM_DOCUMENTS)) + "\n"


if __name__ == "__main__":
    sys.stdout.write(sample_text())
