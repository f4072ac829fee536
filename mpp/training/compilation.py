"""torch.compile of a run's model (`run.compile`): whatever it cannot compile is computed as it is."""

from collections.abc import Callable
from typing import Any

from torch import nn

from mpp.errors import UserError, one_line
from mpp.runtime.messages import warn

MAX_CAUSE = 300  # characters of a message, in which a compiler may quote its whole command


def compile_model(model: nn.Module) -> None:
    """Have a model computed by torch.compile when it is called."""
    model.compile()
    model._compiled_call_impl = or_eager(model._compiled_call_impl, model._call_impl)


def or_eager(compiled: Callable[..., Any], eager: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled`, and from its first failure on, with a warning, `eager`: an error that is not the compiler's recurs.

    Kernels of both passes are compiled in the forward pass.
    """

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal compiled
        try:
            return compiled(*arguments, **options)
        except UserError:
            raise
        except Exception as error:
            if compiled is eager:
                raise
            cause = f"{type(error).__name__}: {one_line(error)}"[:MAX_CAUSE]
            warn(f"run.compile: torch.compile fails ({cause}); the model is computed without it, more slowly")
        compiled = eager
        return compiled(*arguments, **options)

    return call
