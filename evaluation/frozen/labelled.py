"""The labelled images that evaluation learns from and tests on."""

from accelerate import Accelerator

from evaluation.frozen.provenance import check_unseen
from mpp.config import SourceConfig
from mpp.data.data_path import describe_source
from mpp.data.dataset import ImageDataset
from mpp.data.overview import note_tested
from mpp.data.sources import load_image_datasets
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
        lacking = [name for name, part in zip(("training", "held-out"), splits, strict=True) if part is None]
        ways = "name their column by data.label_column, have a folder for each of several classes, or a metadata.csv"
        raise UserError(
            f"the {' and '.join(lacking)} images have no labels; {ways} with the columns file_name and label"
        )
    if splits[0].labels.ndim > 1:
        raise UserError("training images have several labels each; only held-out ones may")
    whole, held_out = splits
    train = whole.choose(data.train_images, data.eval_seed)
    check_unseen(encoder, data, train, held_out)
    accelerator.print(
        f"{describe_source(data)}: {len(train)} labelled images to learn from, {len(held_out)} to judge by"
    )
    note_tested(train.labels, held_out.labels, train.names)
    return [train, held_out, *([whole.choose(spare, data.eval_seed, after=len(train))] if spare else [])]
