"""Seconds of kernels and collectives on a device."""

from __future__ import annotations

from multimesh_planner.hardware.devices import Device

BYTES = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.5625}
"""Of an element of an operand; blocks of 16 elements of fp4 share a scale."""

_LATENCY = 2e-6  # of a step of a ring, in seconds
_NETWORK_LATENCY = 10e-6  # of a message to another domain, in seconds
_TILE = 128  # rows of a product that run together
_HEAD, _HALF = 128, 0.4  # elements of a head that fill the units of attention; a head of half has 2 ** -0.4 of the rate
_LENGTH = 550.0  # tokens at which attention has half of its rate


def matmul(
    device: Device, m: float, k: float, n: float, precision: str = "bf16", count: float = 1.0, *, cast: bool = True
) -> float:
    """Return the seconds of ``count`` products of ``[m, k]`` and ``[k, n]`` that run together.

    The operations take their time at the rate of large products, and the operands and the bfloat16 result take theirs
    through the memory, so small and narrow products are slow. In fp8 and fp4 the left operand is also read as bfloat16
    and written in its type, by rows and by columns, unless a product before did that (``cast``). Of several products
    none begins at the middle of a tile.
    """
    size = BYTES[precision]
    nbytes = (m * k + k * n) * size + 2.0 * m * n
    if precision != "bf16" and cast:
        nbytes += m * k * (2.0 + 2 * size)
    rows = m if count == 1 else m + _TILE / 2
    return count * (2.0 * rows * n * k / device.matmul_rate(precision) + move(device, nbytes))


def attention(
    device: Device, operations: float, head: float = _HEAD, length: float = float("inf"), *, flash2: bool = False
) -> float:
    """Return the seconds of fused attention: of the multiplications and additions of both products.

    Short sequences and small heads reach a part of the rate of long and wide ones, as published tables of
    FlashAttention 2 and 3 and of cuDNN show on each generation. ``length`` is tokens of a sequence on a device.
    """
    rate = device.bf16 * device.clock * ((flash2 and device.rates.flash2) or device.rates.attention)
    return operations / (rate * min(1.0, head / _HEAD) ** _HALF) * (1 + _LENGTH / length)


def move(device: Device, size: float) -> float:
    """Return the seconds in which kernels read and write this many bytes."""
    return size / (device.bandwidth * device.rates.memory)


def ring(device: Device, ranks: float, within: float = 1) -> float:
    """Return the bytes a second that one of ``ranks`` devices of a ring sends.

    ``within`` devices are nearer to each other than two neighbors of the ring: the product of the inner axes of the
    mesh. ``d / within`` ranks of a ring share a domain of ``d`` devices, and together use its network adapters.
    """
    link, network = device.link * device.rates.link, device.network * device.rates.network
    if ranks * within <= device.domain:
        return link
    return min(link, network * max(1.0, device.domain // within))


def latency(device: Device, ranks: float, within: float = 1) -> float:
    """Return the seconds of a collective of no bytes: a step of the ring for each device, and for each domain."""
    domains = ranks * within / device.domain
    inside = min(ranks, max(1.0, device.domain / within)) - 1
    return inside * _LATENCY + (min(ranks, domains) * _NETWORK_LATENCY if domains > 1 else 0.0)


def gather(device: Device, size: float, ranks: float, within: float = 1) -> float:
    """Return the seconds of an all-gather, or a reduce-scatter, of ``size`` bytes. An all-reduce takes both."""
    if ranks <= 1:
        return 0.0
    return (ranks - 1) / ranks * size / ring(device, ranks, within) + latency(device, ranks, within)


def exchange(device: Device, size: float, ranks: float, within: float = 1, copies: float = 1.0) -> float:
    """Return the seconds of an all-to-all of ``size`` bytes of a rank, with those that it keeps; see `ring`.

    Each token is in ``size`` as ``copies`` copies. It crosses the network once for each domain, and is copied there.
    """
    if ranks <= 1:
        return 0.0
    near = min(ranks, max(1.0, device.domain // within))
    domains = max(1.0, ranks / near)
    inside = size * (ranks - 1) / ranks / (device.link * device.rates.link)
    sent = size / copies * domains * (1 - (1 - 1 / domains) ** copies) * (domains - 1) / domains
    across = sent / (device.network * device.rates.network)
    return max(inside, across) + 0.5 * min(inside, across) + latency(device, ranks, within)


def send(device: Device, size: float, *, far: bool) -> float:
    """Return the seconds of a message of ``size`` bytes to a device of the same domain, or of another one."""
    if far:
        return size / (device.network * device.rates.network) + _NETWORK_LATENCY
    return size / (device.link * device.rates.link) + _LATENCY
