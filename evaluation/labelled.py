"""The labelled images that evaluation learns from and tests on."""

from accelerate import Accelerator

from mpp.config import SourceConfig
from mpp.sources import Photographs, describe, load_photographs


def load_labelled(data: SourceConfig, accelerator: Accelerator) -> list[Photographs]:
    """The labelled images of the training and the held-out split; says which these are.

    Raises:
        ValueError: there are none.
    """
    if getattr(data, "streaming", False):
        raise ValueError("data.streaming is for pre-training; learning from labels needs indexed images")
    with accelerator.main_process_first():
        photographs = [part.labelled() for part in load_photographs(data)]
    if None in photographs:
        raise ValueError("the images have no labels; name their column by data.label_column")
    if photographs[0].labels.ndim > 1:
        raise ValueError("training images have several labels each; only held-out ones may")
    train, held_out = photographs
    train = train.choose(data.train_images, data.eval_seed)
    accelerator.print(f"{describe(data)}: {len(train)} labelled images to learn from, {len(held_out)} to judge by")
    return [train, held_out]
