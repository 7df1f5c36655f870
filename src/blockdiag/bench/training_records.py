"""Rows that the demos and `recall` write where they are given `--csv`: losses, routing, recall.

Unlike times, these depend on no GPU: a CPU writes them, and `bench all --plot` draws them.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LossRow:
    """Training loss of one step of one model of a demo.

    Attributes:
        demo: which demo, the name of its attention: "block_diagonal" or "moba".
        attention: what the model attends with.
        step: from 1.
        loss: mean of the step's batch before its update, nats per byte.
    """

    demo: str
    attention: str
    step: int
    loss: float
    device: str
    jax: str
    date: str


@dataclass(frozen=True, kw_only=True)
class RoutingRow:
    """How often the queries of one block see the keys of another, in one held-out sequence of `demo --attention moba`.

    Attributes:
        layer, head: of the trained model.
        query_block, key_block: indices of both blocks; there are rows for past blocks and the own one alone.
        block_size, top_k: keys of a block, and blocks of a query, its own included.
        share: of the queries of the block, how many chose those keys; 1 of the own block.
    """

    layer: int
    head: int
    query_block: int
    key_block: int
    block_size: int
    top_k: int
    share: float
    device: str
    jax: str
    date: str


@dataclass(frozen=True, kw_only=True)
class Recall:
    """Whether routing finds the block of a needle, for one kind of keys and one block size.

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
    """The same with where it was found."""

    device: str
    jax: str
    date: str
