"""Pictures of images, of their corruption as the model sees it, and of predictions."""

from collections.abc import Sequence

import torch
from einops import rearrange, repeat
from torch import Tensor

from mpp.corruption import Corruption, corrupt
from mpp.data.crops import to_8_bits
from mpp.objectives import GREY, Objective, patchify, select_patches

PANEL_SIDE = 128  # pixels of an image in a panel, at least half of it
CONTRAST = (0.02, 0.98)  # shares of an image's values that become black and white for display
COLUMNS = ("original", "corrupted", "predicted", "true")


def as_rgb(images: Tensor, bands: Sequence[int] | None = None) -> Tensor:
    """Images in colours for display, (..., 3, H, W) uint8.

    Args:
        images: (..., C, H, W) from 0 to 255.
        bands: the channels that are red, green and blue, or the one that is grey, counted from 1. None: the first
            three, or the first where there are fewer.
    """
    bands = bands or ((1, 2, 3) if images.shape[-3] >= 3 else (1,))
    pixels = to_8_bits(images[..., [band - 1 for band in bands], :, :])
    return pixels.expand(*pixels.shape[:-3], 3, *pixels.shape[-2:])


def stretch(images: Tensor, like: Tensor | None = None) -> Tensor:
    """Images (..., C, H, W) from 0 to 255 with contrast for the eye: the 2nd to the 98th percentile become 0 and 255.

    Of three channels together, so that colours stay; else of each channel. RGB and grey of 8 bits stay as they are.

    Args:
        like: the images (B, C, H, W) whose percentiles count. None: these.
    """
    reference = images if like is None else like
    *leading, channels, _, _ = reference.shape
    if reference.dtype == torch.uint8 and channels in (1, 3):
        return images
    ordered = reference.float().flatten(-3 if channels == 3 else -2).sort(-1).values
    last = ordered.shape[-1] - 1
    low, high = (ordered[..., round(share * last)].reshape(*leading, -1, 1, 1) for share in CONTRAST)
    stretched = ((images.float() - low) * 255 / (high - low).clamp(min=1)).clamp(0, 255)
    return torch.where(high - low >= 1, stretched, images.float())


def prediction_columns(
    objective: Objective, predictions: Tensor, targets: Tensor, images: Tensor, corruption: Corruption
) -> Tensor:
    """Each image as COLUMNS: itself, as the model saw it, with predictions, with targets.

    Uncorrupted patches are the image's in all four, and so is the contrast: see `stretch`.

    Args:
        predictions, targets: (B, K, outputs) and (B, K, ...) of these images and this corruption.
        images: (B, C, H, W).
    Returns:
        (4, B, C, H, W) from 0 to 255.
    """
    patches = patchify(images, objective.patch_size)
    clean = select_patches(patches, corruption.positions)
    index = corruption.positions[..., None, None, None].expand_as(clean)
    painted = [objective.paint(shown, clean) for shown in (objective.decide(predictions), targets)]
    columns = [patches, *(patches.scatter(1, index, pixels.to(patches.dtype)) for pixels in painted)]
    original, predicted, true = stretch(unpatchify(torch.stack(columns), images), images)
    return torch.stack([original, as_seen(original, corruption, objective.patch_size), predicted, true])


def as_seen(images: Tensor, corruption: Corruption, patch_size: int) -> Tensor:
    """Images (B, C, H, W) as the model sees them: [mask] is grey."""
    patches = patchify(images, patch_size)
    grey = torch.full(patches[0, 0].shape, GREY, device=patches.device).flatten()
    seen = corrupt(patches.flatten(2).float(), grey, corruption)
    return unpatchify(seen.to(images.dtype).view(patches.shape), images)


def unpatchify(patches: Tensor, images: Tensor) -> Tensor:
    """Patches (..., N, C, P, P) as images (..., C, H, W), as high as these."""
    rows = images.shape[-2] // patches.shape[-2]
    return rearrange(patches, "... (h w) c p q -> ... c (h p) (w q)", h=rows)


def prediction_panel(columns: Tensor) -> Tensor:
    """Columns (n, B, C, H, W) as one picture with a row for each image, (3, B * H, n * W); small W are enlarged."""
    times = max(1, PANEL_SIDE // columns.shape[-1])
    return repeat(as_rgb(columns), "n b c h w -> c (b h y) (n w x)", y=times, x=times)
