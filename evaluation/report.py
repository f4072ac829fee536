"""A page on a run: the verdict in words, curves, pictures, and the command that repeats it.

    python evaluation/report.py --encoder runs/birds

One self-contained file, `report.html` in the run folder. It is made of metrics.jsonl, verdict.json and the evaluations'
JSON. Pictures that do not exist yet are drawn; the page lists missing content with the reasons.
"""

from collections.abc import Sequence
from pathlib import Path

from evaluation.config import ReportConfig
from evaluation.frozen.run_images import find_run, read_with_images, tested_encoder
from evaluation.pages.about import machine_blocks
from evaluation.pages.curves import curves_of_run
from evaluation.pages.page import Page, Section, without_missing, write_page
from evaluation.pages.picture_sections import picture_sections
from evaluation.pages.run_sections import features_blocks, settings_blocks, unreadable_blocks
from evaluation.pages.run_words import subtitle, verdict_points
from mpp.config import rebuild, require
from mpp.config.imports import require_imports
from mpp.runtime.start import run_main
from mpp.training.log import read_history
from mpp.training.run_folder import REPORT_PAGE
from mpp.training.verdict import read_verdict


def report(config: ReportConfig) -> Path:
    """Write the page on a run, and return its path.

    Raises:
        UserError: there is no run, or it has logged nothing.
    """
    folder = find_run(config.encoder)
    require(folder is not None, "encoder", config.encoder, "the folder of a run")
    require_imports(folder)
    history = read_history(folder)
    require(len(history) > 0, "encoder", folder, "a run with logged metrics: its metrics.jsonl is empty or missing")
    sections = [
        Section("curves", "Curves", curves_of_run(history)),
        Section("features", "Evaluation of the features", features_blocks(config, folder, history)),
        *picture_sections(config, folder, history),
        Section("images", "Unreadable images", unreadable_blocks(folder)),
        Section("settings", "Settings, and the command to repeat the run", settings_blocks(folder)),
        Section("machine", "Versions and machine", machine_blocks()),
    ]
    shown, missing = without_missing(sections)
    if not read_verdict(folder):
        missing["Verdict"] = "the run was not evaluated, or verdict.json is gone"
    page = Page(
        title=str(folder),
        subtitle=subtitle(folder, history),
        verdict=verdict_points(folder, history, shown),
        warnings=active_warnings(folder),
        sections=shown,
        missing=missing,
    )
    path = Path(config.out) if config.out else folder / REPORT_PAGE
    require(not path.is_dir(), "out", path, "a file")
    write_page(path, page)
    print(f"wrote {path}: {path.stat().st_size / 1e6:.1f} MB, one file")
    for name, reason in missing.items():
        print(f"missing there: {name}: {reason}")
    return path


def active_warnings(folder: Path) -> list[str]:
    """Warnings of the health checks that failed when they last ran."""
    verdict = read_verdict(folder)
    active = []
    for warning in verdict.get("warnings", []):
        if warning["check"] in verdict["off"]:
            active.append(f"{warning['check']} (since step {warning['step']}): {warning['message']}")
    return active


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a page with the settings of the command line, or of `arguments`."""
    # without its images a run still has curves, so other images than the run's are not refused here
    config, _ = read_with_images(ReportConfig, arguments, encoder_of=tested_encoder)
    report(rebuild(config, {"encoder": tested_encoder(config)}))


if __name__ == "__main__":
    run_main(main)
