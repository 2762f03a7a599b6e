"""90M Llama on English C4: 91,605,120 parameters, 20 targets for each of them.

    python -m data_pipeline.prepare --source=c4 --input=C4_FOLDER --config=configs/c4_90m.py --out=data/c4
    python -m llama_jax.main --config=configs/c4_90m.py --workdir=runs/c4_90m

1,832,101,888 targets in 55,920 updates of 32,768. The optimizer settings won the archived single-seed campaign, which
shows neither robustness over seeds nor that the batch size is the best one.
"""

from llama_jax.config import default


def get_config():
    config = default()
    config.name = "c4_90m"
    config.model.layers = 14
    config.model.width = 640
    config.model.heads = 10  # head size 640 / 10 = 64
    config.model.ffn = 1792
    config.training.batch_targets = 32 * 1024
    config.training.microbatch = 32
    config.optimizer.lr = 0.001
    config.optimizer.beta2 = 0.99
    config.data.path = "data/c4"
    return config
