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

GROUPS = {
    "prepare": {
        "check": "check images, memory and time before a run",
        "prepare": "turn images into shards that load fast",
    },
    "train": {
        "pretrain": "pre-train by masked patch prediction",
        "supervised": "train from labels, from scratch",
        "sweep": "choose a learning rate, or other settings, on a dev split",
    },
    "evaluate": {
        "report": "a page about a run: verdict, curves, pictures",
        "visualize": "draw features, attention and predictions",
        "compare": "many encoders in one table",
    },
    "use": {
        "predict": "predict classes of new images as a table, or as masks",
        "embed": "features of all images as a table (parquet)",
        "export": "an encoder as ONNX or torch.export",
    },
}
"""Group -> command -> one line of help; those of evaluations are in the registry."""
SELDOM = {
    "features": "save frozen features",
    "contrastive": "pre-train by SimCLR",
    "throughput": "compare training speed with other code",
    "memory": "estimate the GPU memory of pre-training",
    "gpu-report": "measure mpp on this machine's GPU, in a file to send",
}
"""Commands that only `mpp --help all` lists."""


def groups() -> dict[str, dict[str, str]]:
    """Group -> command -> one line of help, evaluations that were registered among them."""
    kinds = {"fine-tuning": "train", "frozen features": "evaluate"}
    found = {name: dict(members) for name, members in GROUPS.items()}
    for each in EVALUATIONS.values():
        if each.kind in kinds:
            found[kinds[each.kind]][each.name] = each.help
    return found | {"more": SELDOM}


def commands() -> dict[str, str]:
    """One line of help by command."""
    return {name: help for members in groups().values() for name, help in members.items()}


def locate_command(name: str) -> tuple[str, str, str]:
    """The place of a command: its module, which has `main`, and the module and name of its config."""
    if name in EVALUATIONS:
        evaluation = EVALUATIONS[name]
        configs, _, config = evaluation.config.rpartition(".")
        return evaluation.module, configs, config
    config = f"{name.title().replace('-', '')}Config"
    if name in ("pretrain", "prepare"):
        return f"mpp.{name}", "mpp.config", "Config" if name == "pretrain" else config
    if name in ("memory", "check"):  # of a planned pre-training run
        return f"evaluation.{name}", "mpp.config", "Config"
    return f"evaluation.{name.replace('-', '_')}", "evaluation.config", config


def usage(part: str = "") -> str:
    """The text of `mpp --help`, or of `mpp --help all`."""
    lines = ["usage: mpp COMMAND [--config FILE_OR_NAME ...] [--import FILE ...] [--SETTING VALUE ...]"]
    for group, members in groups().items():
        if group != "more" or part == "all":
            lines += ["", group, *(f"  {name:12} {help}" for name, help in members.items())]
    lines += ["", "`mpp COMMAND --help` lists the settings, `mpp --help all` the other commands."]
    lines += ["On several GPUs: accelerate launch -m mpp.pretrain ..."]
    return "\n".join(lines)


def main() -> None:
    """Carry out the command that the command line names."""
    steady_output()
    name, *words = sys.argv[1:] or ["--help"]
    try:
        words = take_imports(words)  # first: they may register a command
        if name in ("-h", "--help", "--version"):
            print(f"mpp {mpp.__version__}" if name == "--version" else usage(*words[:1]))
            return
        if name not in commands():
            hint = did_you_mean(name, commands())
            raise UserError(f"unknown command {name}{hint}; allowed: {', '.join(commands())}")
        module, configs, config = locate_command(name)
        sys.argv = [f"mpp {name}", *words]
        if not {"-h", "--help"}.isdisjoint(words):
            print(f"mpp {name}: {commands()[name]}\n\nSettings: ", end="")
        read(getattr(import_module(configs), config)(), words)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    import_module("mpp.runtime.start").run_main(lambda: import_module(module).main())  # torch makes a cache on import


if __name__ == "__main__":
    main()
