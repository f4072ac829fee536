"""The labelled images that evaluation learns from and tests on."""

from accelerate import Accelerator

from evaluation.suite.run_images import check_unseen
from mpp.config import SourceConfig
from mpp.data.sources import ImageDataset, describe, load_image_datasets
from mpp.errors import UserError


def load_labelled(
    data: SourceConfig, accelerator: Accelerator, encoder: str = "", spare: int = 0
) -> list[ImageDataset]:
    """The labelled images of the training and the held-out split; says which these are.

    Args:
        encoder: the one that is evaluated on them; empty: none that has learned anything.
        spare: of the training images that `data.train_images` leaves out, as many at most are a third split.
    Raises:
        UserError: there are none, or the encoder was trained with the labels of those that are held out.
    """
    if getattr(data, "streaming", False):
        raise UserError("data.streaming is for pre-training; learning from labels needs indexed images")
    with accelerator.main_process_first():
        splits = [part.labelled() for part in load_image_datasets(data)]
    if None in splits:
        ways = (
            "name their column by data.label_column, have a folder for each of several classes (all at one depth), or"
        )
        raise UserError(f"the images have no labels; {ways} a metadata.csv with the columns file_name and label")
    if splits[0].labels.ndim > 1:
        raise UserError("training images have several labels each; only held-out ones may")
    whole, held_out = splits
    train = whole.choose(data.train_images, data.eval_seed)
    check_unseen(encoder, data, train, held_out)
    accelerator.print(f"{describe(data)}: {len(train)} labelled images to learn from, {len(held_out)} to judge by")
    return [train, held_out, *([whole.choose(spare, data.eval_seed, after=len(train))] if spare else [])]
