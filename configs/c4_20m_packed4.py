"""Four 20M workers packed on one accelerator, mixed over the one-peer exponential graph, on English C4.

    python -m data_pipeline.prepare --source=c4 --input=C4_FOLDER --config=configs/c4_20m_packed4.py --out=data/c4
    python -m llama_jax.main --config=configs/c4_20m_packed4.py --workdir=runs/c4_20m_packed4

The budget is that of one worker, 408,068,096 targets shared by all four: 4 x 32 sequences x 1,024 = 131,072 targets an
update, no accumulation. Learning rate and betas won the archived three-seed sweep at 128K targets per update.
"""

from llama_jax.config import default


def get_config():
    config = default()
    config.name = "c4_20m_packed4"
    config.training.sequence_multiple = 8
    config.training.microbatch = 32
    config.optimizer.lr = 0.008
    config.optimizer.beta1 = 0.95
    config.optimizer.beta2 = 0.99
    config.decentralized.workers = 4
    config.data.path = "data/c4"
    return config
