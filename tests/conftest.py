"""Settings of every test: CPU, no silent rank promotion, and the same hypothesis examples in each run.

They are environment variables, set before anything imports JAX, so that commands started by a test inherit them.
"""

import os

import hypothesis

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")
