"""The name and the memory of the device, for the pipeline. It does not need torch."""

import gc
import sys


def device_name() -> str:
    """Return the name of the GPU that rows name."""
    import jax

    return jax.devices()[0].device_kind


def release_memory() -> None:
    """Give unused device memory back, so that one framework's cache does not starve the other."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.cuda.empty_cache()
