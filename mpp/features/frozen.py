"""Frozen features: the output of an encoder's blocks for an image, and for every image of a dataset.

The probe while training and the evaluation read them here: a name such as `depth_04` means the same everywhere.
B images, D width.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, get_args

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from PIL import Image
from timm.data import resolve_model_data_config
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils._pytree import tree_leaves

from mpp.config import ImagesConfig, Representation, require
from mpp.data.crops import centre_crop
from mpp.data.decoding.channels import Stored, select_channels
from mpp.data.decoding.pictures import from_pil
from mpp.data.views import Batch
from mpp.errors import Unavailable
from mpp.features.arrays import IN_MEMORY, empty_array, in_blocks, let_go
from mpp.models.encoder import Normalize
from mpp.models.plain import has_class
from mpp.runtime.processes import gloo_group

IMAGES_PER_FORWARD = 64
ROWS_PER_MESSAGE = 4096  # of each process: bounds the memory
ALLOWED_IMAGES = "PIL images, or a tensor (B, {0}, H, W), of torch.uint8 or from 0 to 255"


def stages(encoder: nn.Module) -> Sequence[nn.Module]:
    """The units of depth: blocks of a ViT, stages of a BiT ResNet; other models count as one."""
    for name in ("blocks", "stages"):
        parts = getattr(encoder, name, None)
        if not isinstance(parts, nn.Sequential | nn.ModuleList):
            continue
        if not any(isinstance(part, nn.ModuleList) for part in parts):  # those of Twins are lists, which nothing calls
            return parts
    return (encoder,)


def features_at(
    encoder: nn.Module, images: Tensor, depths: Sequence[int], representation: Representation
) -> list[Tensor]:
    """Features after each depth.

    Args:
        encoder, images, depths: see `tokens_at`.
        representation: `class` token, `mean` over patches (or places of a feature map), or `both` side by side.
    Returns:
        (B, D) float32 for each depth, or (B, 2 D) for `both`.
    """
    last = len(stages(encoder))
    features = []
    for depth, tokens in zip(depths, tokens_at(encoder, images, depths), strict=True):
        features.append(pool(encoder, tokens, representation, normed=depth == last).float())
    return features


@torch.no_grad()
def extract_features(
    encoder: nn.Module, images: Tensor | Sequence[Image.Image], representation: Representation = "mean"
) -> Tensor:
    """Features of images in memory, as the evaluation sees them: resized, cropped at the centre, normalised.

    Args:
        encoder: of `mpp.load_encoder`, or timm's. Computes on its device and in its type.
        images: PIL images of any sizes and modes, or one; or a tensor (B, C, H, W), uint8 or floats from 0 to 255.
    Returns:
        (B, D) float32 on the CPU, or (B, 2 D) for `both`.
    Raises:
        UserError: no images, other numbers than bytes, or no such representation.
    """
    representations = get_args(Representation)
    require(representation in representations, "representation", representation, " or ".join(representations))
    if isinstance(images, Image.Image):
        images = [images]
    data_config = resolve_model_data_config(encoder)
    config = ImagesConfig(channels=data_config["input_size"][0])
    require(len(images) > 0, "images", "empty", ALLOWED_IMAGES.format(config.channels))
    built_for = getattr(getattr(encoder, "patch_embed", None), "img_size", None)  # may differ from the weights' size
    size = tuple(built_for or data_config["input_size"])[-2:]
    crops = [centre_crop(to_pixels(image, config), size, data_config["crop_pct"]) for image in images]

    weight = next(encoder.parameters())
    normalize = Normalize(data_config["mean"], data_config["std"]).to(weight.device)
    depth = len(stages(encoder))
    features = []
    modes = {module: module.training for module in encoder.modules()}
    encoder.eval()  # timm builds models in train mode
    try:
        for batch in torch.stack(crops).split(IMAGES_PER_FORWARD):
            inputs = normalize(batch.to(weight.device)).to(weight.dtype)
            features += features_at(encoder, inputs, [depth], representation)
    finally:
        for module, training in modes.items():
            module.training = training
    return torch.cat(features).cpu()


def to_pixels(image: Tensor | Image.Image, config: ImagesConfig) -> Tensor:
    """One of the images of `extract_features`, (C, H, W) from 0 to 255."""
    if isinstance(image, Image.Image):
        return pil_to_pixels(image, config)
    allowed = ALLOWED_IMAGES.format(config.channels)
    require(torch.is_tensor(image), "images", f"of {type(image).__name__}", allowed)
    floats = image.is_floating_point()
    fits = image.ndim == 3 and len(image) == config.channels and (floats or image.dtype == torch.uint8)
    description = f"{image.dtype} {tuple(image.shape)} each"
    if fits and floats:  # many libraries have values from 0 to 1
        largest = image.max()
        description += f" up to {largest:g}"
        fits = bool(image.min() >= 0) and (largest == 0 or 1 < largest <= 255)
    require(fits, "images", description, allowed)
    return image.float().cpu() if floats else image.cpu()


def pil_to_pixels(image: Image.Image, config: ImagesConfig) -> Tensor:
    """A PIL image as (C, H, W) uint8."""
    values, _ = select_channels(Stored(from_pil(image, config)), config)
    description = f"a PIL image of mode {image.mode}"
    allowed = f"of 8 bits, or a tensor (B, {config.channels}, H, W), scaled"
    require(values.dtype == np.uint8, "images", description, allowed)
    return torch.from_numpy(np.ascontiguousarray(values))  # the view of an upright image may run backwards


def tokens_at(encoder: nn.Module, images: Tensor, depths: Sequence[int]) -> list[Tensor]:
    """Tokens after each depth.

    Args:
        encoder: timm's, without a head.
        images: (B, C, H, W), normalised.
        depths: from 1; the last one is the encoder's output, after its final norm.
    Returns:
        (B, prefix + N, D) for each depth, or a feature map (B, D, H, W). Where [class] comes in after the blocks (CaiT,
        XCiT), there are zeros in its place at earlier depths. CrossViT's output is a list, which its own head pools.
    Raises:
        Unavailable: an earlier depth has several features, or none of its own (TNT, CrossViT).
    """
    blocks = stages(encoder)
    last = len(blocks)
    outputs: dict[int, Tensor] = {}  # depth -> tokens

    def keep(depth: int, _: nn.Module, inputs: Any, output: Any) -> None:
        tensors = [part for part in tree_leaves(output) if isinstance(part, Tensor)]  # MViT's also have their grid
        if len(tensors) == 1:
            (outputs[depth],) = tensors

    hooks = [blocks[depth - 1].register_forward_hook(partial(keep, depth)) for depth in depths if depth != last]
    try:
        outputs[last] = encoder.forward_features(images)
    finally:
        for hook in hooks:
            hook.remove()

    prefix = getattr(encoder, "num_prefix_tokens", 0)
    tokens = []
    for depth in depths:
        if depth not in outputs:
            refused = f"depth is {depth}; it must be last with this {type(encoder).__name__}"
            raise Unavailable(f"{refused}, whose parts have several features, or none of their own")
        output = outputs[depth]
        if prefix > 0 and output.ndim == 3 and output.shape[1] + prefix == outputs[last].shape[1]:
            output = pad(output, (0, 0, prefix, 0))
        tokens.append(output)
    return tokens


def pool(encoder: nn.Module, tokens: Tensor, representation: Representation, normed: bool = True) -> Tensor:
    """Tokens to a feature of the image.

    The output of models other than ViTs is pooled by timm's own head: some have their last norm, or a layer, in it.

    Args:
        encoder: the timm model that they come from.
        tokens: (B, prefix + N, D), or a feature map (B, D, H, W).
        normed: whether they are the encoder's output: some encoders norm after pooling.
    Returns:
        (B, D), or (B, 2 D) for `both`; where timm's head pools, D is `encoder.head_hidden_size`.
    Raises:
        Unavailable: the [class] token is asked for, and there is none.
    """
    if normed and representation == "mean" and not hasattr(encoder, "num_prefix_tokens"):
        return encoder.forward_head(tokens, pre_logits=True)
    parts = []
    if representation in ("class", "both"):
        if not has_class(encoder):
            raise Unavailable(f"representation is {representation}, but this encoder has no [class] token; use mean")
        parts.append(tokens[:, 0])
    if representation in ("mean", "both"):
        if tokens.ndim == 4:
            channels_last = getattr(encoder, "output_fmt", "NCHW") == "NHWC"
            parts.append(tokens.mean((1, 2) if channels_last else (2, 3)))
        else:
            prefix = getattr(encoder, "num_prefix_tokens", 0)
            parts.append(tokens[:, prefix:].mean(1))
    if normed and hasattr(encoder, "fc_norm"):
        parts = [encoder.fc_norm(part) for part in parts]
    return torch.cat(parts, dim=-1)


def extract(
    batches: Iterable[Batch], encode: Callable[[Tensor], list[Tensor]], count: int, accelerator: Accelerator
) -> tuple[list[NDArray[np.float32]], NDArray[np.int64]]:
    """Features of a whole dataset, on the main process; empty on the others. Large arrays are mapped from files.

    Args:
        batches: of this process: the images rank, rank + processes, ... in their order.
        encode: images (B, C, H, W) on the device to features (B, D), one for each depth.
        count: images of the dataset.
    Returns:
        (count, D) for each depth; labels (count,), or (count, L) where an image may have several. On the other
        processes no depth, and no label.
    """
    rank = accelerator.process_index
    processes = accelerator.num_processes
    own_count = len(range(rank, count, processes))
    own: list[NDArray] = []  # of each depth; of the labels
    filled = 0
    for batch in batches:
        with torch.no_grad(), accelerator.autocast():
            encoded = encode(batch.images.to(accelerator.device, non_blocking=True))
        arrays = [features.float().cpu().numpy() for features in encoded]
        arrays.append(batch.labels.numpy())
        if not own:
            in_files = are_large(arrays, count)
            own = [empty_array((own_count, *array.shape[1:]), array.dtype, in_files) for array in arrays]
        for rows, array in zip(own, arrays, strict=True):
            rows[filled : filled + len(array)] = array
            let_go(rows)
        filled += len(batch.labels)
    if not accelerator.is_main_process:
        for array in own:
            send_rows(array)
        return [], np.empty(0, np.int64)
    if processes > 1:
        in_files = are_large(own, count)
        own = [interleave(array, count, processes, in_files) for array in own]
    *features, labels = own
    return features, labels


def are_large(arrays: Sequence[NDArray], count: int) -> bool:
    """Whether arrays of `count` rows like these are too large for memory."""
    return count * sum(array[:1].nbytes for array in arrays) > IN_MEMORY


def send_rows(own: NDArray) -> None:
    """Send rows of this process to the main process, where `interleave` receives them."""
    for block in in_blocks(own, ROWS_PER_MESSAGE):
        torch.distributed.send(torch.from_numpy(block), 0, gloo_group())


def interleave(own: NDArray, count: int, processes: int, in_file: bool = False) -> NDArray:
    """All rows: process r sends the rows r, r + processes, ...; a process without rows sends nothing.

    Args:
        own: the rows of this process, the main one.
        count: rows of all.
        in_file: see `empty_array`.
    """
    whole = empty_array((count, *own.shape[1:]), own.dtype, in_file)
    filled = 0
    for block in in_blocks(own, ROWS_PER_MESSAGE):
        received = min(ROWS_PER_MESSAGE * processes, count - filled)  # of all processes
        rows = whole[filled : filled + received]
        rows[::processes] = block
        for rank in range(1, min(processes, len(rows))):
            part = torch.from_numpy(np.empty(rows[rank::processes].shape, rows.dtype))
            torch.distributed.recv(part, rank, gloo_group())
            rows[rank::processes] = part.numpy()
        filled += received
        let_go(whole)
    return whole
