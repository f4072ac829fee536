"""A home folder that cannot be written, where libraries keep prepared, downloaded and compiled files: one line."""

import pytest
from conftest import run_command


@pytest.mark.faults
@pytest.mark.parametrize(
    "words",
    [
        ("pretrain", "--run.dir={}/run"),
        ("knn", "--encoder=hf-hub:timm/none"),
        ("pretrain", "--run.dir={}/run", "--run.compile=true"),
    ],
    ids=["images", "weights", "compiled code"],
)
def test_a_home_that_cannot_be_written_is_one_line(monkeypatch, tmp_path, words, tally):
    home = "/etc/passwd"  # a file: not even root can write below it
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("HOME", home)
    if "--run.compile=true" in words:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{home}/inductor")
    ended = run_command("mpp", *(word.format(tmp_path) for word in words))
    error = ended.stderr.strip().splitlines()[-1]
    assert ended.returncode == 2 and error.startswith("error: "), ended.stderr
    assert f"'{home}/" in error and "Traceback" not in ended.stderr
    tally("a home that cannot be written", 1)
