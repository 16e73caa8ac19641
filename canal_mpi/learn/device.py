"""Where a network computes: the CPU, or CUDA where it really works."""

from canal_mpi.errors import UsageError
from canal_mpi.log import logger


def cuda_trouble() -> str:
    """Why CUDA can't be used on this host, or nothing where a small computation succeeds."""
    import torch  # here, for those who ask for no CUDA need none of it

    if not torch.cuda.is_available():
        return "torch finds no CUDA device" if torch.version.cuda else "torch was built without it"
    try:
        ones = torch.ones(8, 8, device="cuda")
        total = float((ones @ ones).sum().cpu())
    except RuntimeError as error:  # a driver that is too old, a device without room
        return str(error).splitlines()[0]
    return "" if total == 512.0 else f"it computes {total} instead of 512"


def choose(name: str) -> str:
    """The device of that name; `auto` is CUDA where it works, else the CPU, with a warning."""
    trouble = cuda_trouble() if name in ("cuda", "auto") else ""
    if trouble and name == "cuda":
        raise UsageError(f"learn.device = cuda, but {trouble}; use cpu or auto.")
    if trouble:
        logger.warning("learn.device = auto: computing on the CPU, for %s.", trouble)
    return "cpu" if trouble or name == "cpu" else "cuda"
