"""A pretended accelerator, for machines that have none.

Its tensors live in the memory of the CPU, but behave as those of another device: they cannot become numpy
arrays, and cannot be combined with tensors of the CPU. `tensor.to(DEVICE)` and `tensor.cpu()` cross the
border.
"""

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

DEVICE = torch.device("cuda:0")
_MOVES = (Tensor.to, Tensor.cuda)
_CROSSING = (Tensor.cpu, Tensor.copy_)


class Elsewhere(Tensor):
    """A tensor of the pretended device."""

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            copied = self.detach().clone().requires_grad_(self.requires_grad)
            copied._is_param = getattr(self, "_is_param", False)
            memo[id(self)] = copied
        return memo[id(self)]

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(function, "__self__", None) is Tensor.device:
            return DEVICE
        if function is Tensor.numpy:
            raise TypeError("a tensor of another device has no numpy array")
        if function is Tensor.cpu:
            return args[0].as_subclass(Tensor)
        return super().__torch_function__(function, types, args, kwargs)


class Pretended(TorchFunctionMode):
    """Within this context, tensors move to DEVICE and back, and every mixture of both places fails."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _is_device(kwargs.get("device")) and function not in _MOVES:
            return function(*args, **{**kwargs, "device": "cpu"}).as_subclass(Elsewhere)
        if function in _MOVES:
            target = [*args[1:], *kwargs.values()]
            if any(_is_device(value) or isinstance(value, Elsewhere) for value in target):
                return args[0].as_subclass(Elsewhere)
        elif function is torch._has_compatible_shallow_copy_type:
            return False  # a module that moves gets new parameters
        elif function not in _CROSSING:
            _require_one_place(function, args, kwargs)
        return function(*args, **kwargs)


def _is_device(value):
    return isinstance(value, torch.device | str) and torch.device(value).type == DEVICE.type


def _require_one_place(function, args, kwargs):
    tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
    here = [value for value in tensors if not isinstance(value, Elsewhere) and value.dim()]
    if here and any(isinstance(value, Elsewhere) for value in tensors):
        raise RuntimeError(f"{function} got tensors of two devices")
