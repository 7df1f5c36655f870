"""The record in which modules describe the private features of other libraries that they use."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Feature:
    """A private feature of another library, for which the package also has a slower replacement.

    Attributes:
        name: the library and the feature, such as "torch: current CUDA stream".
        is_fast: whether the installed version has the feature. If not, the replacement runs, with the same results.
        detail: one line. It says what was found, or what is missing and what runs instead.
    """

    name: str
    is_fast: bool
    detail: str
