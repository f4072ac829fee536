"""What the loop trains on: this process's batches, and when something is wrong with them."""

import time
from collections import deque
from collections.abc import Iterable

from mpp.data.views import Batch
from mpp.errors import UserError

RECENT = 1024  # the images of which most cannot be decoded when a run ends; those of an update, where they are more
FEW = 32  # of them have to be there before that means something


class Feed:
    """Batches, those of one update at a time.

    Args:
        batches: of this process, without end.
        count: how many an update takes.
    """

    def __init__(self, batches: Iterable[Batch], count: int):
        self.batches, self.count = iter(batches), count
        self.waited = 0.0  # seconds since somebody set it to 0
        self.undecoded: list[str] = []  # of the last update: images that could not be decoded, and why
        self.recent: deque[bool] = deque(maxlen=RECENT)  # whether each of the latest could not be

    def take(self) -> list[Batch]:
        """The batches of the next update.

        Raises:
            ReadFailed: images cannot be read.
            UserError: most of the latest images cannot be decoded.
        """
        begin = time.perf_counter()
        micro = [next(self.batches) for _ in range(self.count)]
        self.waited += time.perf_counter() - begin
        self.note(micro)
        return micro

    def attempt(self) -> tuple[list[Batch], UserError | None]:
        """The next update's batches, or why there are none."""
        try:
            return self.take(), None
        except UserError as error:
            return [], error

    def note(self, micro: list[Batch]) -> None:
        """Count images that could not be decoded; most of them is an error."""
        self.undecoded = [failure for batch in micro for failure in batch.unreadable]
        good = sum(len(batch.images) for batch in micro)
        if len(self.undecoded) + good > self.recent.maxlen:
            self.recent = deque(self.recent, maxlen=len(self.undecoded) + good)
        self.recent.extend([True] * len(self.undecoded) + [False] * good)
        bad = sum(self.recent)
        if bad > len(self.recent) / 2 and len(self.recent) >= FEW:
            raise UserError(
                f"{bad} of the last {len(self.recent)} images cannot be decoded"
                + (f", such as {self.undecoded[-1]}" if self.undecoded else "")
            )
