"""timm's plain transformers, called part by part around their blocks: `VisionTransformer`, `Eva` and `Beit`.

They are recognised by their attributes, not by their class:

| class | between patches and blocks | further arguments of each block |
|-|-|-|
| VisionTransformer | `_pos_embed`, `norm_pre` | nothing |
| Eva | `_pos_embed`, which also gives rotations; `norm_pre` | `rope`: one for all blocks, or each its own (mixed) |
| Beit | [class], positions, `pos_drop` | `shared_rel_pos_bias`, where the blocks share one |

B images, N patches, T tokens (prefix first: [class], registers), V or K of them, D width, d width of a head.
"""

import copy
import math
from collections.abc import Sequence
from typing import Any

import timm
import torch
import torch.nn.functional as F
from einops import rearrange
from timm.layers import Attention, LayerNorm, LayerScale, PatchEmbed, build_sincos2d_pos_embed, maybe_add_mask
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpp.config import Grid, Representation, check_grid, require
from mpp.errors import UserError
from mpp.runtime.messages import warn

PARTS = ("pretrained_cfg", "patch_embed", "pos_drop", "blocks", "norm", "fc_norm", "embed_dim", "num_prefix_tokens")
ABOVE_STEM = ("blocks", "norm", "fc_norm", "head", "head_dist", "attn_pool")
BIAS_TABLE = "relative_position_bias_table"
POOLS = {"mean": "avg", "class": "token"}
"""Pooling -> its name in timm."""
FIXED_POSITIONS = "sincos_2d"  # the position embeddings that are not learned
TIMM_ERRORS = (AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError)
"""Errors of timm for a model that it cannot build, or for weights of another one."""

BlockArguments = dict[str, Tensor | None]
"""Arguments of a block other than its tokens, by name."""


def gather_tokens(tokens: Tensor, index: Tensor) -> Tensor:
    """Tokens (B, N, D) at index (B, K): (B, K, D)."""
    return tokens.gather(1, index[..., None].expand(-1, -1, tokens.shape[-1]))


def uses_autocast(device: str) -> bool:
    """Whether autocast is on for a kind of device; `meta` has none."""
    return device != "meta" and torch.is_autocast_enabled(device)


# --- the adapter ---


def is_plain(model: nn.Module) -> bool:
    """Whether a timm model is a plain transformer, which `prepare_tokens` takes, and whose buffers are constants."""
    has_parts = all(hasattr(model, part) for part in PARTS) and not has_running_statistics(model)
    return has_parts and (hasattr(model, "_pos_embed") or hasattr(model, "rel_pos_bias"))


def prepare_tokens(
    encoder: nn.Module, patches: Tensor, kept: Tensor | None = None
) -> tuple[Tensor, list[BlockArguments]]:
    """Add prefix and positions to embedded patches, as the encoder's own `forward_features` does before its blocks.

    Args:
        patches: of `encoder.patch_embed`, (B, N, D); (B, rows, columns, D) where the encoder takes any size.
        kept: (B, V), the places of the tokens that are kept, among all T: the prefix, then some patches. None: all.
            Only for encoders with `takes_some_tokens`.
    Returns:
        Tokens (B, T, D) or (B, V, D), and further arguments of each block.
    """
    depth = len(encoder.blocks)
    if not hasattr(encoder, "_pos_embed"):  # Beit
        tokens = torch.cat([encoder.cls_token.expand(len(patches), -1, -1), patches], dim=1)
        if encoder.pos_embed is not None:
            tokens = tokens + encoder.pos_embed
        bias = None if encoder.rel_pos_bias is None else encoder.rel_pos_bias()
        return encoder.pos_drop(tokens), [{"shared_rel_pos_bias": bias}] * depth
    positioned = encoder._pos_embed(patches)
    tokens, rope = positioned if isinstance(positioned, tuple) else (positioned, None)
    if kept is not None:
        tokens = gather_tokens(tokens, kept)
    tokens = encoder.norm_pre(tokens)
    if rope is None:
        return tokens, [{}] * depth
    if kept is not None:
        prefix = encoder.num_prefix_tokens
        rope = rope[kept[:, prefix:] - prefix][:, None]  # (B, 1, V - prefix, 2 d)
    of_blocks = rope if getattr(encoder, "rope_mixed", False) else [rope] * depth  # of each (N, 2 d) or (heads, N, 2 d)
    return tokens, [{"rope": each} for each in of_blocks]


def takes_some_tokens(encoder: nn.Module) -> bool:
    """Whether the blocks run on a part of the tokens: tables of biases are added to the attention among all."""
    has_tables = any(name.endswith(BIAS_TABLE) for name, _ in encoder.named_parameters())
    is_mixed = getattr(encoder, "rope_mixed", False)  # rotations by head
    return getattr(encoder, "takes_any_tokens", True) and not has_tables and not is_mixed


def stem_parameters(encoder: nn.Module) -> set[str]:
    """Names of the parameters that act before the blocks or in all of them, such as a rotation's frequencies."""
    return {name for name, _ in encoder.named_parameters() if name.split(".")[0] not in ABOVE_STEM}


def model_without_memory(name: str, **arguments: Any) -> nn.Module:
    """A timm model on torch's `meta` device, to look at its parts; the global random numbers stay as they are."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return timm.create_model(name, **arguments)


# --- blocks, of whose last one a few tokens are needed ---


def run_blocks(
    blocks: Sequence[nn.Module],
    tokens: Tensor,
    checkpointed: bool,
    block_arguments: Sequence[BlockArguments],
    index: Tensor | None = None,
    last_at_few: bool = False,
) -> Tensor:
    """Tokens (B, T, D) after these blocks; with an index (B, K) those there, (B, K, D).

    Args:
        checkpointed: compute the activations of the blocks again in the backward pass, instead of keeping them.
        block_arguments: further arguments of each block.
        last_at_few: `runs_at_few` of the last block, which then computes only what is needed.
    """
    for block, arguments in zip(blocks, block_arguments, strict=True):
        if last_at_few and block is blocks[-1]:
            return block_at(block, tokens, index)
        if checkpointed:
            tokens = checkpoint(block, tokens, use_reentrant=False, **arguments)
        else:
            tokens = block(tokens, **arguments)
    return tokens if index is None else gather_tokens(tokens, index)


def block_at(block: Block, tokens: Tensor, index: Tensor) -> Tensor:
    """The output of timm's block at `index`, without computing the rest.

    Args:
        block: one with `runs_at_few`.
        tokens: (B, T, D), all of them: every token is a key and a value.
        index: (B, K), the tokens whose output is needed.
    Returns:
        (B, K, D).
    """
    if hasattr(block, "add_positions"):
        tokens = block.add_positions(tokens)
    attended = attention_at(block.attn, block.norm1(tokens), index)
    output = gather_tokens(tokens, index) + block.drop_path1(block.ls1(attended))
    return output + block.drop_path2(block.ls2(block.mlp(block.norm2(output))))


def runs_at_few(block: nn.Module, token_count: int) -> bool:
    """Whether `block_at` gives what the block itself gives. It is tried, because timm's next release may have another.

    In float64, and with random weights, so that parts count that begin at zero. A warning says where timm's plain block
    differs; other blocks (Eva's, Beit's) are known to.

    Args:
        token_count: T.
    """
    if not isinstance(block, Block) or not isinstance(block.attn, Attention):
        return False
    if next(block.parameters()).is_meta:
        return True  # there are no numbers to compare
    tried = copy.deepcopy(block).double().eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in tried.parameters():
        nn.init.normal_(parameter, std=0.05, generator=generator)
    tokens = torch.randn(1, token_count, tried.attn.qkv.in_features, generator=generator, dtype=torch.double)
    index = torch.tensor([[0, token_count - 1]])
    with torch.no_grad():
        is_same = torch.allclose(block_at(tried, tokens, index), gather_tokens(tried(tokens), index), rtol=1e-8)
    if not is_same:
        warn(f"timm {timm.__version__} has another block than mpp: the last one runs on all tokens, which is slower")
    return is_same


# --- attention ---


def attention_at(attention: Attention, tokens: Tensor, index: Tensor | None) -> Tensor:
    """Attention with only the tokens at `index` (B, K) as queries; None: all. (B, T, D) to (B, K, D).

    `PositionedAttention` of mpp/models/variants.py turns queries and keys, or adds to their products.
    """
    weight = attention.qkv.weight
    bias = attention.qkv.bias
    width = weight.shape[0] // 3
    query_bias, key_value_bias = (None, None) if bias is None else (bias[:width], bias[width:])
    query_tokens = tokens if index is None else gather_tokens(tokens, index)
    queries = F.linear(query_tokens, weight[:width], query_bias)  # (B, K, width)
    keys_values = F.linear(tokens, weight[width:], key_value_bias)  # (B, T, 2 * width)
    queries = rearrange(queries, "b k (h d) -> b h k d", h=attention.num_heads)
    keys, values = rearrange(keys_values, "b t (two h d) -> two b h t d", two=2, h=attention.num_heads)
    queries = attention.q_norm(queries)
    keys = attention.k_norm(keys)
    rotation = getattr(attention, "rotation", None)
    if rotation is not None:
        queries = rotation(queries, index)
        keys = rotation(keys, None)
    added = getattr(attention, "added", None)
    logits = None if added is None else added(queries, index).to(queries.dtype)  # (B or 1, heads, K, T), to add
    if attention.fused_attn:
        dropout = attention.attn_drop.p if attention.training else 0.0
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=logits, dropout_p=dropout)
    else:
        products = maybe_add_mask(queries * attention.scale @ keys.mT, logits)
        mixed = attention.attn_drop(products.softmax(-1)) @ values
    mixed = mixed.transpose(1, 2).flatten(2)  # (B, K, D)
    return attention.proj_drop(attention.proj(attention.norm(mixed)))


def shows_weights(attention: nn.Module | None) -> bool:
    """Whether an attention among all tokens gives its weights to `attn_drop` when it is not fused: timm's and ours."""
    return hasattr(attention, "fused_attn") and getattr(attention, "lines", None) is None


# --- tokens between blocks in bf16 (`model.residual`); float32 positions make them float32 ---


class ResidualNorm(LayerNorm):
    """timm's layer norm; of bf16 tokens it is bf16, where autocast on a GPU would write float32 copies of them."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.bfloat16:
            return super().forward(x)
        affine = [each if each is None else each.to(x.dtype) for each in (self.weight, self.bias)]
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(x, self.normalized_shape, *affine, self.eps)  # sums are float32 inside


def use_bf16_residual(encoder: nn.Module) -> None:
    """Run an encoder's blocks on bf16 tokens under autocast; its weights and their names stay as they are."""
    before_blocks = getattr(encoder, "norm_pre", encoder.pos_drop)
    before_blocks.register_forward_hook(to_autocast_type)
    use_bf16_norms(encoder)


def use_bf16_norms(module: nn.Module) -> None:
    """Keep bf16 tokens in bf16 through the norms and scales of a module."""
    for child in module.modules():
        if type(child) is LayerNorm:
            child.__class__ = ResidualNorm
        elif isinstance(child, LayerScale) or getattr(child, "gamma_1", None) is not None:  # blocks of Eva and Beit
            child.register_forward_hook(to_autocast_type)


def has_bf16_residual(encoder: nn.Module) -> bool:
    """Whether the encoder's blocks run on bf16 tokens: see `use_bf16_residual`."""
    return any(isinstance(module, ResidualNorm) for module in encoder.modules())


def to_autocast_type(_: nn.Module, __: Any, tokens: Tensor) -> Tensor:
    """Hook: tokens in bf16 under autocast; without, float32 ones stay so."""
    return tokens.to(torch.bfloat16) if uses_autocast(tokens.device.type) else tokens


# --- properties ---


def cell_grid(encoder: nn.Module) -> tuple[Grid, int]:
    """Grid of adjacent squares that an image consists of, and the side of a square in pixels.

    They are the patches. Where patches overlap, squares are as large as patches; those of a hybrid are as large as the
    stride of its convolutions.
    """
    embed = encoder.patch_embed
    side = embed.patch_size[0] if isinstance(embed, PatchEmbed) else embed.feat_ratio()
    rows, columns = (size // side for size in embed.img_size)
    return (rows, columns), side


def check_cells(encoder: nn.Module) -> None:
    """Raise UserError where cells are no squares, or the image is no whole number of them (see `cell_grid`)."""
    _, side = cell_grid(encoder)
    height, width = encoder.patch_embed.feat_ratio(as_scalar=False)
    require(height == width, "the patch of the encoder", f"{height} x {width} pixels", "a square")
    if not isinstance(encoder.patch_embed, PatchEmbed):  # a hybrid's convolutions pad to a power of two
        side = 2 ** math.ceil(math.log2(side))
    check_grid(encoder.patch_embed.img_size, side)


def has_class(encoder: nn.Module) -> bool:
    """Whether a timm model has a [class] token; not all of timm's modules have `has_class_token`."""
    return getattr(encoder, "has_class_token", getattr(encoder, "cls_token", None) is not None)


def set_pooling(encoder: nn.Module, representation: Representation, classes: int = 0) -> None:
    """Set the output of a timm model: the `mean` of the patches or the `class` token; with `classes`, logits.

    The head for these is new. Models that are no plain transformers, and DeiT's students, keep timm's own pooling.
    """
    is_free = is_plain(encoder) and not hasattr(encoder, "dist_token")
    if is_free or classes:
        encoder.reset_classifier(classes, POOLS[representation] if is_free else None)


def has_running_statistics(model: nn.Module) -> bool:
    """Whether a model has batch norms, whose statistics each forward pass changes."""
    return any(name.endswith("running_mean") for name, _ in model.named_buffers())


def has_fused_attention(encoder: nn.Module) -> bool:
    """Whether attention is computed by torch's fused kernel: see `set_attention`."""
    return any(getattr(module, "fused_attn", False) for module in encoder.modules())


# --- switches ---


def set_attention(encoder: nn.Module, fused: bool) -> None:
    """Compute attention by torch's fused kernel, or step by step: the same result at another speed."""
    for module in encoder.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused


def checkpoint_activations(encoder: nn.Module, setting: str) -> None:
    """Keep few activations of a timm model, and compute the others again in the backward pass.

    Args:
        setting: name of the setting that asks for it.
    Raises:
        UserError: timm cannot do so for this model, or it has batch norms, whose statistics would count each batch
            twice.
    """
    allowed = "false for this model: its batch norms would see each batch twice"
    require(not has_running_statistics(encoder), setting, True, allowed)
    try:
        encoder.set_grad_checkpointing(True)
    except (AssertionError, AttributeError):
        raise UserError(f"{setting} is true; it must be false: timm has none for this model") from None


def sincos_2d(grid: Grid, width: int) -> Tensor:
    """Fixed position embeddings (MAE): sines and cosines of the row, then of the column, at width / 4 frequencies each.

    Args:
        width: a multiple of 4.
    Returns:
        (rows * columns, width).
    """
    return build_sincos2d_pos_embed(list(grid), width, interleave_sin_cos=True)


def fix_positions(encoder: nn.Module) -> None:
    """Replace learned positions by sines and cosines; [class] and registers have none.

    Raises:
        UserError: the encoder has no table of positions, or its width is no multiple of 4.
    """
    setting = ("model.position", FIXED_POSITIONS)
    width = encoder.embed_dim
    require(encoder.pos_embed is not None, *setting, "learned with a model that has no table of position embeddings")
    require(width % 4 == 0, *setting, f"learned with a width ({width}) that is not a multiple of 4")
    table = sincos_2d(encoder.patch_embed.grid_size, width)
    table = F.pad(table, (0, 0, encoder.pos_embed.shape[1] - len(table), 0))[None]
    del encoder.pos_embed
    encoder.register_buffer("pos_embed", table)  # under timm's name, and not trained
