"""Eight packed 20M workers, mixed over the one-peer exponential graph, on English C4.

    python -m llama_jax.main --config=configs/c4_20m_packed8.py --workdir=runs/c4_20m_packed8

8 x 16 sequences x 1,024 = 131,072 targets an update. The optimizer settings are the best of the public eight-worker
study tiny-llm.
"""

from llama_jax.config import default


def get_config():
    config = default()
    config.name = "c4_20m_packed8"
    config.training.sequence_multiple = 8
    config.training.microbatch = 16
    config.optimizer.beta1 = 0.95
    config.optimizer.beta2 = 0.999
    config.decentralized.workers = 8
    config.data.path = "data/c4"
    return config
