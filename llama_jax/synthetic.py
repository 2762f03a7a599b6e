"""The built-in synthetic source: a seeded Markov language whose entropy rate is known in closed form. Needs numpy only.

The hidden state walks on the integers modulo the vocabulary size V: each step adds one of k fixed, distinct offsets,
chosen with fixed probabilities, and a fixed random relabelling turns states into token ids. So every token has k
successors with the same probabilities, the entropy rate is exactly the entropy of those probabilities, ids are uniform
(a model that only counts tokens stays at ln V), one token of history is all there is to know, and a whole group is one
cumulative sum. Offset 1 is always among them, so that every token can be reached.
"""

import hashlib
import json
import math

import numpy as np
import numpy.typing as npt

from llama_jax.errors import ConfigError

LANGUAGE_VERSION = 1

_DRAWS = 1 << 16  # a step uses 16 random bits, so probabilities are whole 65,536ths
_HALVINGS = 4
_TAG = 0x53594E54  # keeps these random streams apart from the loader's permutations
_LANGUAGE, _TRAIN, _VALIDATION = 0, 1, 2


def successor_counts(branching: int) -> list[int]:
    """Probabilities of the k successors in 65,536ths: 1/2, 1/4, 1/8, 1/16, and equal shares of what is left.

    k = 1: 1; k = 2: 1/2, 1/2; k = 3: 1/2, 1/4, 1/4; k = 4: 1/2, 1/4, 1/8, 1/8.
    """
    halves = [_DRAWS >> (i + 1) for i in range(min(branching - 1, _HALVINGS))]
    rest, others = _DRAWS - sum(halves), branching - len(halves)
    return halves + [rest // others + (i < rest % others) for i in range(others)]


class SyntheticSource:
    """The language as a source of the loader: the same attributes as data.CacheSource, and nothing on disk.

    Group g is `group_sequences` sequences of `context` targets, generated from (seed, g) alone; after `groups` groups
    the loader starts its second pass. The validation stream has a random stream of its own. `entropy` is in nats.
    Raises ConfigError when the vocabulary has fewer ids than `branching`.
    """

    def __init__(
        self,
        vocab_size: int,
        context: int,
        seed: int,
        branching: int = 4,
        group_sequences: int = 4096,
        validation_sequences: int = 1024,
        groups: int = 16_384,
    ) -> None:
        if not 1 <= branching <= min(vocab_size, _DRAWS >> _HALVINGS):
            raise ConfigError(
                f"data.synthetic_branching = {branching} must be from 1 to model.vocab_size = {vocab_size} "
                f"and at most {_DRAWS >> _HALVINGS}"
            )
        self.vocab_size = vocab_size
        self.context = self.targets = context
        self.permuted = True
        self.group_size = group_sequences
        self.groups = [(g * group_sequences, group_sequences) for g in range(groups)]
        self.sequences = groups * group_sequences
        self.validation_sequences = validation_sequences
        self.dtype = np.dtype("<u2" if vocab_size <= 65_536 else "<u4")
        self.bytes_per_token: float | None = None
        self.manifest: None = None
        counts = successor_counts(branching)
        self.entropy: float | None = -math.fsum(c / _DRAWS * math.log(c / _DRAWS) for c in counts)
        recipe = [LANGUAGE_VERSION, vocab_size, context, seed, branching, group_sequences, validation_sequences, groups]
        self.fingerprint = hashlib.sha256(json.dumps(["synthetic", *recipe]).encode()).hexdigest()
        self._seed = seed
        bits = self._bits(_LANGUAGE, 0)
        # Only the bit generator's raw stream is used: NumPy promises that it never changes.
        self._ids_V = np.argsort(bits.random_raw(vocab_size), kind="stable").astype(self.dtype)
        others = 2 + np.argsort(bits.random_raw(max(vocab_size - 2, 0)), kind="stable")
        offsets = np.concatenate([[1], others, [0]])[:branching] % vocab_size
        self._offset_of_draw = np.repeat(offsets, counts)
        self._validation: np.ndarray | None = None

    def load_group(self, group: int, threads: int = 1) -> np.ndarray:
        """Tokens of one group, [n * context + 1]: local sequence j is tokens[j * context : (j + 1) * context + 1]."""
        return self._chain(_TRAIN, group, self.groups[group][1])

    def validation_rows(self, indices: npt.ArrayLike) -> np.ndarray:
        """Validation sequences by index, [n, context + 1]."""
        if self._validation is None:
            self._validation = self._chain(_VALIDATION, 0, self.validation_sequences)
        rows = np.lib.stride_tricks.sliding_window_view(self._validation, self.context + 1)[:: self.context]
        return rows[np.asarray(indices, np.int64)]

    def _bits(self, stream: int, index: int) -> np.random.PCG64:
        return np.random.PCG64(np.random.SeedSequence([self._seed, _TAG, stream, index]))

    def _chain(self, stream: int, index: int, sequences: int) -> np.ndarray:
        bits = self._bits(stream, index)
        steps = sequences * self.context
        state = np.empty(steps + 1, np.int64)
        state[0] = bits.random_raw() % self.vocab_size
        draws = bits.random_raw(-(-steps // 4)).astype("<u8", copy=False).view("<u2")[:steps]
        np.take(self._offset_of_draw, draws, out=state[1:], mode="clip")
        np.cumsum(state, out=state)
        state %= self.vocab_size
        return self._ids_V[state]
