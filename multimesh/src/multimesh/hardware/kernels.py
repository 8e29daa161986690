"""Seconds of kernels and collectives on a device."""

from __future__ import annotations

from multimesh.hardware.devices import Device

BYTES = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.5625}
"""Of an element of an operand; blocks of 16 elements of fp4 share a scale."""

_LATENCY = 1e-6  # of a step of a ring, in seconds
_NETWORK_LATENCY = 10e-6  # of a message to another domain, in seconds


def matmul(device: Device, m: float, k: float, n: float, precision: str = "bf16") -> float:
    """Seconds of a product of ``[m, k]`` and ``[k, n]``.

    The operations take their time at the rate of large products, and the operands and the bfloat16 result take theirs
    through the memory, so small and narrow products are slow. In fp8 and fp4 the left operand is also read as bfloat16
    and written in its type.
    """
    size = BYTES[precision]
    passed = (m * k + k * n) * size + 2.0 * m * n
    if precision != "bf16":
        passed += m * k * (2.0 + size)
    return 2.0 * m * n * k / device.matmul_rate(precision) + moved(device, passed)


def attention(device: Device, operations: float) -> float:
    """Seconds of fused attention."""
    return operations / (device.bf16 * device.rates.attention)


def moved(device: Device, size: float) -> float:
    """Seconds in which kernels read and write this many bytes."""
    return size / device.memory_rate


def ring(device: Device, ranks: float, within: float = 1) -> float:
    """Bytes a second that a rank of a ring sends.

    Parameters
    ----------
    device
        Where a rank runs.
    ranks
        Devices of the ring.
    within
        Devices that are nearer to each other than two neighbors of the ring: the product of the inner axes of the mesh.
        ``d / within`` ranks of a ring share a domain of ``d`` devices, and together use its network adapters.
    """
    link, network = device.link * device.rates.link, device.network * device.rates.network
    if ranks * within <= device.domain:
        return link
    return min(link, network * max(1.0, device.domain // within))


def gathered(device: Device, size: float, ranks: float, within: float = 1) -> float:
    """Seconds of an all-gather, or a reduce-scatter, of an array of ``size`` bytes. An all-reduce takes both."""
    if ranks <= 1:
        return 0.0
    return (ranks - 1) / ranks * size / ring(device, ranks, within) + (ranks - 1) * _LATENCY


def sent(device: Device, size: float, *, far: bool) -> float:
    """Seconds of a message of ``size`` bytes to a device of the same domain, or of another one."""
    if far:
        return size / (device.network * device.rates.network) + _NETWORK_LATENCY
    return size / (device.link * device.rates.link) + _LATENCY
