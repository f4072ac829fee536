"""Frozen features of an encoder: extract them once, save them, load them.

    python evaluation/features.py --encoder runs/birds --out features.npz
    accelerate launch --multi_gpu --num_processes 8 evaluation/features.py ...      # several processes

The file has `train_features` (N, D), `train_labels` (N,), `test_features` (M, D), `test_labels` (M,).
"""

from collections.abc import Sequence

from evaluation.config import FeaturesConfig
from evaluation.frozen.features import extract_labelled_features, save_features
from evaluation.frozen.results import report_path_of_command
from evaluation.frozen.run_images import parse_and_load
from mpp.runtime.messages import counted
from mpp.runtime.processes import wait_for_all
from mpp.runtime.start import run_main, start


def main(arguments: Sequence[str] | None = None) -> None:
    """Extract features with the settings of the command line, or of `arguments`, and write them."""
    config, loaded = parse_and_load(FeaturesConfig, arguments)
    accelerator = start(config.frozen.run_settings(config.extraction.precision))
    path = report_path_of_command(config, "features", ".npz")
    extracted = extract_labelled_features(config.frozen, config.data, config.extraction, accelerator, loaded)
    by_depth = extracted.by_depth  # empty except on the main process
    for depth, features in by_depth.items():
        file = path.with_stem(f"{path.stem}_depth_{depth:02d}") if len(by_depth) > 1 else path
        save_features(file, features)
        images = f"{len(features.train)} + {counted(len(features.test), 'image')}"
        print(f"wrote {file}: {images}, {features.train.shape[1]} wide")
    wait_for_all()


if __name__ == "__main__":
    run_main(main)
