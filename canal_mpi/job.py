"""The job: one frozen tree of settings, each with its meaning and its range."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from canal_mpi.games import ORDERS, TEN_GAMES
from canal_mpi.hosts import Rules
from canal_mpi.learn import ALGORITHMS, IDENTITIES, LOSSES, NETWORKS, REUSE_MODES, REWARDS
from canal_mpi.membuf.segments import CHOOSERS
from canal_mpi.membuf.share import GATES, POLICIES
from canal_mpi.topology import graphs

CLOCKS = ("rounds", "free")
PACKS = ("auto", "always", "never")
SYNC_MODES = ("none", "blend", "gradients")


def setting(
    default: Any,
    about: str,
    low: float | None = None,
    high: float | None = None,
    names: Collection[str] = (),
    outside: bool = False,
) -> Any:
    """A field with its meaning and its range or names; `outside` also allows module:name."""
    about_it: dict[str, Any] = {"about": about, "low": low, "high": high, "names": tuple(names)}
    about_it |= {"outside": outside}
    return field(default=default, metadata=about_it)


@dataclass(frozen=True)
class TaskConfig:
    """How a task is played."""

    obs: str = setting("ram", "what an agent sees of an Atari game", names=("ram", "pixels"))
    variant: str = setting(
        "fs4", "fs4: no-op starts, actions repeated 4 times; orig: neither", names=("fs4", "orig")
    )
    frame_skip: int = setting(4, "frames that an action is repeated", 1, 60)
    noop_max: int = setting(30, "most no-ops at the start of an episode", 0, 1000)
    sticky: float = setting(0.0, "probability that the emulator repeats the last action", 0, 1)
    random_action: float = setting(0.0, "probability that an action is replaced at random", 0, 1)
    max_steps: int = setting(27000, "agent steps after which an episode is cut", 1)


@dataclass(frozen=True)
class TrainConfig:
    """How long an agent trains."""

    frames: int = setting(
        20000, "agent steps on each task (CANAL's word; not emulator frames)", 1, 10**12
    )
    rounds: int = setting(0, "tasks that each agent learns; 0: all of its order", 0)
    envs: int = setting(1, "environments that an agent plays at once", 1, 1024)
    speed: float = setting(
        1.0, "part of full speed that a rank is held to: a slower device", 0.05, 1
    )
    log_every: int = setting(500, "turns of the loop between two rows of /train", 1)


@dataclass(frozen=True)
class ReplayConfig:
    """The membuf of the current task."""

    capacity: int = setting(100_000, "rows of play that are kept", 2, 100_000_000)


@dataclass(frozen=True)
class LearnConfig:
    """The learner."""

    algorithm: str = setting(
        "dqn", "how it learns, or module:Class", names=ALGORITHMS, outside=True
    )
    network: str = setting("mlp", "its network, or module:Class", names=NETWORKS, outside=True)
    widths: tuple[int, ...] = setting((128, 128), "units of each hidden layer", 1, 16384)
    lr: float = setting(5e-4, "learning rate of Adam", 0, 10)
    settles: float = setting(
        0.5,
        "last part of a task's steps, or study, in which the learning rate falls to 0; 0: none",
        0,
        1,
    )
    gamma: float = setting(0.99, "discount of the next step", 0, 1)
    batch: int = setting(128, "rows in a batch", 1, 1_000_000)
    updates_per_step: float = setting(1.0, "updates for each agent step", 0, 1000)
    starts: int = setting(200, "rows of play before the first update", 1)
    layer_norm: bool = setting(True, "normalise the input of every ReLU (LayerNorm)")
    dueling: bool = setting(False, "value and advantage apart (dueling network)")
    identity: str = setting(
        "heads", "one head for all tasks, one a task, or a network a task", names=IDENTITIES
    )
    own_input: bool = setting(
        True, "heads of an mlp: an input layer for every task, on the shared rest"
    )
    double: bool = setting(True, "choose the next action by the online network (double DQN)")
    target_every: int = setting(500, "updates between copies to the target; 0: no target", 0)
    loss: str = setting("huber", "loss of the temporal difference", names=LOSSES)
    n_step: int = setting(3, "rewards that are summed before bootstrapping", 1, 100)
    reward: str = setting(
        "clip", "learn from the sign, from the reward itself, or from it scaled", names=REWARDS
    )
    grad_clip: float = setting(0.0, "longest gradient; 0: any", 0)
    life_ends: bool = setting(True, "a lost life stops bootstrapping")
    scale_input: bool = setting(True, "divide byte observations by 255")
    device: str = setting(
        "cpu",
        "where the network computes; auto: cuda where it works",
        names=("cpu", "cuda", "auto"),
    )
    threads: int = setting(1, "compute threads of a rank", 1, 1024)


@dataclass(frozen=True)
class MemoryConfig:
    """How old tasks are remembered."""

    rows: int = setting(20_000, "rows of old tasks that are kept, all together", 0, 100_000_000)
    current_bias: float = setting(
        0.75, "probability that a batch comes from the current task; old ones come on top", 0.01, 1
    )
    alpha: float = setting(
        1.0, "weight of playing old tasks as before; 0: learn from old rows as from new ones", 0
    )
    ewc: float = setting(0.0, "strength of elastic weight consolidation; 0: none", 0)
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
    frames: float = setting(
        0.1, "most own steps on a task with a lesson, as part of train.frames", 0, 1
    )
    study: float = setting(
        0.15, "updates on the lesson before the first own step, as part of train.frames", 0, 100
    )
    updates: float = setting(4.0, "times the usual updates for each own step", 0, 1000)
    share: float = setting(0.5, "part of a batch that comes from lessons while playing", 0, 1)
    temperature: float = setting(
        0.1, "temperature of imitated policies, of donors and of old tasks", 1e-6
    )
    imitate: float = setting(1.0, "weight of the imitation", 0)
    holds: float = setting(
        0.5, "part of that weight that stays when the student is as good as the donor", 0, 1
    )
    stop_early: bool = setting(
        True, "stop when the score is not below the donor's by more than its standard error"
    )
    check_every: int = setting(1000, "own steps between two looks at the student's score", 1)
    admission: bool = setting(True, "drop a lesson after which the agent is worse, and play")
    network: bool = setting(True, "send the donor's network with a lesson")


@dataclass(frozen=True)
class ExploreConfig:
    """Random actions: end + (start - end) * exp(-step / decay), for each task anew."""

    start: float = setting(1.0, "probability of a random action at first", 0, 1)
    end: float = setting(0.01, "probability of a random action in the long run", 0, 1)
    decay: float = setting(4000.0, "agent steps in which the difference falls to 37 %", 1)


@dataclass(frozen=True)
class ShareConfig:
    """What agents tell each other."""

    policy: str = setting(
        "exact", "which lessons are taken, or module:name", names=POLICIES, outside=True
    )
    topology: str = setting(
        "full", "who hears whom: a name, a file, or module:name", names=graphs.NAMES, outside=True
    )
    donors: int = setting(4, "most lessons of the very same task that exact takes", 1)
    nearest: int = setting(1, "lessons that simnet and wasserstein take", 1)
    gate: str = setting(
        "none", "better: only offers of donors that score higher than the agent", names=GATES
    )
    rows: int = setting(100_000, "most rows in a lesson", 3)
    segments: str = setting("recent", "which play goes into a lesson", names=CHOOSERS)
    probe: int = setting(
        500, "random steps on a new task to compare it (simnet, wasserstein)", 2, 1_000_000
    )
    exchange: str = setting(
        "rounds", "rounds: in step, same bits every time; free: nobody waits", names=CLOCKS
    )
    relay: bool = setting(True, "pass on offers and lessons of others")
    budget: int = setting(0, "most bytes of lessons an agent takes in a round; 0: any", 0)
    pack: str = setting(
        "auto", "compress lessons; auto: only where the link is slower than that", names=PACKS
    )
    patience: float = setting(60.0, "free clock: seconds that a lesson is waited for", 0.1, 1e6)
    lessons: str = setting("", "folder of an earlier run whose lessons are offered too")
    limit_mb: int = setting(1024, "largest lesson that is accepted, in MB", 1)
    hold_mb: int = setting(1024, "lessons that an agent keeps for others, in MB", 1)

    @property
    def free(self) -> bool:
        """Whether nobody waits for anybody's round."""
        return self.exchange == "free"


@dataclass(frozen=True)
class SimnetConfig:
    """The tiny network by which the policy simnet compares tasks."""

    width: int = setting(5, "units of its hidden layer", 1)
    updates: int = setting(1000, "updates on a task", 0)
    lr: float = setting(1e-4, "its learning rate", 0, 10)
    distance: str = setting("weights", "compare weights or outputs", names=("weights", "outputs"))


@dataclass(frozen=True)
class LscConfig:
    """Sharing inside a task, among neighbours on the same task (low switching cost)."""

    save: int = setting(0, "own steps after which new rows are ready for others; 0: off", 0)
    load: int = setting(5000, "own steps between two swaps of rows", 1)


@dataclass(frozen=True)
class SyncConfig:
    """Sharing of weights or gradients among neighbours on the same task."""

    mode: str = setting("none", "blend weights, or average gradients", names=SYNC_MODES)
    every: int = setting(500, "own steps between two blends", 1)
    alpha: float = setting(0.5, "weight of the neighbours' mean in a blend", 0, 1)
    wire: str = setting("float32", "numbers on the wire", names=("float32", "float16"))


@dataclass(frozen=True)
class EvaluationConfig:
    """The score of an agent after a task."""

    episodes: int = setting(5, "episodes of an evaluation; 0: none", 0)
    max_steps: int = setting(3000, "agent steps after which an evaluation episode is cut", 1)
    epsilon: float = setting(0.01, "probability of a random action", 0, 1)
    every: int = setting(0, "own steps between evaluations inside a task; 0: only at its end", 0)
    tasks: str = setting(
        "current",
        "tasks that an agent is evaluated on after a task",
        names=("current", "seen", "all"),
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """How often an agent writes down where it is; the results don't depend on it."""

    every: int = setting(0, "turns of the training loop between two checkpoints; 0: any", 0)
    seconds: float = setting(
        30.0, "seconds between two checkpoints, more where they are slow; 0: any", 0, 1e6
    )


@dataclass(frozen=True)
class Job:
    """Everything that decides what a run computes."""

    name: str = setting("default", "name of the job")
    preset: str = setting("", "settings to start from: canal, or none", names=("", "canal"))
    seed: int = setting(1, "the same seed gives the same bits", 0, 2**63 - 1)
    tasks: tuple[str, ...] = setting(TEN_GAMES, "Atari games or gymnasium ids")
    order: str = setting("canal", "order of each agent, or module:name", names=ORDERS, outside=True)
    timeout: float = setting(300.0, "seconds of silence after which the job ends", 1, 1e6)
    emulate: tuple[str, ...] = setting(
        (), "hosts that ranks play on one machine, as in nano-1@0.25 (at a quarter of its speed)"
    )
    task: TaskConfig = field(default_factory=TaskConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    learn: LearnConfig = field(default_factory=LearnConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    reuse: ReuseConfig = field(default_factory=ReuseConfig)
    explore: ExploreConfig = field(default_factory=ExploreConfig)
    share: ShareConfig = field(default_factory=ShareConfig)
    simnet: SimnetConfig = field(default_factory=SimnetConfig)
    lsc: LscConfig = field(default_factory=LscConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    hosts: Rules = ()  # what differs between hosts


Layer = dict[str, Any]  # dotted key -> value

# A value that stands for several: they count as written just before it.
EXPANSIONS: Mapping[tuple[str, Any], Layer] = {
    ("task.variant", "fs4"): {"task.frame_skip": 4, "task.noop_max": 30},
    ("task.variant", "orig"): {"task.frame_skip": 1, "task.noop_max": 0},
    ("task.obs", "pixels"): {"learn.network": "cnn", "replay.capacity": 10_000},
}

PRESETS: Mapping[str, Layer] = {
    "": {},
    "canal": {
        "learn.lr": 1e-5,
        "learn.settles": 0.0,
        "learn.gamma": 0.99,
        "learn.batch": 128,
        "learn.updates_per_step": 1.0,
        "learn.starts": 128,
        "learn.layer_norm": False,
        "learn.dueling": False,
        "learn.identity": "single",
        "learn.own_input": False,
        "learn.double": False,
        "learn.target_every": 0,
        "learn.loss": "mse",
        "learn.n_step": 1,
        "learn.reward": "none",
        "learn.grad_clip": 0.0,
        "learn.life_ends": False,
        "learn.scale_input": False,
        "memory.current_bias": 1.0,
        "memory.rows": 100_000,
        "memory.alpha": 0.0,
        "reuse.mode": "replay",
        "reuse.admission": False,
        "reuse.network": False,
        "explore.start": 1.0,
        "explore.end": 0.01,
        "explore.decay": 30000.0,
        "evaluation.episodes": 20,
    },
}

# What a job that was written before these settings existed meant.
BEFORE: Layer = {"learn.settles": 0.0, "share.donors": 1, "reuse.updates": 1.0, "reuse.holds": 0.0}
