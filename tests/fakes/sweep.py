"""scripts/sweep.py with the fake trainer instead of llama_jax.main: the same command line."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts import sweep

sweep.TRAIN = (sys.executable, str(Path(__file__).with_name("trainer.py")))
if __name__ == "__main__":
    sys.exit(sweep.main(sys.argv[1:]))
