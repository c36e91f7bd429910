"""``sdpa-ref warmup``: compile ahead what the first calls would wait for."""

import argparse
from collections.abc import Callable

import sdpa_ref
from sdpa_ref.cli.errors import Failure
from sdpa_ref.cli.info import unusable

HELP = "compile the kernels of the backends ahead, for example when an image is built"
EXAMPLES = """examples:
  sdpa-ref warmup
  SDPA_REF_CACHE_DIR=/opt/kernels sdpa-ref warmup

What is on disk already takes a moment; a user's score_mod is not known ahead."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options: there are none."""


def run(options: argparse.Namespace) -> int:
    """Compile what every usable backend offers, and print how much that was."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        raise Failure("this needs rich: pip install 'sdpa-ref[cli]'") from None
    steps: dict[str, Callable[[], object]] = {}
    for name in sdpa_ref.names():
        if unusable(name):
            continue
        try:
            backend = sdpa_ref.load(name)
            found = backend.warmup() if "warmup" in backend.TASKS else {}
        except OSError as error:
            raise Failure(f"{name}: {error}") from None
        steps.update({f"{name}: {step}": compile_it for step, compile_it in found.items()})
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=len(steps))
        for step, compile_it in steps.items():
            progress.update(bar, description=step)
            compile_it()
            progress.advance(bar)
    print(f"{len(steps)} kernels are ready" if steps else "no usable backend has anything to compile")
    return 0
