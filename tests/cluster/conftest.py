"""Nothing of the fake engine is installed: workers of a local Ray find it on PYTHONPATH."""

import os
import sys
from pathlib import Path

HERE = str(Path(__file__).parent)
sys.path.insert(0, HERE)
os.environ["PYTHONPATH"] = os.pathsep.join([HERE, *filter(None, [os.environ.get("PYTHONPATH")])])
