"""Bytes of weights, gradients and optimizer state on a device, under mixed precision with Adam.

A parameter has 2 bytes of weight, 2 of gradient, and 12 of state: a weight and two moments in
float32. ZeRO shards them over N replicas (Rajbhandari et al. 2020, figure 1), P parameters each:

    stage 0    16 P
    stage 1    4 P + 12 P / N      state is sharded
    stage 2    2 P + 14 P / N      gradients as well
    stage 3    16 P / N            weights as well

AxoNN (Singh and Bhatele 2022) has a gradient in float32 beside those, 20 bytes in all. Where it
keeps state on the host, a device has weights and gradients in 16 bits, and a bucket of the rest.

These are forms of papers. `axrt memory` says what ranks of this runtime hold.
"""

from .cluster import Device

_WEIGHT, _GRADIENT, _STATE, _GRADIENT_IN_FLOAT32 = 2, 2, 12, 4  # bytes of a parameter


def zero_bytes(parameters: float, replicas: int, stage: int) -> float:
    """Bytes of model states on a device.

    Args:
        parameters: number of parameters that each replica has on one device, 0 or more.
        replicas: number of replicas that share them out, 1 or more.
        stage: stage of ZeRO, 0 to 3.
    Raises:
        ValueError: there is no such stage.
    """
    if stage not in range(4):
        raise ValueError(f"ZeRO has no stage {stage}; expected 0, 1, 2 or 3")
    parts = (_STATE, _GRADIENT, _WEIGHT)  # stage n shards the first n of them
    return parameters * (sum(parts[:stage]) / replicas + sum(parts[stage:]))


def axonn_bytes(parameters: float, bucket: float | None = None) -> float:
    """Bytes of model states on a device under AxoNN.

    Args:
        parameters: number of parameters on the device, 0 or more.
        bucket: number of parameters of a bucket that steps on the device while the state of all
            others is on the host; None: all state stays on the device.
    """
    in_16_bits, rest = _WEIGHT + _GRADIENT, _STATE + _GRADIENT_IN_FLOAT32
    stepped = parameters if bucket is None else min(bucket, parameters)
    return in_16_bits * parameters + rest * stepped


def traffic_seconds(device: Device, held: float, passes: float = 1.0) -> float:
    """Seconds of reading or writing all that a device holds: local / B + rest / B', where the rest
    is in expanded memory (COMET, Kadiyala et al. 2022).

    Args:
        device: whose memory fills before its expanded memory.
        held: bytes that it holds, 0 or more.
        passes: how often each of those bytes is read or written, 0 or more.
    Raises:
        ValueError: both memories together hold less.
    """
    local = min(held, device.memory)
    rest = held - local
    if rest > device.expanded_memory:
        raise ValueError(
            f"{held:g} bytes are more than a device's memory of {device.memory:g} and expanded "
            f"memory of {device.expanded_memory:g}; expected {device.memory:g} + "
            f"{device.expanded_memory:g} bytes at most"
        )
    return passes * (local / device.bandwidth + rest / device.expanded_bandwidth)
