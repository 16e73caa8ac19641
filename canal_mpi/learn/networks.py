"""Networks as modules of torch: an MLP, a CNN or one's own, by autograd, on any device.

A body turns observations into features, a head turns features into Q-values. A network of one's
own is a class made as `Class(shape, widths, layer_norm)` with an attribute `features`, the number
of features that its `forward` gives for flat observations.
"""

import copy
from collections.abc import Sequence
from math import prod
from threading import Lock

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from canal_mpi.errors import UsageError, described, logger, lookup
from canal_mpi.interfaces import Array, Spaces
from canal_mpi.learn import NETWORKS, fast_mlp
from canal_mpi.learn.fast_mlp import (
    CHANGES,
    Inputs,
    ParamBlock,
    Vector,
    has_own_input,
    inputs_of,
    layers_of,
)
from canal_mpi.settings import LearnConfig

SEEDING = Lock()  # torch has one random stream for all threads
SMALLEST_FRAME = 36  # what the three convolutions can digest


class Mlp(nn.Sequential):
    """Fully connected layers, each followed by LayerNorm (if asked for) and ReLU."""

    def __init__(self, shape: tuple[int, ...], widths: Sequence[int], layer_norm: bool) -> None:
        super().__init__()
        self.features = prod(shape)
        for width in widths:
            norm = nn.LayerNorm(width) if layer_norm else nn.Identity()
            self.append(nn.Sequential(nn.Linear(self.features, width), norm, nn.ReLU()))
            self.features = width


class Cnn(nn.Module):
    """Three convolutions over stacked frames, then the layers of an Mlp."""

    def __init__(self, shape: tuple[int, ...], widths: Sequence[int], layer_norm: bool) -> None:
        super().__init__()
        if len(shape) != 3 or min(shape[1:]) < SMALLEST_FRAME:
            raise ValueError(f"the network 'cnn' needs frames, not observations of shape {shape}")
        self.shape = shape
        self.convolutions = nn.Sequential(
            nn.Conv2d(shape[0], 32, 8, stride=4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3),
            nn.ReLU(),
            nn.Flatten(),
        )
        with torch.no_grad():
            seen = self.convolutions(torch.zeros(1, *shape)).shape[1]
        self.dense = Mlp((seen,), widths, layer_norm)
        self.features = self.dense.features

    def forward(self, obs: Tensor) -> Tensor:
        """Features of flat observations [batch, frames * height * width]."""
        features: Tensor = self.dense(self.convolutions(obs.view(-1, *self.shape)))
        return features


class TorchBackend:
    """Makes blocks of modules, and networks of such blocks."""

    def __init__(self, spaces: Spaces, config: LearnConfig, device: str = "cpu") -> None:
        torch.set_num_threads(config.threads)
        torch.set_flush_denormal(True)  # denormal numbers would slow Adam down tenfold
        self.spaces, self.config, self.device = spaces, config, device
        self.inputs = inputs_of(spaces, config)
        self.features = self._features_of(self._trunk())

    def block(self, part: str, seed: int) -> ParamBlock:
        """A new block; an input layer is the first layer of what the trunk would be alone."""
        with SEEDING:
            torch.manual_seed(seed)
            head = part == "head"
            module = nn.Linear(self.features, self.spaces.actions) if head else self._trunk()
        if isinstance(module, Mlp) and has_own_input(self.config):
            module = nn.Sequential(*list(module)[layers_of(self.config, part)])
        return TorchBlock(module.to(self.device))

    def q_network(self, blocks: Sequence[ParamBlock], target: bool = False) -> "TorchQNetwork":
        """The network of these blocks, or of their targets."""
        made = [block for block in blocks if isinstance(block, TorchBlock)]
        modules = [block.target if target else block.module for block in made]
        return TorchQNetwork(nn.Sequential(*modules), self.inputs)

    def _trunk(self) -> nn.Module:
        c = self.config
        make = lookup("network", c.network, NETWORKS)
        try:
            trunk: nn.Module = make(self.spaces.shape, c.widths, c.layer_norm)
        except Exception as error:
            raise UsageError(f"learn.network = {c.network}: {described(error)}.") from error
        return trunk

    def _features_of(self, trunk: nn.Module) -> int:
        """How many features it promises; refused where it does not give them."""
        name, numbers = f"learn.network = {self.config.network}", prod(self.spaces.shape)
        features = getattr(trunk, "features", None)
        if not isinstance(trunk, nn.Module) or not isinstance(features, int):
            raise UsageError(f"{name}: expected a torch.nn.Module with a whole number `features`.")
        try:
            with torch.no_grad():
                trunk(torch.zeros(1, numbers))
                found = trunk(torch.zeros(2, numbers))
        except Exception as error:
            told = f"one or two observations [{numbers}]: {described(error)}"
            raise UsageError(f"{name}: it fails on {told}.") from error
        is_tensor = isinstance(found, Tensor)
        if not is_tensor or found.shape != (2, features) or found.dtype != torch.float32:
            what = f"{found.dtype} {[*found.shape]}" if is_tensor else f"{found!r:.60}"
            wanted = f"torch.float32 [2, {features}], as its `features` say"
            raise UsageError(f"{name}: gave {what} for 2 observations; expected {wanted}.")
        return features


class TorchBlock(ParamBlock):
    """A module whose parameters are views of one vector; all vectors are tensors."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.step = module, 0
        self.target = copy.deepcopy(module).requires_grad_(False)
        self.params, self.target_params = flatten(module), flatten(self.target)
        self.grad = self.params.grad
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.params), torch.zeros_like(self.params)

    def put(self, column: Vector) -> Vector:
        """A column as a tensor on the device of the module."""
        return torch.as_tensor(column, device=self.params.device)

    def adam_step(self, lr: float) -> None:
        """One step of torch's Adam along the gradient."""
        self.step += 1
        if len(self.params):  # a trunk may have no layers
            adam(
                [self.params],
                [self.grad],
                [self.exp_avg],
                [self.exp_avg_sq],
                [],
                [torch.tensor(self.step - 1.0, device=self.params.device)],  # torch adds one
                fused=True,
                amsgrad=False,
                beta1=fast_mlp.BETA1,
                beta2=fast_mlp.BETA2,
                lr=lr,
                weight_decay=0.0,
                eps=fast_mlp.ADAM_EPS,
                maximize=False,
            )


class TorchQNetwork:
    """Any module by autograd, of observations that are prepared as for the compiled one."""

    def __init__(self, module: nn.Module, inputs: Inputs) -> None:
        self.module, self.inputs, self.changes = module, inputs, torch.from_numpy(CHANGES)
        self.device = next(module.parameters()).device
        self._q = torch.zeros(0)

    def _through(self, obs: Array) -> Tensor:
        numbers = torch.from_numpy(obs).to(self.device, torch.float32)
        scale, size = self.inputs
        x = numbers * scale
        if size < x.shape[1]:
            moved = (numbers[:, size:] - numbers[:, :-size]).long().cpu()
            x[:, :-size] = self.changes[255 + moved].to(self.device)
        found: Tensor = self.module(x)
        return found

    def forward(self, obs: Array) -> Array:
        """Q-values, remembered for `backward`."""
        with torch.enable_grad():
            self._q = self._through(obs)
        found: Array = self._q.detach().cpu().numpy()
        return found

    def forward_both(self, obs: Array, next_obs: Array) -> tuple[Array, Array]:
        """Q-values of both; the first are remembered for `backward`."""
        return self.forward(obs), self.q_values(next_obs)

    def backward(self, grad: Array) -> None:
        """Replace the gradients of the parameters."""
        for part in self.module.parameters():
            assert part.grad is not None
            part.grad.zero_()
        weighted = self._q * torch.from_numpy(grad).to(self.device)
        weighted.sum().backward()  # type: ignore[no-untyped-call]  # of a vector: 70 MB of modules

    @torch.no_grad()
    def q_values(self, obs: Array) -> Array:
        """Q-values alone."""
        found: Array = self._through(obs).cpu().numpy()
        return found


def flatten(module: nn.Module) -> Tensor:
    """Move the parameters (and their gradients) into one vector, of which they become views."""
    parts = list(module.parameters())
    flat = torch.cat([torch.zeros(0), *(part.detach().reshape(-1).cpu() for part in parts)])
    flat = flat.to(parts[0].device) if parts else flat
    flat.grad = torch.zeros_like(flat)
    start = 0
    for part in parts:
        end = start + part.numel()
        part.data = flat[start:end].view_as(part)
        part.grad = flat.grad[start:end].view_as(part)
        start = end
    return flat


def cuda_trouble() -> str:
    """Why CUDA can't be used on this host, or nothing where a small computation succeeds."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device" if torch.version.cuda else "torch was built without it"
    try:
        ones = torch.ones(8, 8, device="cuda")
        total = float((ones @ ones).sum().cpu())
    except RuntimeError as error:  # a driver that is too old, a device without room
        return str(error).splitlines()[0]
    return "" if total == 512.0 else f"it computes {total} instead of 512"


def choose_device(name: str) -> str:
    """The device of that name; `auto` is CUDA where it works, else the CPU, with a warning."""
    trouble = cuda_trouble() if name in ("cuda", "auto") else ""
    if trouble and name == "cuda":
        raise UsageError(f"learn.device = cuda, but {trouble}; use cpu or auto.")
    if trouble:
        logger.warning("learn.device = auto: computing on the CPU, for %s.", trouble)
    return "cpu" if trouble or name == "cpu" else "cuda"
