"""Encoders seen through the contract, their features, and the probes on them."""

import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from comparisons import noted
from conftest import FAST, TINY, refused, write_pictures
from model_inputs import HALVES, random_images, small_vit
from scipy.stats import entropy
from sklearn.linear_model import LogisticRegression
from test_fewshot import features
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchvision.transforms.functional import normalize

import mpp
from evaluation import fewshot, knn, linear
from evaluation.config import LinearConfig
from evaluation.features import main as extract
from evaluation.frozen.encoder import load_frozen_encoder
from evaluation.frozen.features import load_features
from evaluation.frozen.results import report_path_of_command
from evaluation.linear import fit
from evaluation.metrics.scoring import score_of
from evaluation.supervision.learners import learner_of
from mpp.config import Config, DataConfig, ImagesConfig, ModelConfig
from mpp.config.parsing import parse
from mpp.data.crops import centre_crop
from mpp.data.loader import BatchLayout
from mpp.data.sources import load_image_datasets
from mpp.features.metrics import effective_rank
from mpp.features.neighbours import find_neighbours, knn_means, knn_predict
from mpp.models.descriptions import export_encoder
from mpp.models.encoder import build_encoder
from mpp.pretrain import Pretraining


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    """An exported ViT and its folder."""
    model = small_vit()
    folder = tmp_path_factory.mktemp("run") / "encoder"
    export_encoder(model, folder, 32, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), 1.0)
    return model, folder


def test_features_are_timms_own(vit):
    model, folder = vit
    frozen = load_frozen_encoder(str(folder.parent))
    assert (frozen.img_size, frozen.crop_pct, len(frozen.stages)) == ((32, 32), 1.0, 3)
    images = random_images(2)
    pixels = normalize(images / 255, [0.1, 0.2, 0.3], [0.4, 0.5, 0.6])
    intermediates = model.forward_intermediates(pixels, norm=False, output_fmt="NLC", intermediates_only=True)
    output = model.forward_features(pixels)
    class_token, mean_of_patches = output[:, 0], output[:, 1:].mean(1)
    of_depths = [intermediates[0].mean(1), intermediates[1].mean(1), mean_of_patches]
    expected = {"mean": of_depths, "class": [class_token], "both": [torch.cat([class_token, mean_of_patches], 1)]}
    for representation, features_of_timm in expected.items():
        depths = range(4 - len(features_of_timm), 4)
        for found, of_timm in zip(frozen(images, representation, depths), features_of_timm, strict=True):
            assert_close(found, of_timm, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name, img_size, representation, widths",
    [
        ("resnetv2_50x1_bit", 64, "mean", [256, 512, 1024, 2048]),
        ("vit_tiny_r_s16_p8_224", 64, "both", [2 * 192] * 12),
        ("resnet18", 64, "mean", [512]),
        ("crossvit_9_240", None, "mean", [128 + 256]),
    ],
)
def test_other_models_of_timm_have_features_of_their_stages_or_their_output_alone(
    name, img_size, representation, widths
):
    frozen = load_frozen_encoder(name, img_size=img_size, random=True)
    assert len(frozen.stages) == len(widths)
    images = random_images(1, side=frozen.img_size[0])
    found = frozen(images, representation, range(1, len(widths) + 1))
    assert [part.shape for part in found] == [(1, width) for width in widths]
    if len(widths) == 1:  # no blocks, and no [class] token
        with refused(r"depth is \[2\]; it must be at most 1"):
            frozen(images, representation, [2])


def test_a_damaged_config_of_an_encoder_is_named(vit, tmp_path):
    config = shutil.copytree(vit[1], tmp_path / "encoder") / "config.json"
    config.write_bytes(config.read_bytes()[:100])
    with refused(r"encoder is .* which cannot be (loaded|read)"):
        load_frozen_encoder(str(tmp_path / "encoder"))


def test_random_weights_are_random_by_their_seed_whatever_weights_there_are(vit):
    def first_weights(**options):
        return next(load_frozen_encoder(str(vit[1]), **options).model.parameters())

    random = first_weights(random=True, seed=2)
    assert torch.equal(first_weights(random=True, seed=2), random)
    assert not torch.equal(first_weights(random=True, seed=1), random)
    assert not torch.equal(first_weights(), random)


def test_a_name_has_its_published_weights(monkeypatch, tmp_path):
    """Those that timm downloads, which are not here; random ones are asked for, and never come by themselves."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with refused(r"encoder is vit_tiny_patch16_224, .* set checkpoint to a file"):
        load_frozen_encoder("vit_tiny_patch16_224")
    model = small_vit()
    monkeypatch.setattr("timm.create_model", lambda name, pretrained, **_: model if pretrained else None)
    assert load_frozen_encoder("vit_tiny_patch16_224").model is model


def test_an_encoder_of_the_hub_is_downloaded(tmp_path, monkeypatch):
    """Folder and all: also positions that are fixed, of which timm alone does not know."""
    folder = tmp_path / "encoder"
    fixed = build_encoder(ModelConfig(width=16, depth=1, heads=2, img_size=16, patch_size=8, position="sincos_2d"))
    export_encoder(fixed, folder, 16, *HALVES, 0.875)
    asked = []
    download = "mpp.runtime.weights.snapshot_download"
    monkeypatch.setattr(download, lambda name, allow_patterns: asked.append(name) or str(folder))
    for encoder in (mpp.load_encoder("hf-hub:me/mine"), load_frozen_encoder("hf-hub:me/mine").model):
        assert all(map(torch.equal, encoder.parameters(), fixed.parameters()))
        assert "pos_embed" in dict(encoder.named_buffers())
    assert asked == ["me/mine"]  # all is of one commit


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"checkpoint": "no.safetensors"}, r"checkpoint is .*no\.safetensors.*cannot be read"),
        ({"encoder": "vit_base_patch16_2244"}, "encoder is vit_base_patch16_2244; it must be"),
        ({"encoder": "floor:size"}, "must be floor:pixels or floor:colors"),
        ({"random": True, "img_size": 36}, r"img_size is 36; it must be a multiple of the patch size \(16\)"),
    ],
)
def test_an_encoder_that_is_none_is_named(settings, message):
    with refused(message):
        load_frozen_encoder(**{"encoder": "vit_tiny_patch16_224"} | settings)


def test_extracted_features_are_of_the_centre_crop_and_labelled_images_alone(vit, tmp_path):
    _, folder = vit
    extract([f"--encoder={folder}", f"--out={tmp_path / 'f.npz'}", "--data.eval_crop=0.5", *FAST[:2]])
    saved = load_features(tmp_path / "f.npz")
    assert (len(saved.train), len(saved.test)) == (430, 286)
    train, _ = load_image_datasets(DataConfig())
    index = int(np.flatnonzero(train.labels >= 0)[17])
    crop = centre_crop(train.decode(index, ImagesConfig()), 32, 0.5)
    expected = load_frozen_encoder(str(folder))(crop[None], "mean", [3])[0][0]
    assert_close(torch.from_numpy(saved.train[17]), expected, rtol=1e-4, atol=1e-5)
    assert saved.train_labels[17] == train.labels[index]


def test_depth_all_gives_the_curve_and_dev_chooses_without_the_test_set(vit, few_birds, tmp_path, monkeypatch):
    common = [f"--encoder={vit[1]}", f"--data.path={few_birds}", "--shots=2", "--seeds=[0,1]", *FAST]
    report = fewshot.main([*common, "--depth=all", "--baselines=false", f"--out={tmp_path / 'all.json'}"])
    assert sorted(report["summary_by_depth"]) == [1, 2, 3]
    assert report["summary"] == report["summary_by_depth"][3]
    assert (tmp_path / "all.png").stat().st_size > 1000

    tested = noted(monkeypatch, fewshot, "predict", 2)
    report = fewshot.main([*common, "--depth=dev", f"--out={tmp_path / 'dev.json'}"])
    of_random, of_pixels = [6] * 6 + [40] * 2, [6] * 2 + [40] * 2  # a tenth of train at each depth, then test, once
    assert [*map(len, tested)] == of_random + of_random + of_pixels
    on_dev = report["protocol"]["dev_accuracy_by_depth"]
    assert report["protocol"]["chosen_depth"] == max(on_dev, key=on_dev.get)

    with refused("depth is 4; it must be from 1 to 3"):
        fewshot.main([*common, "--depth=4"])


def test_floors_are_colour_statistics():
    images = torch.zeros(2, 3, 64, 64, dtype=torch.uint8)
    images[0, 0] = 255  # red
    images[1, 2, :, 32:] = 255  # right half blue
    (colors,) = load_frozen_encoder("floor:colors")(images, "mean", [1])
    expected = torch.zeros(2, 512)
    expected[0, 7 * 64], expected[1, 0], expected[1, 7] = 64, 32, 32
    assert torch.equal(colors, expected)


def test_reports_of_other_settings_have_other_names():
    words = ("range=[-1,1]", "range=[1,1.5]", "range=[-1,1.5]", "nodata=-9", "nodata=9")
    paths = {report_path_of_command(parse(LinearConfig, [f"--data.{word}"]), "linear") for word in words}
    assert len(paths) == len(words)


def test_features_are_already_of_some_encoder():
    for name in ("depth", "data.eval_crop"):
        with refused(f"{name} is 1.* left out: saved features need no encoder"):
            knn.main(["--features=f.npz", f"--{name}=1"])


BROKEN = ("train/cat/01.png", "train/dog/00.png", "test/dog/02.png")


def test_images_that_cannot_be_decoded_are_left_out_and_named(vit, tmp_path, capsys):
    """What is left is as if they had not been there. A strict probe refuses them, and each images without a label."""
    images, without = tmp_path / "all", tmp_path / "without"
    for folder in (images, without):
        for of_class, count in {"train/cat": 6, "train/dog": 3, "test/cat": 3, "test/dog": 3}.items():
            write_pictures(folder / of_class, count)
    for name in BROKEN:
        (images / name).write_bytes(b"nothing")
        (without / name).unlink()
    words = [f"--encoder={vit[1]}", "--data.batch_size=4", *FAST]
    reports = []
    for folder in (images, without):
        extract([*words, f"--data.path={folder}", f"--out={folder}.npz"])
        report = knn.main([*words, f"--data.path={folder}", "--neighbours=1", f"--out={tmp_path / 'r.json'}"])
        reports.append(report.get("left_out"))
    saved = (load_features(f"{folder}.npz") for folder in (images, without))
    assert all(map(np.array_equal, *saved))
    assert reports == [{"train": 2, "test": 1}, None]
    (warning, *_) = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    assert "warning: left out: 3 images that cannot be decoded" in warning
    assert all(name in warning for name in BROKEN)
    with refused(r"cat/01\.png.*dog/00\.png.*a probe needs all images"):
        fewshot.main([*words, f"--data.path={images}", "--strict=true"])
    write_pictures(tmp_path / "plain", 6)
    with refused(r"no labels; name their column with data\.label_column"):
        fewshot.main([*words, f"--data.path={tmp_path / 'plain'}"])


def test_at_a_small_temperature_the_nearest_image_decides():
    """Of neighbours that are not near, too: exp((s - 1) / temperature) would be 0 for all of them."""
    generator = torch.Generator().manual_seed(0)
    train, test = (torch.randn(count, 16, generator=generator) for count in (60, 30))
    labels = torch.arange(60) % 3
    nearest = (F.normalize(test) @ F.normalize(train).T).argmax(1)
    assert torch.equal(knn_predict(train, labels, test, [20], 1e-5)[20], labels[nearest])
    assert torch.equal(knn_means(train, labels[:, None].float(), test, [20], 1e-5)[20], labels[nearest, None].float())


def test_images_that_changed_since_the_last_call_are_read_again(vit, tmp_path):
    """As in a notebook, where one process calls a probe again."""
    tested = []
    for classes in ("ab", "cd"):
        for name in classes:
            write_pictures(tmp_path / "set" / name, 4)
        words = (f"--encoder={vit[1]}", f"--data.path={tmp_path / 'set'}", "--data.eval_fraction=0.5")
        report = knn.main([*words, *FAST, "--neighbours=3", f"--out={tmp_path / 'knn.json'}"])
        tested.append(report["labels"]["images"])
    assert tested == [4, 8]


@pytest.mark.parametrize("block, similarities", [(1024, 2**25), (7, 2**25), (1024, 3000)])
def test_blocks_do_not_change_neighbours_and_of_equal_ones_the_first_count(monkeypatch, block, similarities, rng):
    """Corners of a cube have few similarities, and exact ones: most neighbours are as near as others."""
    monkeypatch.setattr("mpp.features.neighbours.QUERIES_PER_BLOCK", block)
    monkeypatch.setattr("mpp.features.neighbours.SIMILARITIES_PER_BLOCK", similarities)
    train, test = (torch.from_numpy(rng.choice([-1.0, 1.0], (count, 16))) for count in (300, 40))
    similarity = (test @ train.T / 16).numpy()
    expected = np.argsort(-similarity, axis=1, kind="stable")[:, :50]
    nearest = find_neighbours(train, test, 50)
    assert (nearest.index.numpy() == expected).all()
    assert (nearest.similarity.numpy() == np.take_along_axis(similarity, expected, 1)).all()


class Largest(TorchDispatchMode):
    """The number of entries of the largest tensor."""

    entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if torch.is_tensor(each):
                self.entries = max(self.entries, each.untyped_storage().nbytes() // each.element_size())
        return result


def test_knn_compares_few_test_images_at_a_time_with_many_training_images(monkeypatch):
    """No tensor is larger than that of their similarities."""
    monkeypatch.setattr("mpp.features.neighbours.SIMILARITIES_PER_BLOCK", 63 * 5000)
    labels = torch.arange(5000) % 3
    with Largest() as largest:
        knn_predict(torch.randn(5000, 8, dtype=torch.half), labels, torch.randn(300, 8), [5], 0.07)
    assert largest.entries == 64 * 5000


def test_lbfgs_equals_scikit_learns_logistic_regression_in_blocks_of_logits_too(monkeypatch):
    data = features(seed=2)
    standardised = (data.train - data.train.mean(0)) / data.train.std(0)
    inputs, labels = torch.from_numpy(standardised), torch.from_numpy(data.train_labels)
    how = learner_of("class", data.train_labels, 7), LinearConfig(), 0.01
    whole = fit(inputs, labels, *how)
    regression = LogisticRegression(C=1 / (0.01 * len(inputs)), max_iter=2000, tol=1e-8)
    regression.fit(standardised.astype(float), data.train_labels)
    log_shares = whole(inputs).log_softmax(1).detach().numpy()
    np.testing.assert_allclose(log_shares, regression.predict_log_proba(standardised), atol=2e-2)
    few = how[0], LinearConfig(iterations=5), 0.01
    whole = fit(inputs, labels, *few)
    monkeypatch.setattr(linear, "LOGITS_PER_BLOCK", 7 * 13)
    blocks = fit(inputs, labels, *few)
    assert_close(dict(blocks.named_parameters()), dict(whole.named_parameters()), atol=1e-5, rtol=1e-4)


def test_linear_probe_chooses_on_dev_and_finds_what_is_separable():
    data = features(classes=3, per_class=100, width=40)
    result, *_ = linear.evaluate(data, LinearConfig())
    outcomes, _ = result.pop("outcomes"), result.pop("head")
    assert score_of(outcomes) > 0.95
    other, *_ = linear.evaluate(data._replace(test_labels=(data.test_labels + 1) % 3), LinearConfig())
    assert (other.pop("outcomes").predictions == outcomes.predictions).all()
    assert other.pop("head") and other == result  # what is chosen does not follow from test labels


def test_baselines_stand_in_an_encoders_table_and_are_what_their_own_commands_find(
    trained, few_birds, tmp_path, monkeypatch, capsys
):
    """Features of random weights, of the same decoded images; the pixels are of the encoder's crops."""
    words = [f"--encoder={trained}", f"--data.path={few_birds}", *FAST, "--neighbours=5"]
    knn.main([*words, "--random=true", "--baselines=false"])
    of_random = scores_in_table(capsys.readouterr().out)[f"{trained}, random weights"]
    report = knn.main(words)
    printed = capsys.readouterr().out
    table = scores_in_table(printed)
    names = [str(trained), "random weights", "pixels", "largest class", "chance (1 of 9 classes)"]
    assert [*table] == names and table["random weights"] == of_random
    assert table["largest class"] == ["-", "35.0"] and table["chance (1 of 9 classes)"] == ["-", "11.1"]
    assert "not evaluated" not in printed
    assert report["labels"]["class_names"][0] == "fowl"
    files = {path.name.partition(".")[2] for path in (trained / "evaluation").glob("knn_[!r]*.*")}
    assert {"json", "outcomes.npz", "classes.csv", "confusion.png"} <= files
    (tmp_path / "pixels").symlink_to(trained)
    monkeypatch.chdir(tmp_path)
    assert knn.main([*words, "--encoder=pixels"])["summary"] == report["summary"]  # a baseline has that name


def scores_in_table(printed):
    """First cell of each row of a printed table -> its other cells."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line.startswith("| ")]
    return {name: cells for name, *cells in rows[2:]}


def test_effective_rank_counts_directions():
    """Also of features that have collapsed, but for the last digits of float32."""
    generator = torch.Generator().manual_seed(0)
    orthonormal = torch.linalg.qr(torch.randn(50, 8, dtype=torch.double, generator=generator))[0]
    for count in (1, 2, 8):
        directions = orthonormal[:, :count] @ torch.eye(8)[:count].double()
        assert effective_rank(directions / 1e4, "cpu") == pytest.approx(count, rel=1e-6)
    assert effective_rank(torch.zeros(40, 12), "cpu") == 0
    drawn = torch.randn(40, 12, generator=generator) * torch.linspace(0, 5, 12)
    collapsed = drawn[:1] + torch.tensor([1e-7, 1e-5, 1e-3])[:, None, None] * drawn
    for rows, error in ((drawn, 1e-6), (drawn.T, 1e-6), *((each, 1e-4) for each in collapsed)):
        expected = np.exp(entropy(np.linalg.svd(rows.double(), compute_uv=False)))
        assert effective_rank(rows, "cpu") == pytest.approx(expected, rel=error)


@pytest.mark.faults
def test_of_partly_labelled_images_the_labelled_are_probed(monkeypatch):
    config = parse(Config, [*TINY, "--data.eval_images=20", "--probe.every=1"])
    task = Pretraining(config, Accelerator(cpu=True), BatchLayout(8, 1, 1, 0))
    some = task.held_out.choose(20, 0).select(np.arange(20))

    def probed(images):
        task.held_out = images
        probe = task.build_probe(task.train, config.probe)
        tested, *_ = next(iter(probe.sets.values()))
        return len(tested.dataset), probe(task.model.eval())

    some.labels = np.where(np.arange(20) % 3, some.labels, -1)
    partly = probed(some)
    assert partly == probed(some.labelled()) and partly[0] == 13
    some.labels = np.full(20, -1)
    monkeypatch.setattr("mpp.features.probe.MAX_IMAGES_FOR_RANK", 4)  # each is compared with each
    count, unlabelled = probed(some)
    assert count == 4 and unlabelled["agreement/chance"] == 1
    assert max(unlabelled[f"features/rank/depth_{depth:02d}"] for depth in (1, 2)) <= 4
