"""Training batches, one step's at a time: how long they were waited for, and images that cannot be decoded."""

import time
from collections import deque
from collections.abc import Iterable

from mpp.data.views import Batch
from mpp.errors import UserError

RECENT_IMAGES = 1024  # latest images, most of which must be decodable; at least those of a step
MIN_IMAGES = 32  # fewer are too few to tell


class Feed:
    """Batches of this process, those of one step at a time.

    Args:
        batches: without end.
        batches_per_step: taken by a step.
    """

    def __init__(self, batches: Iterable[Batch], batches_per_step: int):
        self.batches, self.batches_per_step = iter(batches), batches_per_step
        self.undecoded: list[str] = []
        """Images of the last step that could not be decoded, and why."""
        self.recently_undecoded: deque[bool] = deque(maxlen=RECENT_IMAGES)
        """Whether each of the latest images could not be decoded."""
        self.waited = 0.0

    def take(self) -> list[Batch]:
        """The batches of the next step.

        Raises:
            ReadFailed: images cannot be read.
            UserError: most of the latest images cannot be decoded.
        """
        begin = time.perf_counter()
        batches = [next(self.batches) for _ in range(self.batches_per_step)]
        self.waited += time.perf_counter() - begin
        self.count_undecoded(batches)
        return batches

    def try_take(self) -> tuple[list[Batch], UserError | None]:
        """The next step's batches, or the error in their place."""
        try:
            return self.take(), None
        except UserError as error:
            return [], error

    def reset_wait(self) -> float:
        """Seconds waited for batches since the last call."""
        waited, self.waited = self.waited, 0.0
        return waited

    def count_undecoded(self, batches: list[Batch]) -> None:
        """Count images that could not be decoded; UserError if they are most of the latest ones."""
        self.undecoded = [failure for batch in batches for failure in batch.unreadable]
        decoded = sum(len(batch.images) for batch in batches)
        count = len(self.undecoded) + decoded
        if count > self.recently_undecoded.maxlen:
            self.recently_undecoded = deque(self.recently_undecoded, maxlen=count)
        self.recently_undecoded.extend([True] * len(self.undecoded))
        self.recently_undecoded.extend([False] * decoded)
        recent, bad = len(self.recently_undecoded), sum(self.recently_undecoded)
        if recent < MIN_IMAGES or bad <= recent / 2:
            return
        example = f", such as {self.undecoded[-1]}" if self.undecoded else ""
        raise UserError(f"{bad} of the last {recent} images cannot be decoded{example}")
