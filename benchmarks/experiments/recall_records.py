"""Rows that `recall --csv` writes. Routing depends on no GPU: a CPU writes them."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Recall:
    """Success of routing in finding the block of a needle, for one kind of keys and one block size.

    Attributes:
        keys: which keys.
        block_size, top_k: B and k.
        accuracy: share of queries whose chosen blocks hold the needle, from `moba_routing`.
        predicted_accuracy: the same from `predicted_snr`, for independent normal noise.
        snr: mean difference between the score of the needle's block and another's, over its standard deviation.
        predicted_snr: what the formula says.
        chance: accuracy of blocks chosen blindly.
        error: standard error of `accuracy`.
    """

    keys: str
    block_size: int
    top_k: int
    accuracy: float
    predicted_accuracy: float
    snr: float
    predicted_snr: float
    chance: float
    error: float


@dataclass(frozen=True, kw_only=True)
class RecallRow(Recall):
    """Success of routing with the device, the version and the date of its measurement."""

    device: str
    jax: str
    date: str
