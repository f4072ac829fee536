"""Images that are not square: rows and columns are not swapped anywhere, and all that squares have, they have."""

from pathlib import Path

import pytest
import timm
import torch
from conftest import refused
from model_inputs import HALVES
from torch import nn

import mpp
from mpp.config import ModelConfig
from mpp.models.descriptions import export_encoder
from mpp.models.encoder import build_encoder

SMALL = dict(width=16, depth=1, heads=2)


def exported(folder: Path, size, **settings) -> nn.Module:
    """A small encoder of images of this size, all of whose weights matter, and that is exported to a folder."""
    encoder = build_encoder(ModelConfig(img_size=size, **SMALL | settings))
    for parameter in encoder.parameters():
        nn.init.normal_(parameter)
    export_encoder(encoder, folder / "encoder", size, *HALVES, 0.875)
    return encoder


def load_ways(source: Path, size, **settings) -> list:
    """Both doors through which weights of another size come in."""
    config = ModelConfig(img_size=size, init_from=str(source), **SMALL | settings)
    return [lambda: mpp.load_encoder(source, img_size=size), lambda: build_encoder(config)]


@pytest.mark.parametrize("name", [None, "vit_tiny_patch16_224"])
@pytest.mark.parametrize("size", [(32, 128), (64, 64), (128, 32)])
def test_tables_of_positions_are_resampled_from_their_own_grid_by_timm(tmp_path, name, size):
    """Also to grids of as many patches, which timm would take as they are; nothing else changes."""
    settings = dict(patch_size=16) if name is None else dict(name=name)
    for other in ((32, 128), (64, 64), (64, 256)):
        source = exported(tmp_path, size, **settings)
        grids = [[side // 16 for side in sides] for sides in (other, size)]
        table = timm.layers.resample_abs_pos_embed(source.pos_embed, *grids, num_prefix_tokens=1)
        for load in load_ways(tmp_path, other, **settings):
            encoder = load()
            torch.testing.assert_close(encoder.pos_embed, source.pos_embed if other == size else table)
            for parameter_name, weight in source.named_parameters():
                assert parameter_name == "pos_embed" or torch.equal(encoder.get_parameter(parameter_name), weight)


BEIT = dict(name="beit_base_patch16_224")
OF_ONE_SIZE = {  # name -> height and width in patches, the side of a patch, settings
    "learned_2d": ((2, 8), 4, dict(patch_size=4, position="learned_2d")),
    "relative_bias": ((2, 8), 4, dict(patch_size=4, position="relative_bias")),
    "every": ((2, 8), 4, dict(patch_size=4, position_at="every")),
    "hybrid": ((1, 4), 32, dict(name="vit_tiny_r_s16_p8_224")),
    "BEiT": ((2, 14), 16, BEIT),  # timm would take its 3 x 27 biases for the 9 x 9 of a square
}


@pytest.mark.parametrize("kind", OF_ONE_SIZE)
def test_other_tables_fit_their_own_oblong_alone(tmp_path, kind):
    """Not the double of each side, nor grids of as many patches; a new head is as ever."""
    (rows, columns), side, settings = OF_ONE_SIZE[kind]
    own = (rows * side, columns * side)
    source = exported(tmp_path, own, **settings)
    for size in ((2 * own[0], 2 * own[1]), own[::-1], (2 * own[0], own[1] // 2)):
        for load in load_ways(tmp_path, size, **settings):
            with refused("fit this size alone"):
                load()
    for load in load_ways(tmp_path, own, **settings):
        loaded = load().state_dict()
        assert all(torch.equal(loaded[name], weight) for name, weight in source.state_dict().items())
    classifier = mpp.load_encoder(tmp_path, num_classes=3).eval()
    assert classifier(torch.rand(1, 3, *own)).shape == (1, 3)


def test_weights_of_other_patches_begin_an_oblong_encoder(tmp_path):
    exported(tmp_path, (16, 32), patch_size=4)
    (coarse,) = (load() for load in load_ways(tmp_path, (16, 32), patch_size=8)[1:])
    assert coarse.pos_embed.shape == (1, 1 + 2 * 4, 16)
    grey = mpp.load_encoder(tmp_path, in_chans=1)
    assert grey(torch.rand(1, 1, 16, 32)).shape == (1, 16)
