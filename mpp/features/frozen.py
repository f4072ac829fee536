"""Frozen features: what an encoder says of an image after each of its blocks, for every image of a dataset.

Probes, kNN while training and the evaluation suite read them here: a name such as `depth_04` means the same everywhere.
B images, D width.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from PIL import Image
from timm.data import resolve_model_data_config
from torch import Tensor, nn
from torch.nn.functional import pad

from mpp.config import ImagesConfig, Representation, require
from mpp.data.crops import centre_crop
from mpp.data.decoding.channels import select_channels
from mpp.data.decoding.pictures import from_pil
from mpp.data.views import Batch
from mpp.errors import UserError
from mpp.models.encoder import Normalize
from mpp.models.timm_models import has_class
from mpp.runtime.arrays import IN_MEMORY, Rows, in_blocks
from mpp.runtime.processes import hosts

AT_ONCE = 64  # images that go through the encoder together
IMAGES = "PIL images, or a tensor (B, {0}, H, W), of torch.uint8 or from 0 to 255"
ROWS = 4096  # of each process, sent at a time: what bounds the memory


def stages(encoder: nn.Module) -> Sequence[nn.Module]:
    """What depth counts: the blocks of a ViT, the stages of a BiT ResNet; of other models there is only the end."""
    named = (getattr(encoder, name, None) for name in ("blocks", "stages"))
    return next((found for found in named if isinstance(found, nn.Sequential | nn.ModuleList)), (encoder,))


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
    last, tokens = len(stages(encoder)), tokens_at(encoder, images, depths)
    return [
        pool(encoder, of_depth, representation, depth == last).float()
        for depth, of_depth in zip(depths, tokens, strict=True)
    ]


@torch.no_grad()
def extract_features(
    encoder: nn.Module, images: Tensor | Sequence[Image.Image], representation: Representation = "mean"
) -> Tensor:
    """Features of images in memory, as the evaluation sees them: resized, cropped at the centre, normalised.

    Args:
        encoder: of `mpp.load_encoder`, or timm's; where it lies, it computes.
        images: PIL's, of any sizes and modes, or one alone; or (B, C, H, W), uint8 or floats from 0 to 255.
    Returns:
        (B, D) float32 on the CPU, or (B, 2 D) for `both`.
    Raises:
        UserError: no images, or other numbers than bytes.
    """
    images = [images] if isinstance(images, Image.Image) else images
    wanted = resolve_model_data_config(encoder)
    config = ImagesConfig(channels=wanted["input_size"][0])
    require(len(images) > 0, "images", "empty", IMAGES.format(config.channels))
    built_for = getattr(getattr(encoder, "patch_embed", None), "img_size", None)  # not what its weights were made for
    size, device = tuple(built_for or wanted["input_size"])[-2:], next(encoder.parameters()).device
    crops = torch.stack([centre_crop(to_pixels(each, config), size, wanted["crop_pct"]) for each in images])
    normalize = Normalize(wanted["mean"], wanted["std"]).to(device)
    found, training = [], {module: module.training for module in encoder.modules()}
    encoder.eval()  # timm builds models in train mode
    try:
        for batch in crops.split(AT_ONCE):
            found += features_at(encoder, normalize(batch.to(device)), [len(stages(encoder))], representation)
    finally:
        for module, mode in training.items():
            module.training = mode
    return torch.cat(found).cpu()


def to_pixels(image: Tensor | Image.Image, config: ImagesConfig) -> Tensor:
    """One of the images of `extract_features`, (C, H, W) from 0 to 255."""
    if isinstance(image, Image.Image):
        values, kind = select_channels(from_pil(image, config), config), f"a PIL image of mode {image.mode}"
        require(
            values.dtype == np.uint8, "images", kind, f"of 8 bits, or a tensor (B, {config.channels}, H, W), scaled"
        )
        return torch.from_numpy(np.ascontiguousarray(values))  # an upright view may run backwards
    allowed = IMAGES.format(config.channels)
    found = f"{image.dtype} {tuple(image.shape)} each" if torch.is_tensor(image) else f"of {type(image).__name__}"
    fits = torch.is_tensor(image) and image.ndim == 3 and len(image) == config.channels
    if fits and image.is_floating_point():  # 0 to 1 is what many libraries have
        found, most = f"{found} up to {image.max():g}", image.max()
        fits = bool(image.min() >= 0) and (most == 0 or 1 < most <= 255)
    require(fits and (image.dtype == torch.uint8 or image.is_floating_point()), "images", found, allowed)
    return image.cpu() if image.dtype == torch.uint8 else image.float().cpu()


def tokens_at(encoder: nn.Module, images: Tensor, depths: Sequence[int]) -> list[Tensor]:
    """Tokens after each depth.

    Args:
        encoder: timm's, without a head.
        images: (B, C, H, W), normalised.
        depths: from 1; the last one is the encoder's output, after its final norm.
    Returns:
        (B, prefix + N, D) for each depth, or a feature map (B, D, H, W). Where [class] comes in after the blocks (CaiT,
        XCiT), there are zeros in its place at earlier depths.
    """
    blocks = stages(encoder)
    last, seen = len(blocks), {}
    hooks = [
        blocks[depth - 1].register_forward_hook(lambda _, args, out, depth=depth: seen.update({depth: out}))
        for depth in depths
        if depth != last
    ]
    try:
        seen[last] = encoder.forward_features(images)
    finally:
        for hook in hooks:
            hook.remove()
    prefix, found = getattr(encoder, "num_prefix_tokens", 0), [seen[depth] for depth in depths]
    late = [each.ndim == 3 and each.shape[1] + prefix == seen[last].shape[1] and prefix > 0 for each in found]
    return [pad(each, (0, 0, prefix, 0)) if missing else each for each, missing in zip(found, late, strict=True)]


def pool(encoder: nn.Module, tokens: Tensor, representation: Representation, normed: bool = True) -> Tensor:
    """Tokens to a feature of the image.

    What is no ViT is pooled by timm's own head, at its end: some have their last norm, or a layer, in there.

    Args:
        encoder: timm's, that they come from.
        tokens: (B, prefix + N, D), or a feature map (B, D, H, W).
        normed: whether they are the encoder's output: some encoders norm after pooling.
    Returns:
        (B, D), or (B, 2 D) for `both`; where timm's head pools, D is `encoder.head_hidden_size`.
    Raises:
        UserError: a [class] token is asked for and there is none.
    """
    if normed and representation == "mean" and not hasattr(encoder, "num_prefix_tokens"):
        return encoder.forward_head(tokens, pre_logits=True)
    parts = []
    if representation in ("class", "both"):
        if not has_class(encoder):
            raise UserError(f"representation is {representation}, but this encoder has no [class] token; use mean")
        parts.append(tokens[:, 0])
    if representation in ("mean", "both"):
        if tokens.ndim == 4:
            places = (1, 2) if getattr(encoder, "output_fmt", "NCHW") == "NHWC" else (2, 3)
            parts.append(tokens.mean(places))
        else:
            parts.append(tokens[:, getattr(encoder, "num_prefix_tokens", 0) :].mean(1))
    if normed and hasattr(encoder, "fc_norm"):
        parts = [encoder.fc_norm(part) for part in parts]
    return torch.cat(parts, dim=-1)


def extract(
    batches: Iterable[Batch], encode: Callable[[Tensor], list[Tensor]], count: int, accelerator: Accelerator
) -> tuple[list[NDArray[np.float32]], NDArray[np.int64]]:
    """Features of a whole dataset, on the main process; nothing on the others. What is large is mapped from files.

    Args:
        batches: this process's: the images rank, rank + processes, ... in their order.
        encode: images (B, C, H, W) on the device to features (B, D), one for each depth.
        count: images of the dataset.
    Returns:
        (count, D) for each depth; labels (count,), or (count, L) where an image may have several. On the other
        processes no depth, and no label.
    """
    rank, processes = accelerator.process_index, accelerator.num_processes
    own_count = len(range(rank, count, processes))
    collected: list[Rows] = []
    for batch in batches:
        with torch.no_grad(), accelerator.autocast():
            encoded = encode(batch.images.to(accelerator.device, non_blocking=True))
        parts = [part.float().cpu().numpy() for part in encoded] + [batch.labels.numpy()]
        in_files = count * sum(part[0].nbytes for part in parts) > IN_MEMORY
        collected = collected or [Rows((own_count, *part.shape[1:]), part.dtype, in_files) for part in parts]
        for rows, part in zip(collected, parts, strict=True):
            rows.append(part)
    own = [rows.array() for rows in collected]
    if not accelerator.is_main_process:
        for part in own:
            send(part)
        return [], np.empty(0, np.int64)
    if processes > 1:
        in_files = count * sum(part[:1].nbytes for part in own) > IN_MEMORY
        own = [interleave(part, count, processes, in_files) for part in own]
    return own[:-1], own[-1]


def send(own: NDArray) -> None:
    """Send rows of this process to the main process, where `interleave` receives them."""
    for block in in_blocks(own, ROWS):
        torch.distributed.send(torch.from_numpy(block), 0, hosts())


def interleave(own: NDArray, count: int, processes: int, in_file: bool = False) -> NDArray:
    """All rows, of which process r sends the rows r, r + processes, ...; a process without rows sends nothing.

    Args:
        own: the rows of this process, the main one.
        count: rows of all.
        in_file: see `Rows`.
    """
    whole = Rows((count, *own.shape[1:]), own.dtype, in_file)
    for block in in_blocks(own, ROWS):
        rows = np.empty((min(ROWS * processes, count - whole.row_count), *own.shape[1:]), own.dtype)
        rows[::processes] = block
        for rank in range(1, min(processes, len(rows))):
            part = torch.from_numpy(np.empty(rows[rank::processes].shape, rows.dtype))
            torch.distributed.recv(part, rank, hosts())
            rows[rank::processes] = part.numpy()
        whole.append(rows)
    return whole.array()
