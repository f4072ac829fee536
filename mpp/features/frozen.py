"""Frozen features: the output of an encoder's blocks for an image, and for every image of a dataset.

The probe while training and the evaluation read them here: a name such as `depth_04` means the same everywhere.
B images, N patches, D width.
"""

from collections.abc import Callable, Iterable, Sequence
from inspect import signature
from typing import Any, get_args

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image
from timm.data import resolve_model_data_config
from torch import Tensor, nn

from mpp.config import ImagesConfig, Representation, require
from mpp.data.crops import centre_crop
from mpp.data.decoding.channels import Stored, select_channels
from mpp.data.decoding.pictures import from_pil
from mpp.data.views import Batch
from mpp.errors import Unavailable
from mpp.models.encoder import Normalize
from mpp.models.plain import has_class
from mpp.runtime.processes import gloo_group

IMAGES_PER_FORWARD = 64
BASELINE_CELLS = 8  # per side, of the colour baselines of the probe and of `floor:pixels`


# --- the features of some images ---


def stages(encoder: nn.Module) -> Sequence[nn.Module]:
    """The units of depth, whose outputs timm gives: blocks of a ViT, stages of a ResNet; other models count as one."""
    if not hasattr(encoder, "forward_intermediates"):
        return (encoder,)
    parts = getattr(encoder, "blocks" if gives_tokens(encoder) else "stages", None)
    return parts if isinstance(parts, nn.Sequential | nn.ModuleList) else (encoder,)


def gives_tokens(encoder: nn.Module) -> bool:
    """Whether timm gives an encoder's tokens after each block, [class] and registers among them."""
    return "return_prefix_tokens" in signature(encoder.forward_intermediates).parameters


def tokens_at(encoder: nn.Module, images: Tensor, depths: Sequence[int]) -> list[Tensor]:
    """Tokens after each depth.

    Args:
        encoder: timm's, without a head.
        images: (B, C, H, W), normalised.
        depths: ascending, from 1; the last one is the encoder's output, after its final norm.
    Returns:
        (B, prefix + N, D) for each depth, or a feature map (B, D, H, W). Outputs of other models may be anything that
        timm's own head pools.
    Raises:
        Unavailable: there is no such depth.
    """
    last = len(stages(encoder))
    earlier = [depth for depth in depths if depth != last]
    if not all(0 < depth < last for depth in earlier):
        raise Unavailable(f"depth is {earlier}; it must be at most {last}, or last, with this {type(encoder).__name__}")
    if not earlier:
        return [encoder.forward_features(images) for _ in depths]
    options: dict[str, Any] = {"indices": [depth - last - 1 for depth in earlier]}  # from the end: a stem may be first
    if gives_tokens(encoder):
        options |= {"output_fmt": "NLC", "return_prefix_tokens": encoder.num_prefix_tokens > 0}
    output, intermediates = encoder.forward_intermediates(images, **options)
    tokens = [torch.cat([each[1], each[0]], 1) if isinstance(each, tuple) else each for each in intermediates]
    return [*tokens, output] if depths[-1] == last else tokens


def pool(encoder: nn.Module, tokens: Tensor, representation: Representation, normed: bool = True) -> Tensor:
    """Tokens to a feature of the image.

    The output of models other than ViTs is pooled by timm's own head: some have their last norm, or a layer, in it.

    Args:
        encoder: the timm model that they come from.
        tokens: (B, prefix + N, D), or a feature map (B, D, H, W).
        representation: `class` token, `mean` over patches (or places of a feature map), or `both` side by side.
        normed: whether they are the encoder's output: some encoders norm after pooling.
    Returns:
        (B, D), or (B, 2 D) for `both`; where timm's head pools, D is `encoder.head_hidden_size`.
    Raises:
        Unavailable: the [class] token is asked for, and there is none.
    """
    prefix = getattr(encoder, "num_prefix_tokens", None)
    if normed and representation == "mean" and prefix is None:
        return encoder.forward_head(tokens, pre_logits=True)
    if representation != "mean" and not has_class(encoder):
        raise Unavailable(f"representation is {representation}, but this encoder has no [class] token; use mean")
    mean = tokens.mean((2, 3)) if tokens.ndim == 4 else tokens[:, prefix or 0 :].mean(1)
    parts = {"class": [tokens[:, 0]], "mean": [mean], "both": [tokens[:, 0], mean]}[representation]
    if normed and hasattr(encoder, "fc_norm"):
        parts = [encoder.fc_norm(part) for part in parts]
    return torch.cat(parts, dim=-1)


def features_at(
    encoder: nn.Module, images: Tensor, depths: Sequence[int], representation: Representation
) -> list[Tensor]:
    """Features after each depth, (B, D) float32 or (B, 2 D) for `both`: see `tokens_at` and `pool`."""
    last = len(stages(encoder))
    tokens_by_depth = zip(depths, tokens_at(encoder, images, depths), strict=True)
    return [pool(encoder, tokens, representation, normed=depth == last).float() for depth, tokens in tokens_by_depth]


# --- images in memory ---


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
    require(len(images) > 0, "images", "empty", "at least one image")
    data_config = resolve_model_data_config(encoder)
    channels, *size = data_config["input_size"]
    built_for = getattr(getattr(encoder, "patch_embed", None), "img_size", None)  # may differ from the weights' size
    size = tuple(built_for or size)
    crops = [centre_crop(to_pixels(image, channels), size, data_config["crop_pct"]) for image in images]

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


def to_pixels(image: Tensor | Image.Image, channels: int) -> Tensor:
    """One of the images of `extract_features`, (C, H, W) from 0 to 255."""
    if isinstance(image, Image.Image):
        config = ImagesConfig(channels=channels)
        values = select_channels(Stored(from_pil(image, config)), config)
        image = torch.from_numpy(np.ascontiguousarray(values))  # the view of an upright image may run backwards
    allowed = f"PIL images of 8 bits, or a tensor (B, {channels}, H, W), of torch.uint8 or from 0 to 255"
    require(torch.is_tensor(image), "images", f"of {type(image).__name__}", allowed)
    low, high = image.float().aminmax()
    is_in_range = low == high == 0 or (low >= 0 and 1 < high <= 255)  # many libraries have values from 0 to 1
    is_of_bytes = image.dtype == torch.uint8 or (image.is_floating_point() and is_in_range)
    fits = image.ndim == 3 and len(image) == channels and is_of_bytes
    require(fits, "images", f"{image.dtype} {tuple(image.shape)} each up to {high:g}", allowed)
    return (image if image.dtype == torch.uint8 else image.float()).cpu()


# --- all images of a dataset ---


def extract(
    batches: Iterable[Batch], encode: Callable[[Tensor], list[Tensor]], count: int, accelerator: Accelerator
) -> tuple[list[Tensor], Tensor]:
    """Features of a whole dataset, on the CPU of the main process; empty on the others.

    Args:
        batches: of this process: the images rank, rank + processes, ... in their order.
        encode: images (B, C, H, W) on the device to features (B, D), one for each depth.
        count: images of the dataset.
    Returns:
        (count, D) float32 for each depth; labels (count,), or (count, L) where an image may have several. On the other
        processes no depth, and no label.
    """
    rows = -(-count // accelerator.num_processes)  # of each process: the last row may be empty
    columns: list[Tensor] = []
    filled = 0
    for batch in batches:
        with torch.no_grad(), accelerator.autocast():
            encoded = encode(batch.images.to(accelerator.device, non_blocking=True))
        parts = [*(features.float().cpu() for features in encoded), batch.labels]
        columns = columns or [part.new_empty(rows, *part.shape[1:]) for part in parts]
        for column, part in zip(columns, parts, strict=True):
            column[filled : filled + len(part)] = part
        filled += len(batch.labels)
    if accelerator.num_processes > 1:
        columns = gather_rows(columns, count, accelerator)
    *features, labels = columns or [torch.empty(0, dtype=torch.int64)]
    return features, labels


def gather_rows(own: list[Tensor], count: int, accelerator: Accelerator) -> list[Tensor]:
    """All rows of each column, on the main process; no column on the others.

    Args:
        own: as many rows in each process, perhaps one too many: process r has the rows r, r + processes, ...; no
            columns where it has none.
    """
    blank = [[torch.empty_like(column, device="meta") for column in own]]
    torch.distributed.broadcast_object_list(blank, src=0, group=gloo_group())
    whole = []
    for column in own or [torch.empty_like(column, device="cpu") for column in blank[0]]:
        is_main = accelerator.is_main_process
        parts = [torch.empty_like(column) for _ in range(accelerator.num_processes)] if is_main else None
        torch.distributed.gather(column, parts, group=gloo_group())
        if parts:
            whole.append(torch.stack(parts, dim=1).flatten(0, 1)[:count])
    return whole
