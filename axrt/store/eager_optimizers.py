"""Torch's AdamW, Adam and SGD without `torch._dynamo`."""

# Torch wraps the methods of its optimizers so that `torch.compile` leaves them alone. The wrappers
# import `torch._dynamo` when an optimizer is made and when it steps, which takes about as long as
# torch itself. Nothing compiles a rank's optimizer, and outside of `torch.compile` the wrappers do
# nothing but switch autograd off for a step. So these classes have the methods that torch has
# wrapped. Where a version of torch wraps them in another way, its wrappers stay.

import inspect

import torch
from torch.optim import Optimizer


class Eager(Optimizer):
    """An optimizer with methods that torch has wrapped as they were."""

    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    load_state_dict = inspect.unwrap(Optimizer.load_state_dict)


class AdamW(Eager, torch.optim.AdamW):
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class Adam(Eager, torch.optim.Adam):
    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))


class SGD(Eager, torch.optim.SGD):
    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))
