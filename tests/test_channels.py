"""Images of one channel, of four, of many: from the targets to the exported encoder, its probes and its pictures."""

import json
import shutil

import numpy as np
import pytest
import tifffile
import torch
from colours import write
from conftest import FAST, ONLY_MASKED, each_of, read_json, read_metrics, refused
from image_files import tiff
from model_inputs import MASKED, by_timm, draw_batch
from numpy.testing import assert_allclose
from PIL import Image
from server import begin, finish
from torch.testing import assert_close

import mpp
from evaluation import contrastive, finetune, knn, supervised, visualize
from evaluation.config import EVERY, ContrastiveConfig, SupervisedConfig
from evaluation.frozen.encoder import load_frozen_encoder
from evaluation.frozen.known_labels import find_labelled_images
from mpp.config import CorruptionConfig, DataConfig, ModelConfig, ObjectiveConfig
from mpp.config.parsing import parse, read_yaml
from mpp.data.crops import augment
from mpp.data.moments import channel_moments
from mpp.data.sources import image_arguments
from mpp.features.metrics import measure_predictions, summarize
from mpp.features.reconstructions import as_rgb, prediction_columns, stretch
from mpp.models.encoder import build_encoder
from mpp.objectives import build_objective

QUICK = ("--run.steps=2", "--run.threads=1", "--data.workers=0", "--optim.global_batch_size=8")
SMALL = ("--model.width=16", "--model.depth=1", "--model.heads=2", "--model.img_size=32", "--run.report=false")
KINDS = {
    "one channel": ["--data.channels=1", "--data.bands=[4]"],
    "MAE": ["--network.name=autoencoder", "--objective.name=pixels", "--objective.normalize=patch", *ONLY_MASKED],
    "rope": ["--model.position=rope", "--corruption.pattern=multiblock", "--objective.factorized=true", *ONLY_MASKED],
    "relative_bias, axial": ["--model.position=relative_bias", "--model.mixing=axial", "--corruption.pattern=blocks"],
    "every, overlapping": ["--model.position_at=every", "--model.stride=4", "--objective.name=hog"],
}


@pytest.fixture(scope="module")
def bands(tmp_path_factory):
    """16 images of four bands of 16 bits, the fourth a copy of the first, in two classes and two splits."""
    folder = tmp_path_factory.mktemp("bands")
    rng = np.random.default_rng(0)
    for number in range(32):
        kind = number // 2 % 2
        low = rng.integers(1000, 9000, (3, 3, 3), np.uint16) + np.uint16(5000 * kind)
        pixels = low[..., [0, 1, 2, 0]].repeat(8, 0).repeat(14, 1)
        data = tiff(pixels, photometric="minisblack", planarconfig="contig")
        write(folder, {f"{('train', 'test')[number % 2]}/{'ab'[kind]}/{number:02d}.tif": data})
    return folder


@pytest.fixture
def four(bands):
    """Settings for them."""
    return [f"--data.path={bands}", "--data.channels=4", "--data.range=[0,16000]"]


def images_of(channels, height=16, width=24, whole=False):
    images = torch.rand(2, channels, height, width, generator=torch.Generator().manual_seed(0)) * 255
    return images.to(torch.uint8) if whole else images


def objective_of(channels, **settings):
    return build_objective(ObjectiveConfig(**settings), 8, channels)


@pytest.fixture
def corruption():
    """Masks for two of these images."""
    return draw_batch(CorruptionConfig(**MASKED), (2, 3), 2)


def test_factorized_accuracy_by_hand(corruption):
    """The share of channels that are right; the most frequent is chosen for each channel."""
    objective = objective_of(5, factorized=True)
    images = images_of(5)
    truth = objective.targets(images, corruption.positions)
    predictions = torch.nn.functional.one_hot(truth, 8).float().flatten(2)
    wrong = (truth[0, 0, 0] + 1) % 8
    predictions[0, 0, :8] = torch.nn.functional.one_hot(wrong, 8)  # one of 30
    metrics = summarize(measure_predictions(objective, predictions, images, corruption))
    assert metrics["accuracy"] == pytest.approx(29 / 30)
    counts = [np.bincount(truth[..., channel].flatten(), minlength=8).max() for channel in range(5)]
    assert metrics["most_frequent"] == pytest.approx(sum(counts) / 30)


@pytest.mark.parametrize("channels, settings, bits", [(5, {}, 3), (3, {"bits": 5}, 5)])
def test_too_many_colors_are_refused(channels, settings, bits):
    with refused(rf"objective\.bits is {bits}; .* {channels} channels .*\.factorized true"):
        objective_of(channels, **settings)
    assert objective_of(channels - 1, **settings).outputs == 2 ** (bits * (channels - 1))
    assert objective_of(channels, factorized=True).outputs == channels * 8
    assert objective_of(channels, name="pixels").outputs == channels * 64


@each_of("options", KINDS)
def test_every_kind_trains_and_is_loaded_by_timm(pretrain, four, options):
    folder = pretrain("--model.img_size=[16,32]", "--model.patch_size=8", *four, *options)
    size = read_json(folder / "encoder/config.json")["pretrained_cfg"]["input_size"]
    assert size == [1 if "--data.channels=1" in options else 4, 16, 32]
    images = torch.rand(1, *size)
    assert_close(mpp.load_encoder(folder)(images), by_timm(folder / "encoder")(images))


@pytest.mark.faults
def test_two_processes_are_one(four, tmp_path):
    """With moments that are measured."""
    words = [*four, "--model.img_size=[16,32]", "--model.mean=auto", "--model.std=auto", "--data.workers=1"]
    losses, means = [], []
    for processes in (1, 2):
        run = tmp_path / str(processes)
        command = finish(begin(run, *words, processes=processes))
        losses.append(read_metrics(run))
        means.append(read_yaml(run / "config.yaml")["model"]["mean"])
        assert f"measured: model.mean {tuple(means[0])}" in command.said
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert means[0] == means[1] and len(means[0]) == 4


def test_moments_by_hand(bands):
    values = np.stack([*map(tifffile.imread, (bands / "train").rglob("*.tif"))]).reshape(-1, 4) / 16000
    mean, std = channel_moments(DataConfig(path=str(bands), channels=4, range=(0.0, 16000.0)))
    assert_allclose(mean, values.mean(0), atol=1e-6)
    assert_allclose(std, values.std(0), atol=1e-6)


def test_measured_moments_stay_when_a_run_goes_on(pretrain, monkeypatch, four):
    words = [*four, "--model.mean=auto", "--model.std=auto"]
    folder = pretrain(*words)
    mean = read_yaml(folder / "config.yaml")["model"]["mean"]
    assert read_json(folder / "encoder/config.json")["pretrained_cfg"]["mean"] == mean
    shutil.rmtree(folder / "encoder")
    monkeypatch.setattr("mpp.training.run.channel_moments", None)  # nothing is measured again
    pretrain(*words)
    with refused(r"config: model\.mean \(.* now\), model\.std \("):
        pretrain(*four)
    monkeypatch.undo()
    one = pretrain(*four, "--model.mean=auto", dir=folder.with_name("one"))
    model = read_yaml(one / "config.yaml")["model"]
    assert (model["mean"], model["std"]) == (mean, 0.5)
    with refused(r"config: model\.std \("):  # 0.5, which was not measured
        pretrain(*words, dir=one)


def test_a_channel_without_contrast_is_named(tmp_path):
    for number in range(10):
        np.save(tmp_path / f"{number}.npy", np.dstack([np.eye(16, dtype=np.uint8), np.ones((16, 16), np.uint8)]))
    with refused(r"the same everywhere: \[2\]"):
        channel_moments(DataConfig(path=str(tmp_path), channels=2))


def test_filters_on_rgb_become_those_of_other_channels_with_a_note_and_others_do_not(
    pretrain, finished_run, capsys, four
):
    """As timm does it: test_weights.py."""
    settings = dict(width=16, depth=2, heads=2, img_size=32, init_from=str(finished_run))
    build_encoder(ModelConfig(**settings), 2)
    assert "filters are summed or repeated for 2 channels" in capsys.readouterr().out
    settings["init_from"] = str(pretrain(*four))
    with refused(r"model\.init_from is .* it must be the weights of the model that is built"):
        build_encoder(ModelConfig(**settings), 7)


@pytest.mark.faults
def test_it_is_evaluated_fine_tuned_and_drawn(pretrain, four, bands, tmp_path, capsys):
    """An encoder of four bands, with the run's settings, whichever images are named."""
    folder = pretrain(*four, "--model.img_size=[16,32]")
    reports = []
    for named in ([], [f"--data.path={bands}"]):
        words = ["--neighbours=3", "--img_size=[24,16]", f"--out={tmp_path / 'knn.json'}", *named]
        knn.main([f"--encoder={folder}", *words, *FAST])
        reports.append(read_json(tmp_path / "knn.json"))
    one, other = reports
    assert one["results"] == other["results"]
    assert one["protocol"]["data"]["range"] == other["protocol"]["data"]["range"] == [0, 16000]
    for chosen in ([f"--pictures={json.dumps(EVERY)}", "--attention_images=4"], ["--bands=[3,2,1]"], ["--bands=4"]):
        words = ["--images=2", "--pictures=predictions", *FAST, *chosen]
        visualize.main([f"--encoder={folder}", f"--out={tmp_path / 'pictures'}", *words])
        assert "no " not in capsys.readouterr().out.partition("wrote")[0]
    with refused(r"bands is 5; it must be from 1 to 4: data\.channels"):
        visualize.main([f"--encoder={folder}", "--bands=5", *FAST])
    with refused(r"encoder's input channels is 4; it must be 3"):
        knn.main([f"--encoder={folder / 'encoder'}", "--data.channels=3", f"--data.path={bands}", *FAST])
    words = ["--img_size=[32,16]", "--lrs=0.1", *QUICK]
    finetune.main([f"--encoder={folder}", f"--run.dir={tmp_path / 'tuned'}", *words])
    exported = next((tmp_path / "tuned").rglob("encoder/config.json"))
    assert mpp.load_encoder(exported.parent)(torch.rand(1, 4, 32, 16)).shape == (1, 16)


def test_labels_and_contrast_are_learned_of_four_bands(four, tmp_path):
    """A run's pairs of values are read back, to learn whose labels an encoder knows, and written as words."""
    words = [*QUICK, *SMALL, *four]
    limits = [[0.0, 16000.0 - band] for band in range(4)]
    supervised.main([*words, "--data.bands=[4,2,1,3]", f"--data.range={limits}", f"--run.dir={tmp_path / 'labels'}"])
    learned = find_labelled_images(str(tmp_path / "labels")).source
    assert [*map(list, learned.limits())] == limits
    output = image_arguments(learned)
    assert "--data.bands '[4, 2, 1, 3]'" in output and f"--data.range '{limits}'" in output
    contrast = [*words, "--probe.every=0", "--head.outputs=8", "--head.hidden=16"]
    contrastive.main([*contrast, "--views.jitter=0", "--views.grey=0", f"--run.dir={tmp_path / 'views'}"])
    with refused(r"views\.jitter is 1\.0; it must be 0 with 4 channels: it changes colours"):
        parse(ContrastiveConfig, contrast)  # before a run or a comparison begins
    with refused(r"augment\.randaugment is 9; it must be 0 with 4 channels: it changes colours"):
        parse(SupervisedConfig, [*words, "--augment.randaugment=9"])


def test_color_operations_round_what_is_deeper_than_8_bits():
    """One 16-bit photograph among others does not end a run."""
    image = images_of(3, whole=True)[0]
    for index in range(6):
        expected = augment(image, 9, 0, 0, index)
        for off in (-0.4, 0.4):
            assert torch.equal(augment(image.float() + off, 9, 0, 0, index), expected)


def test_features_of_images_in_memory():
    encoder = mpp.load_encoder("test_vit", False, in_chans=4, img_size=(16, 32), drop_path_rate=0.9)
    images = images_of(4)
    features = mpp.extract_features(encoder, images)
    encoder.train()  # as timm builds them
    assert torch.equal(mpp.extract_features(encoder, images), features) and encoder.training
    with refused(r"a tensor \(B, 4, H, W\), of torch\.uint8 or from 0 to 255"):
        mpp.extract_features(encoder, images[:, :3])
    grey = mpp.load_encoder("test_vit", False, in_chans=1, img_size=32)
    assert mpp.extract_features(grey, Image.new("RGB", (40, 40), "red")).shape == (1, 64)
    with refused(r"images is torch\.uint16 .*; it must be PIL images of 8 bits, or a tensor"):
        mpp.extract_features(grey, Image.fromarray(np.ones((40, 40), np.uint16)))


def test_what_a_person_sees():
    ramp = torch.arange(4 * 2 * 3).view(1, 4, 2, 3).float() * 10.4
    rounded = ramp.round().to(torch.uint8)
    for bands, channels in ((None, [0, 1, 2]), ((3, 2, 1), [2, 1, 0]), ((4,), [3, 3, 3])):
        assert torch.equal(as_rgb(ramp, bands), rounded[:, channels])
    for few in (1, 2):
        assert torch.equal(as_rgb(ramp[:, :few]), rounded[:, [0, 0, 0]])


def test_deep_images_are_stretched_for_the_eye():
    images = 40 + images_of(4, 50, 50) / 12
    images[:, 1] *= 3
    for shown, axes in ((images, (-2, -1)), (images[:, :3] / 2, (-3, -2, -1))):  # the colours of three stay
        values = shown.numpy()
        low, high = np.quantile(values, [0.02, 0.98], axis=axes, keepdims=True)
        assert_allclose(stretch(shown), np.clip((values - low) / (high - low) * 255, 0, 255), atol=0.5)
    same = torch.full((1, 1, 4, 4), 7.0)
    assert torch.equal(stretch(same), same)
    eight_bits = images[:, :3].to(torch.uint8)
    assert torch.equal(stretch(eight_bits), eight_bits) and stretch(eight_bits).dtype == torch.uint8


def test_masked_patches_of_deep_images_are_grey_in_pictures(corruption):
    objective = objective_of(1, name="pixels")
    images = 20 + images_of(1) / 20
    targets = objective.targets(images, corruption.positions)
    columns = prediction_columns(objective, torch.zeros(2, 3, objective.outputs), targets, images, corruption)
    assert (columns[1] == 128).any() and columns[0].max() == 255
    assert_close(columns[3], columns[0])


def test_color_floors_of_many_channels():
    for channels, count in ((1, 8), (3, 512), (4, 4096), (7, 7 * 8)):
        images = images_of(channels, 16, 16)
        colors, pixels = (
            load_frozen_encoder(f"floor:{name}", channels=channels, img_size=16)(images, "mean", [1])[0]
            for name in ("colors", "pixels")
        )
        assert colors.shape == (2, count)
        assert colors.sum() == 2 * 64 * (channels if channels == 7 else 1)
        cells = images.unflatten(2, (8, 2)).unflatten(4, (8, 2)).mean((3, 5)) / 255  # (B, C, 8, 8)
        assert_close(pixels.view(2, 64, channels), cells.flatten(2).transpose(1, 2))


def test_encoders_of_timm_are_built_for_the_images():
    frozen = load_frozen_encoder("deit_tiny_patch16_224.fb_in1k", img_size=32, channels=2, random=True)
    assert frozen.normalize.mean == pytest.approx(((0.485 + 0.456 + 0.406) / 3,) * 2)
    assert frozen(torch.zeros(1, 2, 32, 32), "mean", [12])[0].shape == (1, 192)


def test_moments_of_other_channels_are_refused(pretrain):
    for name in ("mean", "std"):
        with refused(rf"model\.{name} is \[0\.5, 0\.5, 0\.5\]; it must be 1 numbers"):
            pretrain("--data.channels=1", f"--model.{name}=[0.5,0.5,0.5]")
