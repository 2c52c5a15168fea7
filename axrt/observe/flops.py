"""Operations of a model, and what a device can do of them: the two sides of model FLOPs
utilisation (Chowdhery et al. 2022, PaLM)."""

import time
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from axrt.device.device import synchronize
from axrt.ledger.skeleton import Skeletons
from axrt.transport.payload import flatten, unflatten

_SIZE, _TRIES = 512, 5  # of the product that is timed where nobody knows
# Dense, in 16 bits, by what the device is called; from the vendors' data sheets.
_KNOWN = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "MI300X": 1307e12,
    "MI250X": 383e12,
    "V100": 125e12,
}


# Model FLOPs are counted, not looked up: the layers run once without memory under torch's own
# counter, so MFU is known for any model. A test holds them to the published formula for a GPT.
def training_flops(skeletons: Skeletons, sample: tuple[Any, Any]) -> float:
    """Operations of a forward and a backward: three times those of the products of a forward,
    attention as if each token saw all. What is recomputed counts once.

    Raises:
        Exception: some layer cannot run without memory; whatever it raises.
    """
    kind, tensors = flatten(sample[0])
    value = unflatten(kind, [torch.empty_like(tensor, device="meta") for tensor in tensors])
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        for place in range(len(skeletons.layers)):
            value = skeletons.layer(place)(value)
    return 3.0 * counter.get_total_flops()


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second that a device can do: those of its data sheet in 16 bits, elsewhere what
    a product of two matrices of 512 x 512 reaches now, the best of five.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    known = next((peak for part, peak in _KNOWN.items() if part in name), None)
    return known if known and dtype.itemsize == 2 else _measured(device, dtype)


def _measured(device: torch.device, dtype: torch.dtype) -> float:
    one: Tensor = torch.ones(_SIZE, _SIZE, dtype=dtype, device=device)
    took = []
    for _ in range(_TRIES):
        synchronize(device)
        began = time.perf_counter()
        one @ one
        synchronize(device)
        took.append(time.perf_counter() - began)
    return 2.0 * _SIZE**3 / min(took)
