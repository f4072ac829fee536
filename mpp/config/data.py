"""Settings of the images: where they are, how they are read, cropped and augmented."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from mpp.config.fields import SEED_END, Settings, group, require, setting

WINDOW = "window"
"""The value of `data.range` that takes the window of each file."""
HOW_READ = ("channels", "bands", "range", "nodata")
"""Settings that an exported encoder keeps, whatever images it is later shown."""


@dataclass(frozen=True)
class ImagesConfig(Settings):
    """The images: location, and how a file becomes pixels."""

    group_name: ClassVar[str] = "data"
    """Settings group, for messages."""
    # Settings that only some kinds of images have. Without a type they are no fields: all others have these values.
    split = "train"
    eval_label_column = None
    mask_column = None
    streaming = False

    path: str | None = None
    """Images: a hub dataset, a folder of images, or a folder, file or URL of shards (parquet, arrow, tar). null: the
    package's birds."""
    name: str | None = setting(None, needs={"data.path": True})
    """Configuration of a hub dataset."""
    revision: str | None = setting(None, needs={"data.path": True})
    """Branch, tag or commit of a hub dataset. null: its main branch when the run begins."""
    image_column: str | None = None
    """Column of the images. null: the only image column."""
    label_column: str | None = None
    """Column of class labels in a table or list of images, or the ending of a shard's members. null: `label`, a shard's
    `cls`, or the names of folders. Images with a blank label, or a negative number in a table, have no label."""
    labels: str | None = setting(None, needs={"data.path": True})
    """List of the images in a folder: a CSV, TSV, JSON lines or parquet file, with file names relative to
    `path`. null: a `metadata.csv`, `labels.csv` or similar list in the folder, if there is one."""
    labels_encoding: str = "utf-8"
    """Encoding of lists of images, for example latin-1."""
    file_column: str | None = None
    """Column of file names in a list of images. null: `file_name`, `filename`, `file`, `path` or `image`."""
    label_folder: Literal["inner", "outer"] | None = None
    """Folder that names the class of images that lie several levels deep: the inner or the outer one. null: there is
    one level of folders with different names."""
    missing: Literal["refuse", "skip"] = "refuse"
    """Files that a list names and that are missing: refuse the list, or skip these files."""
    channels: int = setting(3, at_least=1)
    """Channels of an image. 3: files are converted to RGB; 1: to grey. Any other number: files with another number of
    bands are reported as unreadable."""
    bands: tuple[int, ...] | int | None = setting(None, at_least=1)
    """Bands of the files used as channels, counted from 1: [4, 3, 2]. Nothing is converted then. null: all bands."""
    range: tuple[float, float] | tuple[tuple[float, float], ...] | Literal["window"] | None = None
    """[LOW, HIGH], or one pair per channel: values mapped to 0 and 255; values outside are clipped. null: 8-bit images
    stay as they are, others of up to 16 bits use the full range of the bits that their file declares (DICOM: rescaled);
    longer integers and floating-point numbers need one. window: each DICOM file's own window. Images of other than 8
    bits become float32."""
    nodata: float | Literal["nan"] | None = None
    """Value that marks pixels without data. They, and pixels that are not finite, get the mean of their image's
    channel. null: a TIFF's own nodata tag; other images with pixels that are not finite are unreadable."""
    max_pixels: int = setting(100_000_000, at_least=1)
    """Largest number of pixels of an image; larger ones are refused by their header, before decoding. Four bands count
    as one."""
    read_retries: int = setting(6, at_least=0, at_most=20, operational=True)
    """Retries of a file that cannot be read, after 1, 2, 4, ... (at most 60) seconds; then the run ends."""

    def check(self):
        if isinstance(self.nodata, float) and not math.isfinite(self.nodata):
            object.__setattr__(self, "nodata", "nan")  # a string, because nan != nan would make every resume differ
        fits = self.bands is None or len(self.bands) == self.channels
        require(fits, "data.bands", self.bands, f"{self.channels} numbers from 1, one for each of data.channels")
        pairs = self.limits()
        fits = len(pairs) in (0, 1, self.channels) and all(-math.inf < low < high < math.inf for low, high in pairs)
        require(
            fits, "data.range", self.range, f"[LOW, HIGH], or {self.channels} such pairs (data.channels), or window"
        )

    def how_read(self) -> dict[str, Any]:
        """The settings by which pixels are read, where they are not as usual: an encoder takes them along."""
        return {key: getattr(self, key) for key in HOW_READ if getattr(self, key) != getattr(type(self), key)}

    def limits(self) -> tuple[tuple[float, float], ...]:
        """The pairs of `range`: one for all channels, or one for each; none where it is null or `window`."""
        if self.range in (None, WINDOW):
            return ()
        return self.range if isinstance(self.range[0], tuple) else (self.range,)


@dataclass(frozen=True)
class SourceConfig(ImagesConfig):
    """The images: location, reading, held-out split and loading.

    Adds splits, the held-out cut and loading to ImagesConfig.
    """

    split: str = "train"
    """Split to train on."""
    eval_split: str | None = "auto"
    """Held-out split. auto: `validation` (or `val`, `valid`, `dev`), or else `test`, if there is one; otherwise a
    seeded cut of the training split. null: always a seeded cut."""
    eval_fraction: float = setting(0.05, above=0, below=1, needs={"data.eval_split": ("auto", None)})
    """Share of the images that the seeded cut holds out."""
    cut_seed: int = setting(0, at_least=0, below=SEED_END)
    """Seed of the held-out images: the cut, the choice of eval_images, and their corruption. Replicates share it."""
    eval_seed: int = setting(0, at_least=0, below=SEED_END)
    """Seed of the choice of training images (train_images, probe.images) and of fine-tuning's dev split. Independent of
    run.seed, so runs with other seeds see the same images."""
    eval_label_column: str | None = None
    """Label column of the held-out split, if it has another name; lists are several correct answers (ImageNet ReaL)."""
    train_images: int | None = setting(None, at_least=1)
    """Number of training images, a seeded choice (of labelled images when labels are used; VTAB: 1000). null: all."""
    batch_size: int | None = setting(None, at_least=1, operational=True)
    """Per-device micro-batch: most images per process and forward pass. null: in training, the process's whole share of
    the global batch; otherwise 64 (pictures: 4)."""
    workers: int | None = setting(None, at_least=0, operational=True)
    """Loader processes of each training process; up to four more serve its evaluations. null: on a GPU the process's
    share of the cores minus one, at most 16; on a CPU 2. 0: the training process loads images itself, as it also does
    when it trains with one or two CPU threads on decoded images (data.cache_gb)."""


@dataclass(frozen=True)
class GeneralImagesConfig(SourceConfig):
    """Settings of the images at `probe.path`; all others keep their defaults."""

    group_name: ClassVar[str] = "probe"


@dataclass(frozen=True)
class DataConfig(SourceConfig):
    """The images: location, reading, held-out split, loading, crops, cache and streaming.

    Adds crops, caching and streaming to SourceConfig, for training.
    """

    crop_area: tuple[float, float] = setting((0.4, 1.0), above=0, at_most=1)
    """Range of the training crop's area, as a share of the image's area (inception crop in the paper: 0.05 to 1)."""
    crop_ratio: tuple[float, float] = setting((0.75, 4 / 3), above=0)
    """Range of the training crop's width / height."""
    flip: bool = True
    """Flip half of the training crops left to right."""
    eval_crop: float = setting(0.875, above=0, at_most=1)
    """Held-out images are resized so that a centre crop keeps this share of the shorter side (224 of 256: 0.875)."""
    eval_images: int = setting(2048, at_least=1)
    """Largest number of held-out images to evaluate on, a seeded choice."""
    cache_gb: float = setting(0.5, at_least=0, needs={"data.streaming": False}, operational=True)
    """Largest size in GB of decoded training images that each process keeps in memory, decoded once at the start and
    shared with its loader processes. 8-bit images take one byte per pixel and channel, others four. 0: no cache."""
    streaming: bool = False
    """Read shards (parquet, arrow, WebDataset tar) as a stream: no index, and only the images to evaluate on are
    downloaded. Masked patch prediction only."""
    shuffle_block: int = setting(512, at_least=1, needs={"data.streaming": True})
    """Rows of a stream's shard that are kept in memory and shuffled together."""

    def check(self):
        super().check()
        for name in ("crop_area", "crop_ratio"):
            low, high = getattr(self, name)
            require(low <= high, f"data.{name}", (low, high), "two ascending numbers")


@dataclass(frozen=True)
class AugmentConfig(Settings):
    """Augmentation beyond crop and flip, for training with labels (DeiT, BEiT, MAE)."""

    randaugment: int = setting(0, at_least=0, at_most=30)
    """Magnitude of RandAugment, 1 to 30: two random operations an image (Cubuk et al., 2020). 0: none. The scale is
    torchvision's (to 30). DeiT and MAE use m9 on timm's scale (to 10), near 27
    here: some operations differ."""
    mixup: float = setting(0.0, at_least=0)
    """Alpha of mixup: each image is blended with another of its forward pass, so the size of a forward pass matters. 0:
    none."""
    cutmix: float = setting(0.0, at_least=0)
    """Alpha of CutMix: a part of each image comes from another. With mixup too, a forward pass draws one of them."""
    label_smoothing: float = setting(0.0, at_least=0, below=1)
    """Label smoothing: share of the target that is spread over all classes."""


@dataclass(frozen=True)
class PrepareConfig(Settings):
    """Turn a dataset into parquet shards for training."""

    out: str = setting("prepared", operational=True)
    """Folder for the shards, named as on the hub: data/SPLIT-00000-of-00012.parquet."""
    short_side: int = setting(256, at_least=1)
    """Longest allowed shorter side; larger images are shrunk to it. The others keep their size (JPEG: every byte, or
    as PNG where it has metadata such as EXIF)."""
    format: Literal["jpeg", "ppm", "npy"] = "jpeg"
    """jpeg: images that are shrunk become JPEG. ppm: all images become plain pixels, without loss; they take about ten
    times the space and load twice as fast. npy: the same for any bands and types, which stay as they are."""
    quality: int = setting(90, at_least=1, at_most=100, needs={"format": "jpeg"})
    """JPEG quality of images that are shrunk."""
    rows: int = setting(2048, at_least=1)
    """Images per shard; a process keeps one shard in memory. Streaming needs a shard for each loader process."""
    seed: int = setting(0, at_least=0, below=SEED_END)
    """Seed of the shuffle over all shards of a split."""
    workers: int = setting(0, at_least=0, operational=True)
    """Number of processes. 0: one for each core."""
    data: ImagesConfig = group(ImagesConfig(), range="values are kept as they are; set data.range in the run")

    def check(self):
        channels = self.data.channels
        channels_of_format = {"jpeg": (1, 3), "ppm": (3,), "npy": (channels,)}
        require(channels in channels_of_format[self.format], "format", self.format, f"npy with {channels} channels")
