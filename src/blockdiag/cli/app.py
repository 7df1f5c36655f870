"""The command line: declares all commands, and imports a command's code only when that command is called."""

import importlib

import typer

# A sub-command does its own parsing, so declaring it here needs neither its options nor its imports.
_PASS_THROUGH = {
    "add_help_option": False,
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
}

app = typer.Typer(
    name="python -m blockdiag",
    help="Block-sparse attention for JAX and PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command("demo", **_PASS_THROUGH)
def _demo(context: typer.Context) -> None:
    """Train a small language model, check it against JAX's own attention, save a plot."""
    _run("blockdiag.cli.demo", "demo", context)


@app.command("doctor", **_PASS_THROUGH)
def _doctor(context: typer.Context) -> None:
    """Show devices, versions, and which implementations can run here."""
    _run("blockdiag.cli.doctor", "doctor", context)


@app.command("bench", hidden=True, **_PASS_THROUGH)
def _bench(context: typer.Context) -> None:
    """Say where the benchmarks are."""
    command = " ".join(["python -m benchmarks", *context.args])
    raise SystemExit(f"the benchmarks are not part of the package; in a checkout of blockdiag, run: {command}")


def _run(module_name: str, function_name: str, context: typer.Context) -> None:
    """Run a command's function with the remaining arguments, in a Typer application of its own."""
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing.partition(".")[0] == "blockdiag":
            raise
        raise SystemExit(
            f"python -m blockdiag {context.info_name} needs the package {missing!r}, which is not installed; "
            "try: pip install 'blockdiag-attn[cli,flax]'"
        ) from error
    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command.command()(getattr(module, function_name))
    command(args=context.args, prog_name=f"python -m blockdiag {context.info_name}")
