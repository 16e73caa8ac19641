"""Networks as modules of torch: any module, by autograd, on any device."""

import copy
from collections.abc import Sequence
from threading import Lock

import torch
from torch import Tensor, nn

from canal_mpi import pick
from canal_mpi.errors import UsageError
from canal_mpi.job import LearnConfig
from canal_mpi.learn import NETWORKS, kernels
from canal_mpi.learn.layers import cut, splits
from canal_mpi.learn.nets import Dueling, Mlp
from canal_mpi.learn.piece import Piece, Vector
from canal_mpi.types import Array, Spaces

SEEDING = Lock()  # torch has one random stream for all threads


class Modules:
    """Makes pieces of modules, and passes through them."""

    def __init__(self, spaces: Spaces, config: LearnConfig, device: str = "cpu") -> None:
        torch.set_num_threads(config.threads)
        torch.set_flush_denormal(True)  # tiny numbers would slow Adam down tenfold
        self.device, self.threads = device, torch.get_num_threads()
        self.spaces, self.config = spaces, config

    def piece(self, part: str, seed: int) -> Piece:
        """A new piece; an input layer is the first layer of what the trunk would be alone."""
        with SEEDING:
            torch.manual_seed(seed)
            module = self._head() if part == "head" else self._body(part)
        return ModulePiece(module.to(self.device))

    def passes(self, pieces: Sequence[Piece], factor: float, target: bool = False) -> "Plain":
        """Through the pieces, the last of which is the head, or through their targets."""
        made = [piece for piece in pieces if isinstance(piece, ModulePiece)]
        *body, head = (piece.target if target else piece.module for piece in made)
        return Plain(body, head, factor)

    def _head(self) -> nn.Module:
        kind = Dueling if self.config.dueling else nn.Linear
        return kind(self._features, self.spaces.actions)

    def _body(self, part: str) -> nn.Module:
        whole = self._trunk()
        if splits(self.config):
            assert isinstance(whole, Mlp)
            return whole.part(cut(self.config, part))
        return whole

    def _trunk(self) -> nn.Module:
        c = self.config
        try:
            make = pick.pick("network", c.network, NETWORKS)
            trunk: nn.Module = make(self.spaces.shape, c.widths, c.layer_norm)
        except ValueError as error:
            raise UsageError(f"learn.network = {c.network}: {error}.") from error
        self._features = int(trunk.features)  # type: ignore[arg-type]
        return trunk


class ModulePiece(Piece):
    """A module with flat weights; its vectors are tensors."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.steps = module, 0
        self.target = copy.deepcopy(module).requires_grad_(False)
        self.weights, self.target_weights = flatten(module), flatten(self.target)
        self.grad = self.weights.grad
        self.mean, self.square = torch.zeros_like(self.weights), torch.zeros_like(self.weights)

    def put(self, column: Vector) -> Vector:
        """A column as a tensor on the device of the module."""
        return torch.as_tensor(column, device=self.weights.device)

    def blend(self, weights: Array, alpha: float) -> None:
        """Move the weights towards others; the target stays."""
        self.weights.lerp_(self.put(weights), alpha)

    def step(self, lr: float) -> None:
        """One step of Adam along the gradient."""
        self.steps += 1
        moved = (self.weights, self.grad, self.mean, self.square)
        if self.weights.device.type == "cpu":
            weights, grad, mean, square = (tensor.detach().numpy() for tensor in moved)
            kernels.move(weights, grad, mean, square, self.steps, lr)
        elif len(self.weights):  # a trunk may have no layers
            fused_adam(self, lr)

    def steepness(self) -> float:
        """The length of the gradient."""
        return float(self.grad.norm())

    def add_squares(self, sums: Vector) -> None:
        """Add the squared gradient to sums."""
        sums.addcmul_(self.grad, self.grad)

    def pull(self, anchor: Vector, fisher: Vector, strength: float) -> None:
        """Add strength · fisher · (weights − anchor) to the gradient."""
        self.grad.add_(fisher * (self.weights - anchor), alpha=strength)


class Plain:
    """Any modules in a row, by autograd; observations are multiplied by a factor first."""

    def __init__(self, body: Sequence[nn.Module], head: nn.Module, factor: float = 1.0) -> None:
        self.trunk, self.head, self.factor = nn.Sequential(*body), head, factor
        self.device = next(head.parameters()).device
        self._values = torch.zeros(0)

    def _through(self, obs: Array) -> Tensor:
        numbers = torch.from_numpy(obs).to(self.device, torch.float32)
        found: Tensor = self.head(self.trunk(numbers * self.factor))
        return found

    def forward(self, obs: Array) -> Array:
        """Values, remembered for `backward`."""
        with torch.enable_grad():
            self._values = self._through(obs)
        found: Array = self._values.detach().cpu().numpy()
        return found

    def backward(self, gradient: Array) -> None:
        """Replace the gradients of the weights."""
        for part in (*self.trunk.parameters(), *self.head.parameters()):
            assert part.grad is not None
            part.grad.zero_()
        slope = torch.from_numpy(gradient).to(self.device)
        self._values.backward(slope)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def values(self, obs: Array) -> Array:
        """Values alone."""
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


def fused_adam(piece: ModulePiece, lr: float) -> None:
    """The step of Adam on an accelerator, by torch's kernel."""
    count = torch.tensor(float(piece.steps), device=piece.weights.device)
    torch._fused_adam_(
        [piece.weights],
        [piece.grad],
        [piece.mean],
        [piece.square],
        [],
        [count],
        lr=lr,
        beta1=kernels.BETA1,
        beta2=kernels.BETA2,
        weight_decay=0.0,
        eps=kernels.ADAM_EPSILON,
        amsgrad=False,
        maximize=False,
    )
