"""The GPU that a launch is compiled for: the one named by `compile_target`, else the GPU of this process."""

from typing import Any

import jax

from blockdiag.triton_kernels.launch.plan import Target

# A context of JAX's own, so that jit keeps traces under different targets apart.
_override = jax.make_user_context(default_value=None)


def compile_target(arch: int, *, num_sms: int | None = None) -> Any:
    """Return a context manager that compiles the launches traced inside it for compute capability `arch`.

    Use it to lower or export for a GPU that this machine does not have. This needs Triton and JAX's CUDA plugin, but no
    driver. The target becomes part of the traced call, and JAX traces again under another target.

    Args:
        arch: compute capability as an integer: 80, 86, 89, 90, 100, 103, 120, ...
        num_sms: streaming multiprocessors, which size persistent grids; None takes the usual count for `arch`.

    Returns:
        A context manager.

    Raises:
        ValueError: when `arch` is unknown and `num_sms` is not given.

    References:
        Lowering for an absent platform: `jax.export` (2024).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from blockdiag import block_diagonal_attention
        >>> from blockdiag.interop import compile_target
        >>> x = jax.ShapeDtypeStruct((64, 2, 16), jnp.bfloat16)
        >>> with compile_target(90):
        ...     lowered = jax.jit(block_diagonal_attention).trace(x, x, x).lower(lowering_platforms=("cuda",))
        >>> "triton_kernel_call_ffi" in lowered.as_text()
        True
    """
    return _override(Target.for_arch(arch) if num_sms is None else Target(arch, num_sms))


def overriding_target() -> Target | None:
    """Return the target named by the innermost `compile_target`, or None."""
    return _override.value


def session_target() -> Target:
    """Return the target of this process's CUDA devices.

    Raises:
        RuntimeError: there is no CUDA device.
        ValueError: there are devices of several architectures.
    """
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError as error:
        raise RuntimeError(
            "lowering a Triton kernel for CUDA needs to know the GPU, and this process has none; "
            "trace and lower inside blockdiag.interop.compile_target(arch), for example compile_target(90)"
        ) from error
    targets = {_device_target(device) for device in devices}
    if len(targets) != 1:
        raise ValueError(
            f"this process has GPUs of several kinds, {sorted(map(str, targets))}; "
            "say which one to compile for with blockdiag.interop.compile_target(arch)"
        )
    return targets.pop()


def planning_target() -> Target:
    """Return the target to plan launches for while tracing, before lowering fixes the target.

    This is the override, else this process's GPU if it is JAX's default backend, else Hopper. It affects only the
    number of launches a pass takes, never their results: a plan for one architecture lowers for any other.
    """
    override = overriding_target()
    if override is not None:
        return override
    return session_target() if jax.default_backend() == "gpu" else Target.for_arch(90)


def _device_target(device: Any) -> Target:
    major, minor = device.compute_capability.split(".")
    arch = int(major) * 10 + int(minor)
    count = getattr(device, "core_count", None)
    return Target(arch, count) if count else Target.for_arch(arch)
