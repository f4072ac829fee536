"""Training batches, one forward pass's at a time: the time spent waiting for them, and undecodable images."""

import time
from collections import deque
from collections.abc import Iterable

from mpp.data.views import Batch
from mpp.errors import UserError

RECENT_IMAGES = 1024  # latest images, most of which must be decodable; at least those of a batch
MIN_IMAGES = 32  # fewer are too few to tell


class Feed:
    """Batches of this process, taken when they are needed.

    Args:
        batches: without end.
    """

    def __init__(self, batches: Iterable[Batch]):
        self.batches = iter(batches)
        self.recently_undecoded: deque[bool] = deque(maxlen=RECENT_IMAGES)
        """Whether each of the latest images could not be decoded."""
        self.waited = 0.0

    def take(self) -> Batch:
        """The next batch.

        Raises:
            ReadFailed: images cannot be read.
            UserError: most of the latest images cannot be decoded.
        """
        begin = time.perf_counter()
        batch = next(self.batches)
        self.waited += time.perf_counter() - begin
        self.count_undecoded(batch)
        return batch

    def try_take(self) -> tuple[Batch | None, UserError | None]:
        """The next batch, or the error in its place."""
        try:
            return self.take(), None
        except UserError as error:
            return None, error

    def reset_wait(self) -> float:
        """Seconds waited for batches since the last call."""
        waited, self.waited = self.waited, 0.0
        return waited

    def count_undecoded(self, batch: Batch) -> None:
        """Count images that could not be decoded; UserError if they are most of the latest ones."""
        undecoded, decoded = len(batch.unreadable), len(batch.images)
        if undecoded + decoded > self.recently_undecoded.maxlen:
            self.recently_undecoded = deque(self.recently_undecoded, maxlen=undecoded + decoded)
        self.recently_undecoded.extend([True] * undecoded)
        self.recently_undecoded.extend([False] * decoded)
        recent, bad = len(self.recently_undecoded), sum(self.recently_undecoded)
        if recent < MIN_IMAGES or bad <= recent / 2:
            return
        example = f", such as {batch.unreadable[-1]}" if batch.unreadable else ""
        raise UserError(f"{bad} of the last {recent} images cannot be decoded{example}")
