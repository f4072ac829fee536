"""One sweep: trials of a training, each evaluated on a dev split, into a table, a plot, and next steps.

    mpp sweep --config sweep.yaml

A trial is an encoder of a comparison: started several times, on the GPUs of a machine or as a Slurm array, the
processes share the trials; started again, the command continues. Test images are not used.
"""

from collections.abc import Sequence
from pathlib import Path

from evaluation.comparison.run import carry_out
from evaluation.comparison.sweep_results import write_sweep
from evaluation.comparison.trials import plan_sweep
from evaluation.config import SweepConfig
from mpp.config.parsing import parse
from mpp.runtime.files import hold
from mpp.runtime.start import run_main


def sweep(config: SweepConfig) -> str:
    """Train and evaluate the trials that are missing, write the results, and return the text that is printed.

    Raises:
        UserError: a trial that cannot be carried out, before anything is done; failed trials, after all others.
    """
    folder = Path(config.dir)
    plan = plan_sweep(config)
    print(plan.describe(), flush=True)
    carried_out = carry_out(plan.cases, folder, config.extends, config.tabulate)
    with hold(folder, "dir", wait=True):  # another process may have come to its end too
        text = write_sweep(config, plan, carried_out.collect())
    carried_out.raise_failures()
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    """Sweep as the command line, or `arguments`, say."""
    sweep(parse(SweepConfig, arguments))


if __name__ == "__main__":
    run_main(main)
