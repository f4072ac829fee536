"""Masked patch prediction for Vision Transformers: the whole method in one file.

Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021, section 4.6 and appendix B.1.2: corrupt half of an
image's patch embeddings, and predict the mean colour of each corrupted patch from the others.

    python mpp/nano.py

pre-trains a small ViT on 633 photographs of birds, in minutes, and writes an encoder for timm to runs/nano. Nothing is
imported from mpp: copy this file, and change it. On a CPU its weights are those of `mpp pretrain --run.threads 1`, to
the bit; a test holds that.

B images, N patches, K corrupted patches, D width, P side of a patch.
"""

import argparse
import io
import itertools
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet
import timm
import torch
import torch.nn.functional as F
from einops import rearrange
from PIL import Image
from timm.optim import muon
from torch import Tensor, nn
from torchvision.transforms.v2 import functional as transforms

# --- the recipe ---

IMAGE, PATCH = 64, 8  # sides, in pixels
GRID = IMAGE // PATCH
N = GRID**2
K = N // 2  # 50 % of the patches are corrupted:
MASK = 0.8  # 80 % of them become [mask],
RANDOM = 0.1  # 10 % get another patch's embedding, and 10 % keep their own
LEVELS = 8  # of each colour channel, 3 bits: 512 colours
WIDTH, DEPTH, HEADS = 128, 4, 4

BATCH = 64
WARMUP = 100  # steps, or a fifth of all
LEARNING_RATE = 1e-2  # of Muon, for the blocks' matrices
ADAM_SCALE = 3.0  # learning rate of NAdamW, for all else, as a multiple of it
WEIGHT_DECAY = 0.1
CLIP = 1.0  # largest norm of the gradient
CROP_AREA = (0.5, 1.0)  # of a training crop, as a share of the image
CROP_RATIO = (3 / 4, 4 / 3)  # width / height
CROP_ATTEMPTS = 10
EVAL_CROP = 0.875  # of a held-out image's shorter side
TIMM = dict(mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bilinear", crop_pct=EVAL_CROP, classifier="head")
NEIGHBOURS, TEMPERATURE = 20, 0.07  # of the kNN probe
HAS_BF16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()  # otherwise it is emulated

# --- random numbers: each is a function of seed, purpose, epoch and image, so no image changes another's ---

ORDER, CROP, CORRUPTION = range(3)
FIXED = 2**64 - 1  # the epoch of evaluations: crops and corruptions are always the same


def uniform(seed: int, purpose: int, epoch: int, index: int, count: int) -> np.ndarray:
    """`count` numbers in [0, 1)."""
    key = np.array([seed, 0], np.uint64)
    counter = np.array([0, epoch, index, purpose], np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(count)
    return (words >> np.uint64(11)) * 2.0**-53


# --- images, their crops, and the corruption of their patches ---


class Batch(NamedTuple):
    images: Tensor  # (B, 3, IMAGE, IMAGE) uint8
    positions: Tensor  # (B, K): the corrupted patches, ascending
    masked: Tensor  # (B, K) bool: the patch becomes [mask]
    sources: Tensor  # (B, K): otherwise, the patch whose embedding it gets: another, or itself


def load_images(file: Path) -> tuple[list[Tensor], Tensor]:
    """Photographs (3, H, W) uint8, and their labels, -1 where there is none."""
    table = pyarrow.parquet.read_table(file)
    images = []
    for cell in table["image"].to_pylist():
        picture = Image.open(io.BytesIO(cell["bytes"])).convert("RGB")
        images.append(torch.from_numpy(np.array(picture)).permute(2, 0, 1))
    labels = table["label"].fill_null(-1).to_pylist()
    return images, torch.tensor(labels)


def training_crop(image: Tensor, numbers: np.ndarray) -> Tensor:
    """An inception crop, resized; half of the crops are flipped."""
    box = crop_box(*image.shape[1:], attempts=numbers[1:].reshape(-1, 4))
    crop = transforms.resized_crop(image, *box, [IMAGE, IMAGE], antialias=True)
    return crop.flip(-1) if numbers[0] < 0.5 else crop


def crop_box(height: int, width: int, attempts: np.ndarray) -> tuple[int, int, int, int]:
    """Top, left, height, width: area and log ratio are uniform. If no attempt fits: the largest centre crop."""
    small, large = CROP_AREA
    slim, wide = CROP_RATIO
    for area, ratio, top, left in attempts.tolist():
        area = height * width * (small + (large - small) * area)
        ratio = math.exp(math.log(slim) + (math.log(wide) - math.log(slim)) * ratio)
        rows = round(math.sqrt(area / ratio))
        columns = round(math.sqrt(area * ratio))
        if rows <= height and columns <= width:
            top = int(top * (height - rows + 1))
            left = int(left * (width - columns + 1))
            return top, left, rows, columns
    rows = min(height, round(width / slim))
    columns = min(width, round(height * wide))
    return (height - rows) // 2, (width - columns) // 2, rows, columns


def centre_crop(image: Tensor) -> Tensor:
    """The middle of an image, for evaluations."""
    resized = transforms.resize(image, [round(IMAGE / EVAL_CROP)], antialias=True)
    return transforms.center_crop(resized, [IMAGE])


def draw_corruption(numbers: np.ndarray) -> Iterator[Tensor]:
    """Positions, masked and sources of an image: see `Batch`."""
    order, kind, source = np.split(numbers, [N, N + K])
    positions = np.sort(order.argsort()[:K])
    others = (source * (N - 1)).astype(int)
    others += others >= positions  # any patch but itself
    is_random = (kind >= MASK) & (kind < MASK + RANDOM)
    sources = np.where(is_random, others, positions)
    return map(torch.from_numpy, (positions, kind < MASK, sources))


def view(image: Tensor, seed: int, epoch: int, index: int) -> tuple[Tensor, ...]:
    """The crop and the corruption of an image in an epoch: a row of a Batch."""
    if epoch == FIXED:
        crop = centre_crop(image)
    else:
        crop = training_crop(image, uniform(seed, CROP, epoch, index, 1 + 4 * CROP_ATTEMPTS))
    return crop, *draw_corruption(uniform(seed, CORRUPTION, epoch, index, N + 2 * K))


def training_views(images: list[Tensor], seed: int) -> Iterator[tuple[Tensor, ...]]:
    """Views without end: each epoch has another order."""
    for epoch in itertools.count():
        order = uniform(seed, ORDER, epoch, 0, len(images)).argsort()
        for index in order:
            yield view(images[index], seed, epoch, index)


def fixed_views(images: list[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Views for evaluations: the same in every run."""
    for index, image in enumerate(images):
        yield view(image, 0, FIXED, index)


def in_batches(views: Iterator[tuple[Tensor, ...]]) -> Iterator[Batch]:
    """The next BATCH views at a time; an epoch may end within a batch."""
    while samples := list(itertools.islice(views, BATCH)):
        yield Batch(*map(torch.stack, zip(*samples, strict=True)))


# --- the targets: mean colours of patches ---


def patchify(images: Tensor) -> Tensor:
    """(B, 3, IMAGE, IMAGE) to patches (B, N, 3, P * P)."""
    return rearrange(images, "b c (h p) (w q) -> b (h w) c (p q)", p=PATCH, q=PATCH)


def take(rows: Tensor, positions: Tensor) -> Tensor:
    """(B, N, ...) at positions (B, K): (B, K, ...). (The gradient of `gather` is rounded in another way, in bf16.)"""
    images = torch.arange(len(rows))[:, None]
    return rows[images, positions]


def mean_colour(patches: Tensor) -> Tensor:
    """Pixels (..., 3, P * P) to the class of their mean: (red * 8 + green) * 8 + blue, each from 0 to 7."""
    levels = patches.sum(-1) * LEVELS // (255 * PATCH**2)
    red, green, blue = levels.clamp(max=LEVELS - 1).unbind(-1)
    return (red * LEVELS + green) * LEVELS + blue


def targets(batch: Batch) -> Tensor:
    """Classes (B, K) of the corrupted patches."""
    return mean_colour(take(patchify(batch.images), batch.positions))


# --- the network ---


class MaskedPatchPredictor(nn.Module):
    """timm's ViT with a learnable [mask], and a linear head on the corrupted patches."""

    def __init__(self):
        super().__init__()
        self.encoder = timm.create_model(
            "vit_base_patch16_224",
            num_classes=0,
            img_size=IMAGE,
            patch_size=PATCH,
            embed_dim=WIDTH,
            depth=DEPTH,
            num_heads=HEADS,
            global_pool="avg",  # of a whole image, the encoder returns the mean of its patches,
            fc_norm=False,  # after the last norm; [class] gets no gradient of its own
            pretrained_cfg=TIMM,  # saved with the weights
        )
        for block in self.encoder.blocks:
            block.attn.fused_attn = False  # step by step, which is faster on a CPU
        self.mask_token = nn.Parameter(torch.empty(WIDTH))
        self.head = nn.Linear(WIDTH, LEVELS**3)
        nn.init.trunc_normal_(self.mask_token, std=0.02)
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, batch: Batch) -> Tensor:
        """Logits (B, K, 512) of the corrupted patches."""
        patches = self.encoder.patch_embed(normalize(batch.images))  # (B, N, D)
        patches = self.corrupt(patches, batch)
        tokens = self.encoder._pos_embed(patches)  # (B, 1 + N, D): [class] is the first
        tokens = self.encoder.blocks[:-1](tokens)
        tokens = block_at(self.encoder.blocks[-1], tokens, 1 + batch.positions)  # (B, K, D)
        return self.head(self.encoder.norm(tokens))

    def corrupt(self, patches: Tensor, batch: Batch) -> Tensor:
        """Replace the embeddings of the corrupted patches, before positions are added."""
        mask = self.mask_token.to(patches.dtype)
        replaced = torch.where(batch.masked[..., None], mask, take(patches, batch.sources))
        positions = batch.positions[..., None].expand_as(replaced)
        return patches.scatter(1, positions, replaced)


def normalize(images: Tensor) -> Tensor:
    """Pixels from 0 to 255 to [-1, 1]."""
    return (images - 127.5) / 127.5


def block_at(block: nn.Module, tokens: Tensor, positions: Tensor) -> Tensor:
    """`take(block(tokens), positions)`, but for rounding: all tokens are keys and values, and only these queries."""
    attention = block.attn
    normed = block.norm1(tokens)
    query_weight, key_value_weight = attention.qkv.weight.split([WIDTH, 2 * WIDTH])
    query_bias, key_value_bias = attention.qkv.bias.split([WIDTH, 2 * WIDTH])
    queries = F.linear(take(normed, positions), query_weight, query_bias)
    keys_values = F.linear(normed, key_value_weight, key_value_bias)

    queries = rearrange(queries, "b k (h d) -> b h k d", h=HEADS)
    keys, values = rearrange(keys_values, "b n (two h d) -> two b h n d", two=2, h=HEADS)
    weights = (queries * attention.scale @ keys.mT).softmax(-1)
    attended = rearrange(weights @ values, "b h k d -> b k (h d)")
    tokens = take(tokens, positions) + attention.proj(attended)
    return tokens + block.mlp(block.norm2(tokens))


# --- the optimiser ---


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Muon for the blocks' matrices, NAdamW for the rest. Biases, norms, tokens and positions do not decay."""
    matrices, decayed, undecayed = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or name.endswith(("token", "pos_embed")):
            undecayed.append(parameter)
        elif "blocks" in name:
            matrices.append(parameter)
        else:
            decayed.append(parameter)
    groups = [
        dict(params=matrices, use_muon=True, weight_decay=WEIGHT_DECAY),
        dict(params=decayed, use_muon=False, weight_decay=WEIGHT_DECAY),
        dict(params=undecayed, use_muon=False, weight_decay=0.0),
    ]
    if not HAS_BF16:  # in which timm iterates
        muon.zeropower_via_newtonschulz = partial(muon.zeropower_via_newtonschulz, dtype=torch.float32)
    return muon.Muon(groups, momentum=0.95, nesterov=True, betas=(0.9, 0.95), fallback_lr_scale=ADAM_SCALE)


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then half a cosine to 0."""
    warmup = min(WARMUP, steps // 5)
    if step < warmup:
        return LEARNING_RATE * (step + 1) / warmup
    progress = (step - warmup) / (steps - warmup)
    return LEARNING_RATE * (1 + math.cos(math.pi * progress)) / 2


# --- the evaluation, on held-out images ---


@torch.no_grad()
def evaluate(model: nn.Module, images: list[Tensor]) -> dict[str, float]:
    """Loss of the corrupted patches; and on masked ones, accuracy of predictions, and of copies of visible patches."""
    losses = []
    right = []
    for batch in in_batches(fixed_views(images)):
        truth = targets(batch)
        logits = model(batch).float()
        losses.append(F.cross_entropy(logits.mT, truth, reduction="none"))
        patches = patchify(batch.images).int()
        first, second = nearest_visible(batch.positions)
        nearest = take(patches, first)
        two_nearest = (nearest + take(patches, second) + 1) // 2
        guesses = torch.stack([logits.argmax(-1), mean_colour(nearest), mean_colour(two_nearest)])
        right.append((guesses == truth)[:, batch.masked])
    shares = torch.cat(right, dim=1).double().mean(1)
    names = ("accuracy", "nearest", "two_nearest")
    return {"loss": torch.cat(losses).double().mean().item()} | dict(zip(names, shares.tolist(), strict=True))


def nearest_visible(positions: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest and the second nearest visible patch of each corrupted one (B, K); in reading order if equal."""
    places = torch.cartesian_prod(torch.arange(GRID), torch.arange(GRID))
    distances = (places[:, None] - places).square().sum(-1)  # (N, N), squared
    corrupted = torch.zeros(len(positions), N, dtype=torch.bool).scatter(1, positions, True)
    distances = distances[positions].masked_fill(corrupted[:, None], 2 * N)  # (B, K, N)
    order = distances.argsort(dim=-1, stable=True)
    return order[..., 0], order[..., 1]


@torch.no_grad()
def features(encoder: nn.Module, images: list[Tensor]) -> list[Tensor]:
    """The mean over patches after each block: (images, D) each."""
    outputs = []
    for batch in in_batches(fixed_views(images)):
        last, tokens = encoder.forward_intermediates(normalize(batch.images), output_fmt="NLC")
        tokens[-1] = last[:, 1:]  # after the last norm
        outputs.append([each.mean(1).float() for each in tokens])
    return [torch.cat(batches) for batches in zip(*outputs, strict=True)]


def knn_accuracy(references: Tensor, labels: Tensor, queries: Tensor, truth: Tensor) -> float:
    """Nearest neighbours by cosine vote, near ones more than others (Wu et al., 2018)."""
    similarity = F.normalize(queries) @ F.normalize(references).T
    cosines, nearest = similarity.topk(NEIGHBOURS)
    votes = torch.zeros(len(queries), int(labels.max()) + 1)
    votes.scatter_add_(1, labels[nearest], (cosines / TEMPERATURE).exp())
    return (votes.argmax(1) == truth).double().mean().item()


# --- the training ---


def main():
    parser = argparse.ArgumentParser(description="Masked patch prediction in one file.")
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "birds", help="a folder as mpp/birds")
    parser.add_argument("--out", type=Path, default="runs/nano", help="the encoder's folder")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16" if HAS_BF16 else "fp32")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bf16")
    images, labels = load_images(args.data / "train-00000-of-00001.parquet")
    held_out, held_out_labels = load_images(args.data / "test-00000-of-00001.parquet")
    labelled = [image for image, label in zip(images, labels, strict=True) if label >= 0]
    model = MaskedPatchPredictor()
    optimizer = build_optimizer(model)

    def report(step: int) -> None:
        with autocast:
            scalars = evaluate(model, held_out)
            references = features(model.encoder, labelled)
            queries = features(model.encoder, held_out)
        for depth in range(DEPTH):
            knn = knn_accuracy(references[depth], labels[labels >= 0], queries[depth], held_out_labels)
            scalars[f"knn_{depth + 1}"] = knn
        print(f"step {step}, held out:", ", ".join(f"{name} {value:.4f}" for name, value in scalars.items()))

    report(0)
    for step, batch in enumerate(in_batches(training_views(images, args.seed))):
        if step == args.steps:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps)
        with autocast:
            logits = model(batch)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets(batch).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 20 == 0:
            print(f"step {step + 1}, loss {loss.item():.4f}")
        if (step + 1) % 400 == 0 or step + 1 == args.steps:
            report(step + 1)
    timm.models.save_for_hf(model.encoder, args.out, safe_serialization=True)


if __name__ == "__main__":
    main()
