"""The command line of the benchmarks: names its commands, and imports the code of one only when it is called."""

import importlib

import typer

# A command parses its own options, so that naming it here needs neither them nor its imports.
_PASS_THROUGH = {
    "add_help_option": False,
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
}
OPS = {
    "all": "Measure every op, one after the other; with --plot draw every picture.",
    "block_diagonal": "Time block-diagonal attention, and its errors against float64.",
    "moba": "Time MoBA: routing, forward, backward.",
    "paged": "Time attention to paged caches.",
    "torch": "Time what torch operators and bridges cost the host.",
    "gallery": "Time the gallery's variants, fused and as XLA compiles them.",
    "fuse": "Time functions that `blockdiag.fuse` compiles.",
    "dense": "Time dense attention that `blockdiag.fuse` compiles, beside cuDNN and FlashAttention.",
    "devices": "Time calls that several GPUs share.",
}

app = typer.Typer(
    name="python -m benchmarks",
    help="Benchmarks and experiments of blockdiag; most need a CUDA GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _measure(context: typer.Context) -> None:
    _run("benchmarks.command", "bench", [str(context.info_name), *context.args], "python -m benchmarks")


for _op, _help in OPS.items():
    app.command(_op, help=_help, **_PASS_THROUGH)(_measure)


@app.command("recall", **_PASS_THROUGH)
def _recall(context: typer.Context) -> None:
    """Hide needles in real text and see whether MoBA's routing finds their blocks."""
    _run("benchmarks.experiments.recall", "recall", context.args, "python -m benchmarks recall")


@app.command("gallery-page", **_PASS_THROUGH)
def _gallery_page(context: typer.Context) -> None:
    """Write the page of attention variants: code, visited tiles, kernels, speed-up."""
    _run("benchmarks.gallery.page_command", "gallery_page", context.args, "python -m benchmarks gallery-page")


def _run(module: str, function: str, arguments: list[str], name: str) -> None:
    """Run a function with the arguments that are left, in a Typer application of its own."""
    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command.command()(getattr(importlib.import_module(module), function))
    command(args=arguments, prog_name=name)
