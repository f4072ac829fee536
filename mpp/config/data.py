"""Settings of the images: where they are, how they are read, cropped and augmented."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from mpp.config.checks import check_bounds, require
from mpp.config.fields import SEED_END, group, setting

WINDOW = "window"
"""The value of `data.range` that takes the window of each file."""
HOW_READ = ("channels", "bands", "range", "nodata")
"""Settings that an exported encoder keeps, whatever images it is later shown."""


@dataclass(frozen=True)
class ImagesConfig:
    """The images: where they are, and how a file becomes pixels."""

    group_name: ClassVar[str] = "data"
    """Settings group, for messages."""
    path: str | None = None
    """A hub dataset, a folder of images, a folder, file or URL of shards (parquet, arrow, tar). null: our birds."""
    name: str | None = setting(None, needs={"path": True})
    """Config name of a hub dataset."""
    revision: str | None = setting(None, needs={"path": True})
    """Branch, tag or commit of a hub dataset. null: its main branch, as it is when the run begins."""
    image_column: str | None = None
    """Column of the images. null: the only image column."""
    label_column: str | None = None
    """Column of class labels: of a table, a list of images, or the ending of a shard's members. null: `label`, or a
    shard's `cls`, or the names of folders. Blank, or a negative number of a table: the image has no label."""
    labels: str | None = setting(None, needs={"path": True})
    """A list of the images in a folder or archive: a file CSV, TSV, JSON lines or parquet, whose names of files are
    from `path` on. null: a `metadata.csv`, `labels.csv` or the like in the folder, if it has one."""
    labels_encoding: str = "utf-8"
    """Encoding of lists of images: latin-1, say."""
    file_column: str | None = None
    """Column of a list that names the images' files. null: `file_name`, `filename`, `file`, `path` or `image`."""
    label_folder: Literal["inner", "outer"] = "inner"
    """Which folder is the class of an image, where folders on several levels have different names."""
    missing: Literal["refuse", "skip"] = "refuse"
    """Treatment of lists that name missing files: refuse the lists, or skip these files."""
    channels: int = setting(3, at_least=1)
    """Channels of an image. 3 are RGB, and 1 is grey: files are converted to these. Any other number: files have so
    many bands, or are named as unreadable."""
    bands: int | tuple[int, ...] | None = setting(None, at_least=1, listed=True)
    """Which bands of the files are the channels, counted from 1: [4, 3, 2]. Nothing is converted then. null: all."""
    range: tuple[float, float] | tuple[tuple[float, float], ...] | Literal["window"] | None = None
    """[LOW, HIGH], or a pair for each channel: the values that become 0 and 255; what lies outside is cut off. null: 8
    bits stay as they are, and of 16 bits it is all that they hold (of DICOM, all that its bits hold, rescaled). window:
    each DICOM file's own. What is not 8 bits is float32."""
    nodata: float | Literal["nan"] | None = None
    """The value of pixels without a value, which get the mean of their image's channel, as those do that are not
    finite. null: an image that has pixels which are not finite is unreadable; a TIFF's own tag of nodata counts."""
    max_pixels: int = setting(100_000_000, at_least=1)
    """Images with more pixels are refused from their header, before they are decoded. Four bands count as one."""
    read_retries: int = setting(6, at_least=0, at_most=20, operational=True)
    """How often a file that cannot be read is tried again, after 1, 2, 4, ... (at most 60) seconds; then a run ends."""

    def __post_init__(self):
        if isinstance(self.nodata, float) and not math.isfinite(self.nodata):
            object.__setattr__(self, "nodata", "nan")  # a string, because nan != nan would make every resume differ
        check_bounds(self, "data.")
        if self.bands is not None:
            allowed = f"{self.channels} numbers from 1, one for each channel"
            require(len(self.bands) == self.channels, "data.bands", list(self.bands), allowed)
        pairs = self.limits()
        ascending = all(len(pair) == 2 and -math.inf < pair[0] < pair[1] < math.inf for pair in pairs)
        fits = len(pairs) in (0, 1, self.channels) and ascending
        require(fits, "data.range", self.range, f"[LOW, HIGH], or {self.channels} such pairs, or window")

    def how_read(self) -> dict[str, Any]:
        """The settings by which pixels are read, where they are not as usual: an encoder takes them along."""
        return {key: getattr(self, key) for key in HOW_READ if getattr(self, key) != getattr(type(self), key)}

    def limits(self) -> tuple[tuple[float, float], ...]:
        """The pairs of `range`: one for all channels, or one for each; none where it is null or `window`."""
        if not self.range or self.range == WINDOW:
            return ()
        return self.range if isinstance(self.range[0], tuple | list) else (self.range,)


@dataclass(frozen=True)
class SourceConfig(ImagesConfig):
    """The images: where they are, how they are read, which are held out, and how they are loaded.

    Adds splits, the held-out cut and loading to ImagesConfig.
    """

    split: str = "train"
    """Split to train on."""
    eval_split: str | None = "auto"
    """Held-out split. auto: `validation` or `test` where there is one, else a seeded cut. null: always a seeded cut."""
    eval_fraction: float = setting(0.05, above=0, below=1, needs={"eval_split": ("auto", None)})
    """Share of the images that the seeded cut holds out."""
    cut_seed: int = setting(0, at_least=0, below=SEED_END)
    """Seed of everything held out: the cut, the choice of eval_images, their corruption. Replicates share it."""
    eval_seed: int = setting(0, at_least=0, below=SEED_END)
    """Seed of the choice of training images (train_images, probe.images) and of fine-tuning's dev split. It is not
    run.seed, so that runs of other seeds see the same images."""
    eval_label_column: str | None = None
    """Column of the held-out split's labels, where it is another; lists are several right answers (ImageNet ReaL)."""
    train_images: int | None = setting(None, at_least=1)
    """Train on a seeded choice of so many images (labelled ones, where labels are used; VTAB: 1000). null: all."""
    batch_size: int | None = setting(None, at_least=1, operational=True)
    """Images per process and forward pass, at most. null: in training, its whole share of the global batch; else 64
    (pictures: 4)."""
    workers: int | None = setting(None, at_least=0, operational=True)
    """Loader processes of each training process; up to four more serve its evaluations. null: on a GPU the process's
    share of the cores less one, at most 16; on a CPU 2; fewer where shared memory has no room for their batches. 0: the
    training process loads. It also does where one or two threads of a CPU train on decoded images (data.cache_gb)."""


@dataclass(frozen=True)
class GeneralImagesConfig(SourceConfig):
    """Source settings of `probe.path`, others at their defaults."""

    group_name: ClassVar[str] = "probe"


@dataclass(frozen=True)
class DataConfig(SourceConfig):
    """The images: where they are, and how they are read, held out, loaded, cropped, cached and streamed.

    Adds crops, caching and streaming to SourceConfig, for training.
    """

    crop_area: tuple[float, float] = setting((0.4, 1.0), above=0, at_most=1)
    """Range of the training crop's area, as a share of the image's (the inception crop of the paper: 0.05 to 1)."""
    crop_ratio: tuple[float, float] = setting((0.75, 4 / 3), above=0)
    """Range of the training crop's width / height."""
    flip: bool = True
    """Flip half of the training crops left to right."""
    eval_crop: float = setting(0.875, above=0, at_most=1)
    """Held-out images are resized so that a centre crop keeps this share of the shorter side (224 of 256: 0.875)."""
    eval_images: int = setting(2048, at_least=1)
    """At most so many held-out images, a seeded choice, are evaluated."""
    cache_gb: float = setting(0.5, at_least=0, needs={"streaming": False}, operational=True)
    """Training images that take at most so many GB decoded are decoded once, at the start, and kept: by each process,
    whose loader processes share them (for a moment it needs twice as much). 8 bits take a byte for each pixel and
    channel, all others four. 0: none are kept."""
    streaming: bool = False
    """Read shards (parquet, arrow, WebDataset tar) as a stream: nothing is indexed, and nothing is downloaded but the
    images to evaluate on. Pre-training only."""
    shuffle_block: int = setting(512, at_least=1, needs={"streaming": True})
    """Rows of a stream's shard that are held in memory and shuffled together."""

    def __post_init__(self):
        super().__post_init__()
        for name in ("crop_area", "crop_ratio"):
            low, high = getattr(self, name)
            require(low <= high, f"data.{name}", [low, high], "two ascending numbers")


@dataclass(frozen=True)
class AugmentConfig:
    """Augmentation beyond crop and flip, for training with labels (DeiT, BEiT, MAE)."""

    randaugment: int = setting(0, at_least=0, at_most=30)
    """Magnitude of RandAugment, 1 to 30: two random operations an image (Cubuk et al., 2020). 0: none. The scale is
    torchvision's, of 30. DeiT and MAE have m9 on timm's scale, of 10: 27 here."""
    mixup: float = setting(0.0, at_least=0)
    """Alpha of mixup: each image is blended with another of its forward pass, whose size then matters. 0: none."""
    cutmix: float = setting(0.0, at_least=0)
    """Alpha of CutMix: a part of each image comes from another. With mixup too, a forward pass draws one of them."""
    label_smoothing: float = setting(0.0, at_least=0, below=1)
    """Share of the target that is spread over all classes."""

    def __post_init__(self):
        check_bounds(self, "augment.")


@dataclass(frozen=True)
class PrepareConfig:
    """Turn a dataset into parquet shards for training."""

    out: str = setting("prepared", operational=True)
    """Folder of the shards: data/SPLIT-00000-of-00012.parquet, as the hub has them."""
    short_side: int = setting(256, at_least=1)
    """Images whose shorter side is longer are shrunk to this; the others keep their size (as JPEG: every byte, unless
    they have metadata, such as EXIF, which is dropped)."""
    format: Literal["jpeg", "ppm", "npy"] = "jpeg"
    """jpeg: the images that are shrunk become JPEG. ppm: all images become plain pixels, of which nothing is lost and
    nothing has to be decoded; they take some ten times the space, and load twice as fast. npy: the same for any bands
    and types, which stay as they are."""
    quality: int = setting(90, at_least=1, at_most=100, needs={"format": "jpeg"})
    """JPEG quality of the images that are shrunk."""
    rows: int = setting(2048, at_least=1)
    """Images a shard, which a process holds in memory. Streaming needs a shard for each loader process."""
    seed: int = setting(0, at_least=0, below=SEED_END)
    """Seed of the order of the images, which are shuffled over all shards of their split."""
    workers: int = setting(0, at_least=0, operational=True)
    """Processes. 0: one for each core."""
    data: ImagesConfig = group(ImagesConfig, range="values are kept as they are, and data.range is the run's")

    def __post_init__(self):
        check_bounds(self)
        channels = self.data.channels
        channels_of_format = {"jpeg": (1, 3), "ppm": (3,), "npy": (channels,)}
        require(channels in channels_of_format[self.format], "format", self.format, f"npy with {channels} channels")
