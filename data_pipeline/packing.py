"""From conversations to rows: the seeded order, tokenizing in windows of it, joining with EOS, cutting.

Everything is a function of the conversations, the seed, the tokenizer and the row length alone; how many rows are asked
for only says where it ends.
"""

import hashlib
import os
import struct
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple

import numpy as np

from data_pipeline import chat, conversations
from data_pipeline.progress import say
from llama_jax import rows
from llama_jax.errors import DataError

_TEXT_CHARACTERS = 2 << 20  # rendered text that is tokenized at a time
_SAY_S = 15.0


@dataclass
class Tally:
    """What went into the rows: conversations taken and left out, and all their tokens with the EOS between them."""

    conversations: int = 0
    skipped: int = 0
    ending_in_eos: int = 0
    tokens: int = 0
    problems: list[str] = field(default_factory=list)


class Order(NamedTuple):
    """`seed` decides the order of the conversations; `tokens`, or None, how many are wanted of them in all."""

    seed: int
    tokens: int | None
    skip_bad: bool = False


def permutation(seed: int, n: int) -> np.ndarray:
    """int64 [n]: numbers 0 to n - 1 by rising SHA-256 of seed and number, each a little-endian uint64."""
    sha256, start = hashlib.sha256, struct.pack("<Q", seed)
    digests = b"".join([sha256(start + struct.pack("<Q", i)).digest() for i in range(n)])
    words = np.frombuffer(digests, ">u8").reshape(n, 4)
    return np.lexsort((words[:, 3], words[:, 2], words[:, 1], words[:, 0])).astype(np.int64)


def cut(
    conversation_ids: Iterable[np.ndarray], eos_id: int, row_length: int, limit: int | None = None
) -> Iterator[np.ndarray]:
    """Joins the ids of conversations with EOS between them and cuts full rows: int32 blocks [1 to 128, row_length].

    Takes no more conversations than `limit` rows need. An incomplete last row is dropped.
    """
    block = np.empty(rows.BLOCK_ROWS * row_length, np.int32)
    left = limit
    size = block.size if left is None else min(block.size, left * row_length)
    filled, between = 0, np.empty(0, np.int32)
    for ids in conversation_ids if size else ():
        for piece in (between, ids):
            while piece.size:
                part = piece[: size - filled]
                block[filled : filled + part.size] = part
                filled, piece = filled + part.size, piece[part.size :]
                if filled < size:
                    continue
                yield block[:size].reshape(-1, row_length).copy()
                filled = 0
                if left is not None:
                    left -= size // row_length
                    size = min(block.size, left * row_length)
                    if not left:
                        return
        between = np.array([eos_id], np.int32)
    if full := filled // row_length:
        yield block[: full * row_length].reshape(-1, row_length).copy()


class _Window(NamedTuple):
    """Tokenized conversations of the places `low` and up in the order: where each starts in a file, and its length.

    Length -1 marks one that can't be used; `problems` says why, by place.
    """

    low: int
    offsets: np.ndarray
    lengths: np.ndarray
    problems: dict[int, str]


def ordered(
    source: conversations.Source, column: str, talk: chat.Chat, order: Order, spool: BinaryIO, tally: Tally
) -> Generator[np.ndarray]:
    """Ids of each conversation in the seeded order, int32; counts them in `tally` as they are taken.

    Sources are read front to back, so a window of the order is tokenized into the file `spool` and read back in order:
    the whole order at once when everything is wanted, else about as much as the tokens need, and more if that was too
    little. Memory holds some bytes a conversation. Raises DataError naming a conversation that can't be used; with
    `skip_bad` it is counted and left out.
    """
    n = source.conversations
    place_of = np.empty(n, np.int64)
    place_of[permutation(order.seed, n)] = np.arange(n)
    low, high = 0, n if order.tokens is None else min(n, 256 + order.tokens // 512)
    while low < n:
        window = _tokenize(source, column, talk, place_of, low, high, spool)
        for place in range(low, high):
            length = int(window.lengths[place - low])
            if length < 0:
                if not order.skip_bad:
                    raise DataError(f"{window.problems[place]}; correct it, or leave such ones out with --skip_bad")
                tally.skipped += 1
                tally.problems.append(window.problems[place])
                continue
            ids = np.frombuffer(os.pread(spool.fileno(), 4 * length, 4 * int(window.offsets[place - low])), np.int32)
            if ids.size != length:
                raise DataError(f"{spool.name}: changed while it was used; repeat")
            tally.tokens += length + (tally.conversations > 0)
            tally.conversations += 1
            tally.ending_in_eos += int(ids[-1]) == talk.eos_id
            yield ids
        missing = 0 if order.tokens is None else order.tokens - tally.tokens
        low, high = high, min(n, high + 256 + int(1.1 * missing * high / max(tally.tokens, 1)))


def _tokenize(
    source: conversations.Source, column: str, talk: chat.Chat, place_of: np.ndarray, low: int, high: int,
    spool: BinaryIO,
) -> _Window:  # fmt: skip
    """Renders and tokenizes the places low to high of the order into `spool`, replacing what is in it."""
    window = _Window(low, np.zeros(high - low, np.int64), np.full(high - low, -1, np.int32), {})
    spool.seek(0)
    spool.truncate()
    waiting: list[tuple[conversations.Found, str]] = []
    characters = written = done = 0
    told = time.monotonic()

    def flush() -> None:
        nonlocal written
        for (found, _), ids in zip(waiting, talk.encode([text for _, text in waiting]), strict=True):
            place = int(place_of[found.number])
            if not ids.size:
                window.problems[place] = f"{found.place}: the chat template makes no token of it"
                continue
            window.offsets[place - low], window.lengths[place - low] = written, ids.size
            spool.write(ids.data)
            written += ids.size
        waiting.clear()

    for found in conversations.read(source, column, (place_of >= low) & (place_of < high)):
        done += 1
        try:
            if found.reason:
                raise chat.Refused(found.reason)
            text = talk.render(found.messages)
        except chat.Refused as error:
            window.problems[int(place_of[found.number])] = f"{found.place}: {error}"
            continue
        waiting.append((found, text))
        characters += len(text)
        if characters >= _TEXT_CHARACTERS:
            flush()
            characters = 0
        if time.monotonic() >= told + _SAY_S:
            told = time.monotonic()
            say(f"tokenized {done:,} of {high - low:,} conversations, {written / 1e6:,.1f} M tokens")
    flush()
    spool.flush()
    return window
