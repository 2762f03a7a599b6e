"""What a preparation says while it works: one live line on a terminal, a plain line now and then elsewhere."""

import sys
import time
from collections.abc import Sequence

from data_pipeline.sources import Item
from llama_jax.errors import tell

_LIVE_S, _PLAIN_S = 0.2, 15.0


def say(line: str) -> None:
    """A line of its own on standard error."""
    tell(line)


class Progress:
    """Source read, tokens made, and the time left: of all items, or of as much as `tokens` training tokens take."""

    def __init__(self, items: Sequence[Item], tokens: int | None) -> None:
        self._total = sum(item.weight for item in items)
        self._validation = sum(item.weight for item in items if item.split == "validation")
        self._unit = "records" if items and items[0].kind == "tfds" else "MB"
        self._wanted = tokens
        self._read = self._tokens = 0
        self._live = sys.stderr is not None and sys.stderr.isatty()
        self._start = time.monotonic()
        self._next = self._start + (_LIVE_S if self._live else _PLAIN_S)

    def tick(self, weight: int, tokens: int) -> None:
        self._read += weight
        self._tokens += tokens
        now = time.monotonic()
        if now >= self._next:
            self._next = now + (_LIVE_S if self._live else _PLAIN_S)
            self._print(self.line(now - self._start))

    def end(self) -> None:
        self._print(self.line(time.monotonic() - self._start))
        if self._live:
            print(file=sys.stderr)

    def line(self, elapsed_s: float) -> str:
        """The progress line after `elapsed_s` seconds."""
        total = self._total
        if self._wanted is not None and self._tokens and self._read > self._validation:
            total = min(total, self._validation + int(1.05 * self._wanted * self._read / self._tokens))
        total = max(total, self._read)
        scale = 1 if self._unit == "records" else 1e6
        left = elapsed_s * (total - self._read) / self._read if self._read else 0.0
        minutes, seconds = divmod(round(left), 60)
        rate = self._tokens / max(elapsed_s, 1e-9) / 1e6
        return (
            f"tokenised {self._read / scale:,.1f} of {total / scale:,.1f} {self._unit}, "
            f"{self._tokens / 1e6:,.2f} M tokens, {rate:.2f} M tokens/s, {minutes}:{seconds:02d} left"
        )

    def _print(self, line: str) -> None:
        if self._live:
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        else:
            tell(line)
