"""Which private interfaces of other packages doctor found, and whether the fast or the slow way is taken."""

from rich.markup import escape
from rich.table import Table

from blockdiag.features import Feature
from blockdiag.interop import jaxlib_launcher


def gather_features() -> tuple[Feature, ...]:
    """Return the features of every module that rests on private interfaces."""
    reason = jaxlib_launcher.availability()
    return (Feature("Triton kernels inside JAX programs", reason is None, reason or "jaxlib's launcher is known"),)


def features_table(features: tuple[Feature, ...]) -> Table:
    """Return a table with a row for each feature."""
    table = Table(title="Private interfaces")
    for heading in ("what", "way", "detail"):
        table.add_column(heading)
    for feature in features:
        way = "[green]fast[/green]" if feature.is_fast else "[yellow]slow[/yellow]"
        table.add_row(escape(feature.name), way, escape(feature.detail))
    return table
