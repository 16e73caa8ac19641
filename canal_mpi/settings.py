"""The job: one frozen tree of settings, each with its meaning and its range."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from canal_mpi.games import ORDERS, TEN_GAMES
from canal_mpi.learn import ALGORITHMS, HEADS, INPUTS, LOSSES, NETWORKS, REUSE_MODES, REWARDS
from canal_mpi.membuf.selection import POLICIES
from canal_mpi.topology import graphs

CLOCKS = ("rounds", "free")
PACKS = ("auto", "always", "never")
TAGS = ("", "best", "latest")
TRACKERS = ("prometheus", "tensorboard", "wandb")


def setting(
    default: Any,
    about: str,
    low: float | None = None,
    high: float | None = None,
    names: Collection[str] = (),
    outside: bool = False,
) -> Any:
    """A field with its meaning and its range or names; `outside` also allows module:name."""
    limits = {"low": low, "high": high, "names": tuple(names), "outside": outside}
    return field(default=default, metadata={"about": about, **limits})


@dataclass(frozen=True)
class TaskConfig:
    """How a task is played."""

    obs: str = setting("ram", "what an agent sees of an Atari game", names=("ram", "pixels"))
    variant: str = setting("fs4", "orig: no no-op starts, no frame skip", names=("fs4", "orig"))
    frame_skip: int = setting(4, "frames that an action is repeated", 1, 60)
    noop_max: int = setting(30, "most no-ops at the start of an episode", 0, 1000)
    repeat_action_probability: float = setting(0.0, "of the emulator: sticky actions", 0, 1)
    random_action: float = setting(0.0, "probability that an action is replaced at random", 0, 1)
    frame_stack: int = setting(2, "newest frames that an Atari observation consists of", 1, 16)
    max_steps: int = setting(27000, "agent steps after which an episode is cut", 1)


@dataclass(frozen=True)
class TrainConfig:
    """How long an agent trains."""

    steps: int = setting(20000, "agent steps on each task (not emulator frames)", 1, 10**12)
    rounds: int = setting(0, "tasks that each agent learns; 0: all of its order", 0)
    win_return: tuple[str, ...] = setting(
        (), "mean return of 100 episodes that ends a task, as in Pong=18; known: gymnasium's own"
    )
    num_envs: int = setting(1, "environments that an agent plays at once", 1, 1024)
    speed: float = setting(1.0, "part of full speed that a rank is held to", 0.05, 1)
    log_interval: int = setting(500, "iterations between two rows of /train", 1)


@dataclass(frozen=True)
class ReplayConfig:
    """The membuf of the current task."""

    buffer_size: int = setting(100_000, "rows of play that are kept", 2, 100_000_000)


@dataclass(frozen=True)
class LearnConfig:
    """The learner."""

    algorithm: str = setting("dqn", "how it learns", names=ALGORITHMS, outside=True)
    network: str = setting("mlp", "its network", names=NETWORKS, outside=True)
    widths: tuple[int, ...] = setting((128, 128), "units of each hidden layer", 1, 16384)
    lr: float = setting(5e-4, "learning rate of Adam", 1e-300, 10)
    lr_decay_fraction: float = setting(0.5, "last part of training, in which lr falls to 0", 0, 1)
    gamma: float = setting(0.99, "discount of the next step", 0, 1)
    batch_size: int = setting(32, "rows in a batch", 1, 1_000_000)
    updates_per_step: float = setting(1.0, "updates for each agent step", 0, 1000)
    learning_starts: int = setting(200, "rows of play before the first update", 1)
    layer_norm: bool = setting(True, "LayerNorm before every ReLU")
    heads: str = setting("per_task", "one head for all tasks, one each, or networks", names=HEADS)
    double: bool = setting(True, "choose the next action by the online network (double DQN)")
    target_update_interval: int = setting(500, "updates between copies; 0: no target network", 0)
    loss: str = setting("huber", "loss of the temporal difference", names=LOSSES)
    n_step: int = setting(3, "rewards that are summed before bootstrapping", 1, 100)
    reward: str = setting("clip", "by its sign, or as it is", names=REWARDS)
    max_grad_norm: float = setting(0.0, "largest norm of a gradient; 0: unlimited", 0)
    terminal_on_life_loss: bool = setting(True, "a lost life stops bootstrapping")
    input: str = setting(
        "change",
        "bytes raw, scaled (/ 255), or scaled with their change from frame to frame",
        names=INPUTS,
    )
    device: str = setting("cpu", "auto: cuda where it works", names=("cpu", "cuda", "auto"))
    threads: int = setting(1, "compute threads of a rank", 1, 1024)


@dataclass(frozen=True)
class RehearsalConfig:
    """How old tasks are remembered."""

    rows: int = setting(20_000, "rows of old tasks that are kept, all together", 0, 100_000_000)
    ratio: float = setting(0.25, "probability of an update on an old task after one", 0, 0.99)
    distill_coef: float = setting(1.0, "weight of playing as before; 0: learn as from new rows", 0)
    ewc_lambda: float = setting(0.0, "strength of elastic weight consolidation; 0: none", 0)
    ewc_alpha: float = setting(0.5, "weight of the old Fisher information", 0, 1)
    ewc_batches: int = setting(1000, "batches that the Fisher information is measured on", 1)


@dataclass(frozen=True)
class ReuseConfig:
    """How a task is learnt from a lesson."""

    mode: str = setting(
        "distill",
        "replay it, mix it with own play, imitate its donor, or adopt its donor's weights first",
        names=REUSE_MODES,
    )
    steps: float = setting(
        0.0, "own steps after a lesson, as a fraction of train.steps; 0: fewest, 1: improve", 0, 1
    )
    pretrain_updates: float = setting(
        0.25, "most updates on a lesson before the first own step, as such a fraction", 0, 100
    )
    lesson_fraction: float = setting(
        0.5, "fraction of a batch drawn from lessons while playing", 0, 1
    )
    temperature: float = setting(
        1.0,
        "temperature of imitated policies, in standard deviations of a state's Q-values",
        1e-6,
    )
    imitation_coef: float = setting(
        1.0, "weight of the imitation loss; it falls to 0 over the own steps", 0
    )
    network: bool = setting(True, "send the donor's network with a lesson")


@dataclass(frozen=True)
class ExploreConfig:
    """Random actions: end + (start - end) * exp(-step / decay), for each task anew."""

    eps_start: float = setting(1.0, "probability of a random action at first", 0, 1)
    eps_end: float = setting(0.01, "probability of a random action in the long run", 0, 1)
    eps_decay: float = setting(4000.0, "agent steps in which the difference falls to 37 %", 1)


@dataclass(frozen=True)
class ShareConfig:
    """Which lessons agents offer, to whom, and which they take."""

    policy: str = setting(
        "exact", "which lessons are taken, or module:name", names=POLICIES, outside=True
    )
    topology: str = setting(
        "full",
        "who receives whose offers: a name, a file, or module:name",
        names=graphs.NAMES,
        outside=True,
    )
    donors: int = setting(4, "most lessons of the very same task that exact takes", 1)
    nearest: int = setting(1, "lessons that simnet and wasserstein take", 1)
    rows: int = setting(100_000, "most rows in a lesson; the newest are kept", 3)
    probe: int = setting(
        500, "random steps on a new task to compare it (simnet, wasserstein)", 2, 1_000_000
    )
    exchange: str = setting(
        "rounds",
        "rounds: in step, bit-identical; free: agents never wait for each other",
        names=CLOCKS,
    )
    pack: str = setting("auto", "compress lessons; auto: only between hosts", names=PACKS)
    timeout: float = setting(60.0, "free clock: seconds to wait for a lesson", 0.1, 1e6)
    lessons: str = setting("", "folder of an earlier run whose lessons are offered too")
    lessons_tag: str = setting(
        "", "networks of these lessons: as offered then, or best or latest", names=TAGS
    )
    max_message_mb: int = setting(1024, "largest lesson that is accepted, in MB", 1)
    cache_mb: int = setting(1024, "lessons that an agent keeps for others, in MB", 1)

    @property
    def free(self) -> bool:
        """Whether agents never wait for each other."""
        return self.exchange == "free"


@dataclass(frozen=True)
class SimnetConfig:
    """The tiny network by which the policy simnet compares tasks."""

    width: int = setting(5, "units of its hidden layer", 1)
    updates: int = setting(1000, "updates on a task", 0)
    lr: float = setting(1e-4, "its learning rate", 0, 10)
    distance: str = setting("weights", "compare weights or outputs", names=("weights", "outputs"))


@dataclass(frozen=True)
class RowExchangeConfig:
    """Sharing inside a task, among neighbours on the same task (low switching cost)."""

    save_interval: int = setting(0, "own steps until new rows are ready for others; 0: off", 0)
    load_interval: int = setting(5000, "own steps between two swaps of rows", 1)


@dataclass(frozen=True)
class EvaluationConfig:
    """What measures agents, after their last round; it decides nothing."""

    episodes: int = setting(5, "episodes of an evaluation; 0: none", 0)
    max_steps: int = setting(3000, "agent steps after which an evaluation episode is cut", 1)
    epsilon: float = setting(0.01, "probability of a random action", 0, 1)
    interval: int = setting(0, "own steps between evaluations inside a task; 0: none inside it", 0)
    tasks: str = setting(
        "after",
        "final: the final networks on every learnt task; after: also right after each task; "
        "all: every task after every task",
        names=("final", "after", "all"),
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """How often an agent saves its state; the results don't depend on it."""

    interval: int = setting(0, "iterations between two checkpoints; 0: unlimited", 0)
    seconds: float = setting(30.0, "between two checkpoints, at least; 0: unlimited", 0, 1e6)
    keep: bool = setting(False, "keep them at the end: more rounds or tasks can follow later")


@dataclass(frozen=True)
class Job:
    """Everything that decides what a run computes."""

    name: str = setting("default", "name of the job")
    preset: str = setting("", "settings to start from", names=("", "canal"))
    seed: int = setting(1, "the same seed gives bit-identical results", 0, 2**63 - 1)
    tasks: tuple[str, ...] = setting(TEN_GAMES, "Atari games or gymnasium ids")
    order: str = setting("canal", "order of each agent's tasks", names=ORDERS, outside=True)
    timeout: float = setting(300.0, "seconds without a heartbeat after which the job ends", 1, 1e6)
    init: str = setting("", "folder of an earlier run whose agents' learners are the start")
    report: bool = setting(True, "write report.html when the run is over")
    track: tuple[str, ...] = setting((), "trackers to feed while it runs", names=TRACKERS)
    emulate: tuple[str, ...] = setting((), "hosts to emulate here, as in nano-1@0.25 (its speed)")
    task: TaskConfig = field(default_factory=TaskConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    learn: LearnConfig = field(default_factory=LearnConfig)
    rehearsal: RehearsalConfig = field(default_factory=RehearsalConfig)
    reuse: ReuseConfig = field(default_factory=ReuseConfig)
    explore: ExploreConfig = field(default_factory=ExploreConfig)
    share: ShareConfig = field(default_factory=ShareConfig)
    simnet: SimnetConfig = field(default_factory=SimnetConfig)
    row_exchange: RowExchangeConfig = field(default_factory=RowExchangeConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    # For hosts by pattern, as in nano-*; of rules that match, the first with a setting decides.
    hosts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def modules(self) -> list[str]:
        """What playing a trained agent imports of the user's own: names as in module:name."""
        named = (*self.tasks, self.learn.algorithm, self.learn.network)
        return [name for name in named if ":" in name]


Layer = dict[str, Any]  # dotted key -> value

# A value that stands for several: they count as written just before it.
EXPANSIONS: Mapping[tuple[str, Any], Layer] = {
    ("task.variant", "fs4"): {"task.frame_skip": 4, "task.noop_max": 30},
    ("task.variant", "orig"): {"task.frame_skip": 1, "task.noop_max": 0},
    ("task.obs", "pixels"): {
        "task.frame_stack": 4,
        "learn.network": "cnn",
        "learn.input": "scale",
        "replay.buffer_size": 10_000,
    },
}

PRESETS: Mapping[str, Layer] = {
    "": {},
    "canal": {
        "task.frame_stack": 1,
        "learn.lr": 1e-5,
        "learn.lr_decay_fraction": 0.0,
        "learn.gamma": 0.99,
        "learn.batch_size": 128,
        "learn.updates_per_step": 1.0,
        "learn.learning_starts": 128,
        "learn.layer_norm": False,
        "learn.heads": "shared",
        "learn.double": False,
        "learn.target_update_interval": 0,
        "learn.loss": "mse",
        "learn.n_step": 1,
        "learn.reward": "none",
        "learn.max_grad_norm": 0.0,
        "learn.terminal_on_life_loss": False,
        "learn.input": "raw",
        "rehearsal.ratio": 0.0,
        "rehearsal.rows": 100_000,
        "rehearsal.distill_coef": 0.0,
        "reuse.mode": "replay",
        "reuse.network": False,
        "explore.eps_start": 1.0,
        "explore.eps_end": 0.01,
        "explore.eps_decay": 30000.0,
        "evaluation.episodes": 20,
    },
}
