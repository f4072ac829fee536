"""Heads that probes keep: their weights, what they predict, and the encoder that they are of."""

from conftest import CUT, FAST, refused

from evaluation import features, linear
from evaluation.frozen.kept_heads import load_head
from mpp.runtime.weights import fingerprint

SHORT = (*FAST, "--l2=0.01", "--iterations=3")


def test_a_kept_head_says_what_it_is_of_and_a_damaged_one_is_refused(trained, image_folder):
    words = [f"--encoder={trained}", f"--data.path={image_folder}", *CUT, *SHORT]
    report = linear.main([*words, "--depth=dev", "--save=true"])
    (folder,) = (trained / "evaluation").glob("linear*_head")
    about = load_head(folder).description
    assert about.class_names == ["cat", "dog"] and about.representation == "mean"
    assert about.depth == report["protocol"]["chosen_depth"] and about.weights == fingerprint(trained)
    assert about.input["img_size"] == [32, 32] and about.input["precision"] == "fp32"
    for file, content in {"head.safetensors": "torn", "head.json": "{}"}.items():
        (folder / file).write_text(content)
        with refused(r"classifier is .*linear_.*_head, which cannot be read: "):
            load_head(folder)


def test_a_head_of_no_encoder_is_not_kept(trained, tmp_path):
    with refused("save is true; it must be left out: a colour baseline has no weights"):
        linear.main(["--encoder=floor:pixels", "--save=true", *SHORT])
    features.main([f"--encoder={trained}", f"--out={tmp_path / 'f.npz'}", *FAST])
    with refused("it has no effect unless features is not set"):
        linear.main([f"--features={tmp_path / 'f.npz'}", "--save=true", "--l2=0.01"])
