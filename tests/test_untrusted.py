"""Files of strangers: nothing in them is run, nothing is written outside the folder that was asked for."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from conftest import put_picture, read_json, refused
from image_files import decode_with, unreadable
from safetensors import SafetensorError

from evaluation.frozen.encoder import load_frozen_encoder
from mpp import load_encoder
from mpp.config import Config
from mpp.config.parsing import parse
from mpp.pretrain import is_pretraining
from mpp.runtime.files import sha256_of
from mpp.training.checkpoint import load_checkpoint, newest_whole, save_checkpoint, snapshot


class Payload:
    """Unpickling this creates the file."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


@pytest.fixture
def trap(tmp_path):
    """Where payloads strike; it must never exist."""
    file = tmp_path / "payload was run"
    yield file
    assert not file.exists()


def test_the_payload_is_real(tmp_path):
    pickle.loads(pickle.dumps(Payload(tmp_path / "struck")))
    assert (tmp_path / "struck").exists()


def test_yaml_runs_nothing(tmp_path, trap):
    words = f"!!python/object/apply:os.mkdir [{json.dumps(str(trap))}]"
    file = tmp_path / "config.yaml"
    file.write_text(f"run:\n  dir: {words}\nobjective: {{}}\n")
    with refused():
        parse(Config, ["--config", str(file)])
    assert parse(Config, [f"--run.dir={words}"]).run.dir == words  # a name like any other
    assert not is_pretraining(tmp_path)


def test_a_pickle_beside_or_in_place_of_weights_is_not_loaded(pretrain, trained, tmp_path, trap):
    encoder = trained / "encoder"
    torch.save({"state_dict": Payload(trap)}, encoder / "pytorch_model.bin")
    load_frozen_encoder(str(encoder))
    (encoder / "pytorch_model.bin").rename(encoder / "model.safetensors")
    with refused("cannot be read"):
        load_frozen_encoder(str(encoder))
    with refused("cannot be read"):
        pretrain(f"--model.init_from={encoder}", dir=tmp_path / "other")


@pytest.mark.parametrize(
    "words",
    [
        {"file": "FOLDER/evil.bin"},
        {"url": "file:///FOLDER/evil.bin", "custom_load": True},
        {"hf_hub_id": "stranger/model", "hf_hub_filename": "evil.bin", "source": "hf-hub"},
    ],
)
def test_what_an_encoders_config_says_of_weights_elsewhere_is_not_followed(trained, trap, words):
    encoder = trained / "encoder"
    torch.save({"state_dict": Payload(trap)}, encoder / "evil.bin")
    expected = load_encoder(encoder).state_dict()
    config = read_json(encoder / "config.json")
    words = json.loads(json.dumps(words).replace("FOLDER", str(encoder)))
    config["pretrained_cfg"] |= words
    (encoder / "config.json").write_text(json.dumps(config | words))
    torch.testing.assert_close(load_frozen_encoder(str(encoder)).model.state_dict(), expected, rtol=0, atol=0)


@pytest.fixture
def checkpoints(tmp_path):
    """The newer of two checkpoints, and what restores the newest that is whole: -> its step."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for step in (2, 4):
        save_checkpoint(tmp_path / "run", step, snapshot(model, optimizer))
    return tmp_path / "run/checkpoints/step_00000004", lambda: load_checkpoint(
        newest_whole(tmp_path / "run"), model, optimizer
    )


@pytest.mark.parametrize("digests", [{"../../../secret": "0", "/etc/passwd": "0"}, None])
def test_a_checkpoint_whose_digests_are_senseless_or_name_any_file_is_damaged(checkpoints, capsys, digests):
    newest, restored = checkpoints
    (newest / "state.json").write_text(json.dumps({"sha256": digests}))
    (newest / "model.safetensors").write_bytes(b"nothing")
    assert restored() == 2
    assert "step_00000004 is damaged (state.json): not used" in capsys.readouterr().err


def test_a_pickle_with_the_right_digest_is_not_loaded(checkpoints, trap):
    newest, restored = checkpoints
    torch.save(Payload(trap), newest / "model.safetensors")
    state = read_json(newest / "state.json")
    state["sha256"]["model.safetensors"] = sha256_of(newest / "model.safetensors")
    (newest / "state.json").write_text(json.dumps(state))
    with pytest.raises(SafetensorError):
        restored()


def test_an_image_folder_with_links_and_ways_out_stays_inside(pretrain, tmp_path, image_folder):
    secret = tmp_path / "outside" / "secret.txt"
    secret.parent.mkdir()
    secret.write_text("a secret")
    (image_folder / "cat" / "link.png").symlink_to(secret)
    put_picture(image_folder / "dog" / "..png", 3)
    folder = pretrain(f"--data.path={image_folder}")
    assert "a secret" not in "".join(path.read_text() for path in [*folder.glob("*.*l"), *folder.glob("*.txt")])
    assert [*secret.parent.iterdir()] == [secret]


def test_formats_that_run_programs_are_refused(trap):
    program = f"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n({trap}) (w) file closefile\nshowpage\n"
    with unreadable("no image file of a known sort"):
        decode_with(program.encode())
