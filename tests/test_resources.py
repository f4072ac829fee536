"""What a machine has for a run: shared memory for batches, disk for checkpoints, a kernel for attention."""

import pytest
from torch.utils.data import Dataset

from mpp.data.workers import WORKERS_ARE_FORKS, WatchedLoader, deaths_explained, kill_workers
from mpp.errors import UserError


class NoRoom(Dataset):
    """Its batches cannot be sent."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> "NoRoom":
        return self

    def __reduce__(self):
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")


@pytest.mark.skipif(not WORKERS_ARE_FORKS, reason="the dataset cannot be sent either")
def test_a_batch_that_cannot_be_sent_is_an_error_and_not_waited_for(capfd):
    loader = WatchedLoader(NoRoom(), str, batch_size=None, num_workers=1, timeout=20)
    with pytest.raises(UserError, match=r"a loader process died \(.*data.workers"), deaths_explained():
        list(loader)
    assert "No space left on device" in capfd.readouterr().err
    kill_workers()


def test_a_loader_that_has_not_begun_is_not_blamed_for_a_death():
    loader = WatchedLoader(NoRoom(), str, batch_size=None, num_workers=1)
    assert loader.unfinished_images(()) == []


# --- attention ---
