"""Seconds a run: two stages of tiny Llamas on the built-in synthetic language, three seeds a point. Needs no data.

    python scripts/sweep.py --sweep=configs/sweeps/smoke.py --out=runs/sweeps/smoke

Six runs of 60 updates over the learning rate; the best goes into a wider model with two values of beta2.
"""


def get_sweep():
    return {
        "name": "smoke",
        "seeds": [1, 2, 3],
        "settings": {"training.total_updates": 60, "lr_schedule.warmup_steps": 10},
        "ties": ["optimizer.lr", "optimizer.beta2"],
        "stages": [
            {"name": "small", "config": "configs/smoke.py", "grid": {"optimizer.lr": [0.003, 0.01]}},
            {
                "name": "wide",
                "config": "configs/smoke.py",
                "settings": {"model.width": 96},
                "best": 1,
                "grid": {"optimizer.beta2": [0.95, 0.99]},
            },
        ],
    }
