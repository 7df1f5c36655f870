"""Doctor's report on private interfaces of other packages: for each, whether the fast or the slow path is used."""

import importlib
import importlib.util

from rich.markup import escape
from rich.table import Table

from blockdiag.cli.doctor_checks import attempt
from blockdiag.common.features import Feature

# For each package, the module that wraps its private names.
MODULES = {
    "triton": "blockdiag.triton_kernels.launch.private_triton",
    "jaxlib": "blockdiag.interop.jaxlib_launcher",
    "torch": "blockdiag.interop.private_torch",
}


def gather_features() -> tuple[Feature, ...]:
    """Return the features of every module that uses private interfaces of an installed package."""
    features: list[Feature] = []
    for package, module in MODULES.items():
        if importlib.util.find_spec(package) is not None:
            found, failure = attempt(lambda module=module: importlib.import_module(module).describe_features())
            features += found or [Feature(package, False, failure or "none found")]
    return tuple(features)


def features_table(features: tuple[Feature, ...]) -> Table:
    """Return a table with a row for each feature."""
    table = Table(title="Private interfaces")
    for heading in ("what", "way", "detail"):
        table.add_column(heading)
    for feature in features:
        way = "[green]fast[/green]" if feature.is_fast else "[yellow]slow[/yellow]"
        table.add_row(escape(feature.name), way, escape(feature.detail))
    return table
