"""A small Llama that learns English on two CPU cores in a few minutes; scripts/quickstart.sh runs it.

    python -m data_pipeline.prepare --source=mini --mini_clients=pip --tokenizer=bpe:4096 --out=data/quickstart
    python -m llama_jax.main --config=configs/quickstart.py --workdir=runs/quickstart

Numbers chosen for time, not for quality. Expect a validation loss far below the unigram entropy of the corpus (about
6.7 nats) and samples that look like broken English.
"""

from llama_jax.config import default


def get_config():
    config = default()
    config.name = "quickstart"
    config.model.vocab_size = 4096
    config.model.context = 128
    config.model.layers = 3
    config.model.width = 128
    config.model.heads = 4
    config.model.ffn = 352
    config.training.targets_per_parameter = None
    config.training.total_updates = 450
    config.training.epoch_targets_per_parameter = 0.5
    config.training.batch_targets = 16 * 128
    config.training.microbatch = 16
    config.optimizer.lr = 0.005
    config.lr_schedule.warmup_steps = None
    config.lr_schedule.warmup_fraction = 0.05
    config.evaluation.subset_sequences = 256
    config.evaluation.batch_sequences = 64
    config.data.path = "data/quickstart"
    return config
