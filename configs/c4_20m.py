"""20M Llama on English C4: 20,403,520 parameters, 20 targets for each of them.

    python -m data_pipeline.prepare --source=c4 --input=C4_FOLDER --config=configs/c4_20m.py --out=data/c4
    python -m llama_jax.main --config=configs/c4_20m.py --workdir=runs/c4_20m

408,070,144 targets in 3,120 updates of 131,072. Learning rate, beta2 and batch won the archived three-seed sweep at
128K targets per update; initialization, context and schedule are engineering choices of the same archive.
"""

from llama_jax.config import default


def get_config():
    config = default()
    config.name = "c4_20m"
    config.data.path = "data/c4"
    return config
