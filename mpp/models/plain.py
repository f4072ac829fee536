"""timm's plain transformers, called part by part around their blocks: `VisionTransformer`, `Eva` and `Beit`.

They are recognised by their attributes, not by their class:

| class | between patches and blocks | further arguments of each block |
|-|-|-|
| VisionTransformer | `_pos_embed`, `norm_pre` | nothing |
| Eva | `_pos_embed`, which also gives rotations; `norm_pre` | `rope`: one for all blocks, or each its own (mixed) |
| Beit | [class], positions, `pos_drop` | `shared_rel_pos_bias`, where the blocks share one |

B images, N patches, T tokens (prefix first: [class], registers), V of them, D width, d width of a head.
"""

import sys
from collections.abc import Callable
from functools import cache
from inspect import Parameter, signature
from typing import Any, NamedTuple

import timm
import torch
from torch import Tensor, nn

from mpp.models.attention import gather_tokens

PARTS = ("patch_embed", "pos_drop", "blocks", "norm", "fc_norm", "embed_dim", "num_prefix_tokens")
ABOVE_STEM = ("blocks", "norm", "fc_norm", "head", "head_dist", "attn_pool")
BIAS_TABLE = "relative_position_bias_table"

BlockArguments = dict[str, Tensor]
"""Arguments of a block other than its tokens, by name."""


class PreparedTokens(NamedTuple):
    """Tokens with positions and prefix, ready for the blocks."""

    tokens: Tensor
    """(B, T, D), or (B, V, D)."""
    block_arguments: list[BlockArguments]
    """Of each block."""


def is_plain(model: nn.Module) -> bool:
    """Whether a timm model is a plain transformer, which `prepare_tokens` takes."""
    has_parts = all(hasattr(model, part) for part in PARTS)
    return has_parts and (hasattr(model, "_pos_embed") or hasattr(model, "rel_pos_bias"))


def prepare_tokens(encoder: nn.Module, patches: Tensor, kept: Tensor | None = None) -> PreparedTokens:
    """Add prefix and positions to embedded patches, as the encoder's own `forward_features` does before its blocks.

    Args:
        patches: of `encoder.patch_embed`, (B, N, D); (B, rows, columns, D) where the encoder takes any size.
        kept: (B, V), the places of the tokens that are kept, among all T: the prefix, then some patches. None: all.
            Only for encoders with `takes_some_tokens`.
    """
    if hasattr(encoder, "_pos_embed"):
        positioned = encoder._pos_embed(patches)
        tokens, rope = positioned if isinstance(positioned, tuple) else (positioned, None)
        block_arguments = rotations(encoder, rope, kept)
    else:
        tokens, block_arguments = prepare_beit_tokens(encoder, patches)
    if kept is not None:
        tokens = gather_tokens(tokens, kept)
    if hasattr(encoder, "norm_pre"):
        tokens = encoder.norm_pre(tokens)
    return PreparedTokens(tokens, block_arguments)


def rotations(encoder: nn.Module, rope: Tensor | None, kept: Tensor | None) -> list[BlockArguments]:
    """The rotation that each block gets, of all patches or of those that are kept.

    Args:
        rope: (N, 2 d) for all blocks, or (depth, heads, N, 2 d); None: there is none.
        kept: see `prepare_tokens`.
    """
    depth = len(encoder.blocks)
    if rope is None:
        return [{} for _ in range(depth)]
    places = None
    if kept is not None:
        prefix = encoder.num_prefix_tokens
        places = kept[:, prefix:] - prefix
    if getattr(encoder, "rope_mixed", False):
        return [{"rope": rotation_at(of_block, places)} for of_block in rope]
    of_all_blocks = rotation_at(rope, places)
    return [{"rope": of_all_blocks} for _ in range(depth)]


def rotation_at(rope: Tensor, places: Tensor | None) -> Tensor:
    """A rotation (N, 2 d) or (heads, N, 2 d) at places (B, V): (B, 1 or heads, V, 2 d); None: as it is."""
    if places is None:
        return rope
    if rope.ndim == 2:
        return rope[places][:, None]
    return rope[:, places].transpose(0, 1)


def prepare_beit_tokens(encoder: nn.Module, patches: Tensor) -> tuple[Tensor, list[BlockArguments]]:
    """All tokens of a Beit, which has no method for them, and the further arguments of its blocks."""
    tokens = torch.cat([encoder.cls_token.expand(len(patches), -1, -1), patches], dim=1)
    if encoder.pos_embed is not None:
        tokens = tokens + encoder.pos_embed
    tokens = encoder.pos_drop(tokens)
    arguments = {}
    if encoder.rel_pos_bias is not None:
        arguments["shared_rel_pos_bias"] = encoder.rel_pos_bias()
    return tokens, [arguments for _ in encoder.blocks]


def apply_last_norm(encoder: nn.Module, tokens: Tensor) -> Tensor:
    """Tokens after the last block through the encoder's last norm, which some have behind their pooling."""
    return encoder.fc_norm(encoder.norm(tokens))


def takes_some_tokens(encoder: nn.Module) -> bool:
    """Whether the blocks run on a part of the tokens: tables of biases are added to the attention among all."""
    has_tables = any(name.endswith(BIAS_TABLE) for name, _ in encoder.named_parameters())
    return getattr(encoder, "takes_any_tokens", True) and not has_tables


def last_step_before_blocks(encoder: nn.Module) -> nn.Module:
    """The module whose output goes into the first block."""
    return encoder.norm_pre if hasattr(encoder, "norm_pre") else encoder.pos_drop


def stem_parameters(encoder: nn.Module) -> set[str]:
    """Names of the parameters that act before the blocks or in all of them, such as a rotation's frequencies."""
    names = [name for name, _ in encoder.named_parameters()]
    return {name for name in names if name.split(".")[0] not in ABOVE_STEM}


def timm_filter(model: nn.Module) -> Callable[..., dict[str, Any]]:
    """timm's conversion of a file's weights to a model's: other names, patch filters and positions of other sizes.

    It is defined in the module of the model's class, and takes the weights by name and the model.
    """
    modules = (sys.modules[each.__module__] for each in type(model).__mro__)
    return next(module.checkpoint_filter_fn for module in modules if hasattr(module, "checkpoint_filter_fn"))


@cache
def model_without_memory(name: str) -> nn.Module:
    """The timm model of that name on torch's `meta` device, to look at its parts."""
    return build_without_memory(name)


def build_without_memory(name: str, **arguments: Any) -> nn.Module:
    """A timm model on torch's `meta` device; the global random numbers stay as they are."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return timm.create_model(name, **arguments)


def constructor_arguments(name: str) -> set[str]:
    """Names of the arguments of the class of a timm model."""
    names: set[str] = set()
    for each in type(model_without_memory(name)).__mro__:
        if issubclass(each, nn.Module) and each is not nn.Module:
            names.update(argument_names(each))
    return names


def argument_names(module_class: type[nn.Module]) -> list[str]:
    """Names of the arguments that a class itself takes by name."""
    unnamed = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return [name for name, each in signature(module_class).parameters.items() if each.kind not in unnamed]
