"""Seconds: a tiny Llama on the built-in synthetic language, whose entropy the loss approaches. Needs no data.

    python -m llama_jax.main --config=configs/smoke.py --workdir=runs/smoke

The log prints the entropy of the language; ln(64) = 4.16 nats is where an untrained model starts.
"""

from llama_jax.config import default


def get_config():
    config = default()
    config.name = "smoke"
    config.model.vocab_size = 64
    config.model.context = 64
    config.model.layers = 2
    config.model.width = 64
    config.model.heads = 2
    config.model.ffn = 128
    config.training.targets_per_parameter = None
    config.training.total_updates = 200
    config.training.epoch_targets_per_parameter = 1.0
    config.training.batch_targets = 16 * 64
    config.training.microbatch = 16
    config.optimizer.lr = 0.01
    config.lr_schedule.warmup_steps = 20
    config.data.source = "synthetic"
    config.data.synthetic_validation_sequences = 256
    config.evaluation.subset_sequences = 64
    config.evaluation.batch_sequences = 64
    return config
