"""50M Llama on English C4: 48,507,392 parameters, 20 targets for each of them.

    python -m data_pipeline.prepare --source=c4 --input=C4_FOLDER --config=configs/c4_50m.py --out=data/c4
    python -m llama_jax.main --config=configs/c4_50m.py --workdir=runs/c4_50m

970,147,840 targets in 29,640 updates of 32,768. The optimizer settings won the archived single-seed campaign, which
shows neither robustness over seeds nor that the batch size is the best one.
"""

from llama_jax.config import default


def get_config():
    config = default()
    config.name = "c4_50m"
    config.model.layers = 10
    config.model.width = 512
    config.model.heads = 8  # head size 512 / 8 = 64
    config.model.ffn = 1408
    config.training.batch_targets = 32 * 1024
    config.training.microbatch = 32
    config.optimizer.lr = 0.001
    config.optimizer.beta2 = 0.99
    config.data.path = "data/c4"
    return config
