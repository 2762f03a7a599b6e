"""Four packed 20M workers whose mixing weakens as the learning rate falls (adaptive consensus), on English C4.

    python -m llama_jax.main --config=configs/c4_20m_packed4_adaptive.py --workdir=runs/c4_20m_packed4_adaptive

The archive's separate recipe at 32K targets per update: gamma is 1 for the first half, then lr / its largest value from
there on. An experiment: the archived C4 runs show no gain from it over gamma 1.
"""

from llama_jax.config import default


def get_config():
    config = default()
    config.name = "c4_20m_packed4_adaptive"
    config.training.sequence_multiple = 8
    config.training.batch_targets = 4 * 8 * 1024  # workers x sequences x context
    config.training.microbatch = 8
    config.optimizer.lr = 0.0048
    config.optimizer.beta2 = 0.999
    config.lr_schedule.warmup_steps = None
    config.lr_schedule.warmup_fraction = 0.05
    config.decentralized.workers = 4
    config.decentralized.adaptive.mode = "lr_power"
    config.decentralized.adaptive.start_frac = 0.5
    config.decentralized.adaptive.p = 1.0
    config.data.path = "data/c4"
    return config
