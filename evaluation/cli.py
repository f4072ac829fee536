"""The command `mpp`: every command of the package and of the evaluation by its name.

    mpp pretrain --run.dir runs/birds

Settings are read before torch is loaded, so that help and a misspelt setting do not wait for it.
"""

import sys
from importlib import import_module

import mpp
from evaluation.registry import EVALUATIONS
from mpp.config.imports import take_imports
from mpp.config.parsing import read
from mpp.errors import UserError, did_you_mean
from mpp.runtime.messages import steady_output

BEFORE_EVALUATIONS = {
    "pretrain": "pre-train by masked patch prediction",
    "prepare": "turn images into shards that load fast",
}
AFTER_EVALUATIONS = {
    "predict": "predict classes of new images as a table, or as masks",
    "features": "save frozen features",
    "embed": "features of all images as a table (parquet)",
    "export": "an encoder as ONNX or torch.export",
    "visualize": "draw features, attention and predictions",
    "report": "a page about a run: verdict, curves, pictures",
    "check": "check images, memory and time before a run",
    "compare": "many encoders in one table",
    "sweep": "choose a learning rate, or other settings, on a dev split",
    "supervised": "train from labels, from scratch",
    "contrastive": "pre-train by SimCLR",
    "throughput": "compare training speed with other code",
    "memory": "estimate the GPU memory of pre-training",
    "gpu-report": "measure mpp on this machine's GPU, in a file to send",
}


def commands() -> dict[str, str]:
    """One line of help by command, evaluations that were registered among them."""
    evaluations = {each.name: each.help for each in EVALUATIONS.values() if each.kind != "masked patches"}
    return BEFORE_EVALUATIONS | evaluations | AFTER_EVALUATIONS


def locate_command(name: str) -> tuple[str, str, str]:
    """The place of a command: its module, which has `main`, and the module and name of its config."""
    if name in EVALUATIONS:
        evaluation = EVALUATIONS[name]
        configs, _, config = evaluation.config.rpartition(".")
        return evaluation.module, configs, config
    config = f"{name.title().replace('-', '')}Config"
    if name in BEFORE_EVALUATIONS:
        return f"mpp.{name}", "mpp.config", "Config" if name == "pretrain" else config
    if name in ("memory", "check"):  # of a planned pre-training run
        return f"evaluation.{name}", "mpp.config", "Config"
    return f"evaluation.{name.replace('-', '_')}", "evaluation.config", config


def usage() -> str:
    """The text of `mpp --help`."""
    lines = ["usage: mpp COMMAND [--config FILE_OR_NAME ...] [--import FILE ...] [--SETTING VALUE ...]", ""]
    lines += [f"  {name:12} {help}" for name, help in commands().items()]
    lines += ["", "`mpp COMMAND --help` lists the settings. On several GPUs: accelerate launch -m mpp.pretrain ..."]
    return "\n".join(lines)


def main() -> None:
    """Carry out the command that the command line names."""
    steady_output()
    name, *words = sys.argv[1:] or ["--help"]
    try:
        words = take_imports(words)  # first: they may register a command
        if name in ("-h", "--help", "--version"):
            print(f"mpp {mpp.__version__}" if name == "--version" else usage())
            return
        if name not in commands():
            hint = did_you_mean(name, commands())
            raise UserError(f"unknown command {name}{hint}; allowed: {', '.join(commands())}")
        module, configs, config = locate_command(name)
        sys.argv = [f"mpp {name}", *words]
        read(getattr(import_module(configs), config)(), words)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    import_module("mpp.runtime.start").run_main(lambda: import_module(module).main())  # torch makes a cache on import


if __name__ == "__main__":
    main()
