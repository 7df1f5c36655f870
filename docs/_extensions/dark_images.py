"""A picture `name.png` with a twin `name-dark.png` is shown as the one that fits the reader's theme.

Pages name the light one, as any Markdown does, so that they read the same outside of the site.
"""

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.transforms import SphinxTransform


class DarkImages(SphinxTransform):
    """Adds the dark twin after each picture that has one."""

    default_priority = 500

    def apply(self, **kwargs: Any) -> None:
        """Called by Sphinx for each page, before pictures are collected."""
        for image in list(self.document.findall(nodes.image)):
            path = Path(image["uri"])
            dark = path.with_name(f"{path.stem}-dark{path.suffix}")
            _, place = self.env.relfn2path(str(dark), self.env.docname)
            if "://" in image["uri"] or not Path(place).is_file():
                continue
            twin = image.deepcopy()
            twin["uri"] = str(dark)
            image["classes"].append("only-light")
            twin["classes"].append("only-dark")
            image.parent.insert(image.parent.index(image) + 1, twin)


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_transform(DarkImages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
