"""Names that users look for in a PipelineModule because a torch.nn.Module has them, and what to use
instead."""

from torch import nn

_OPTIMIZER = (
    "give axrt.initialize a function that makes the optimizer, optimizer=lambda named: "
    "torch.optim.AdamW(named, lr=1e-3); "
    "engine.named_parameters() are a rank's weights"
)
_CHECKPOINT = (
    "engine.save_checkpoint and load_checkpoint of engine = axrt.initialize(model) have the "
    "weights of all ranks"
)
_DEVICE = (
    "axrt.initialize puts each rank's layers on run.device, and precision.compute says in which "
    "type they compute"
)
_MODE = "train_batch and eval_batch of engine = axrt.initialize(model) set the mode"
_INSTEAD = {
    **dict.fromkeys(("parameters", "named_parameters", "zero_grad"), _OPTIMIZER),
    **dict.fromkeys(("state_dict", "load_state_dict"), _CHECKPOINT),
    **dict.fromkeys(("to", "cuda", "cpu", "half", "bfloat16", "float", "double"), _DEVICE),
    **dict.fromkeys(("train", "eval"), _MODE),
}


def why_missing(name: str) -> str:
    """The text that says why a PipelineModule has no attribute of that name, and what to use
    instead."""
    if name in _INSTEAD:
        return (
            f"a PipelineModule has no {name}, its layers are built where they are held; "
            f"{_INSTEAD[name]}"
        )
    if hasattr(nn.Module, name) and not name.startswith("_"):
        return (
            f"a PipelineModule has no {name}: it is no torch.nn.Module but what axrt.initialize "
            "builds layers from; "
            "sequential(seed) is the whole model as one module"
        )
    return f"'PipelineModule' object has no attribute {name!r}"
