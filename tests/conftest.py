"""Settings of every test: CPU, no silent rank promotion, and the same hypothesis examples in each run.

They are environment variables, set before anything imports JAX, so that commands started by a test inherit them.
"""

import importlib.metadata
import os
import signal

import hypothesis

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")

# Most of the time of the tests is the compilation of small programs: LLVM at its lowest level halves it, and once more
# do XLA's old emitters of CPU code, which JAX 0.12 no longer has. Processes of harness.Commands compile as those of
# users do, unless a test compares them with a run in this one.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
OLD_EMITTERS = "--xla_cpu_use_fusion_emitters=false"
_flags = os.environ.get("XLA_FLAGS", "").split()
if importlib.metadata.version("jaxlib").startswith("0.10.") and OLD_EMITTERS not in _flags:
    os.environ["XLA_FLAGS"] = " ".join([*_flags, OLD_EMITTERS])

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell's background jobs ignore it, and so would their children
    signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")
