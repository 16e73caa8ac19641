"""Atari games on the real emulator, gymnasium environments, and batches of both."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ale_py
import ale_py.roms
import gymnasium
import numpy as np
import pytest
from ale_py.vector_env import AtariVectorEnv
from gymnasium import spaces
from launch import LAZY, SMOKE, run

import canal_mpi
from canal_mpi import envs
from canal_mpi.config import resolve
from canal_mpi.envs import Game, LocalEnvs, canonical, common_spaces, make_game
from canal_mpi.envs.atari import AtariGame, Emulator, atari_games
from canal_mpi.envs.gym import GymGame
from canal_mpi.errors import DamagedData, RankFailed, UsageError
from canal_mpi.games import TEN_GAMES
from canal_mpi.interfaces import LIFE, TERMINATED, TRUNCATED, Array, Columns, Spaces
from canal_mpi.settings import TaskConfig

atari = pytest.mark.atari
PLAIN = TaskConfig(noop_max=0)
Turn = tuple[Array, float, int]


def seed(number: int) -> np.random.SeedSequence:
    return np.random.SeedSequence(number)


def atari_game(task: str, config: TaskConfig = PLAIN, number: int = 1) -> AtariGame:
    return AtariGame(task, config, seed(number))


def some_actions(number: int, count: int = 18) -> list[int]:
    return [int(a) for a in np.random.default_rng(7).integers(count, size=number)]


def play(game: Game, actions: Sequence[int]) -> list[Turn]:
    """Turn after turn, a new episode wherever one is over."""
    turns = []
    for action in actions:
        turns.append(game.step(action))
        if turns[-1][2] & (TERMINATED | TRUNCATED):
            game.reset()
    return turns


def alike(one: Sequence[Turn], other: Sequence[Turn]) -> bool:
    return all(
        np.array_equal(a[0], b[0]) and a[1:] == b[1:] for a, b in zip(one, other, strict=True)
    )


def emulator(task: str, number: int = 1) -> Any:
    """The bare emulator, with the seed that a game of that seed gives it."""
    ale = ale_py.ALEInterface()
    ale.setInt(
        "random_seed", int(np.random.Generator(np.random.PCG64(seed(number))).integers(1 << 31))
    )
    ale.setFloat("repeat_action_probability", 0.0)
    rom = ale_py.roms.get_rom_path(atari_games()[task])
    assert rom is not None
    ale.loadROM(rom)
    ale.reset_game()
    return ale


# Names


def test_every_game_is_a_registered_environment() -> None:
    registered = {name for name in gymnasium.registry if name.startswith("ALE/")}
    assert {f"ALE/{name}-v5" for name in atari_games()} == registered
    assert set(TEN_GAMES) <= set(atari_games())


def test_an_ale_id_is_the_same_task_as_its_short_name() -> None:
    assert canonical("ALE/RoadRunner-v5") == canonical("RoadRunner") == "RoadRunner"
    assert canonical("CartPole-v1") == "CartPole-v1"
    job = resolve({"tasks": ["ALE/Krull-v5", "CartPole-v1"]}, environ={})
    assert envs.named(job).tasks == ("Krull", "CartPole-v1")


def test_one_game_under_two_names_is_listed_twice() -> None:
    job = resolve({"tasks": ["ALE/Krull-v5", "Krull"]}, environ={})
    with pytest.raises(UsageError, match=r"'Krull', 'Krull'.*none twice"):
        envs.named(job)


def test_an_unknown_task_is_refused_with_the_closest_name() -> None:
    for name, meant in [
        ("RoadRuner", "RoadRunner"),
        ("roadrunner", "RoadRunner"),
        ("CartPole", "CartPole-v1"),
    ]:
        with pytest.raises(UsageError, match=f"unknown task '{name}'; did you mean '{meant}'"):
            canonical(name)


def test_nonsense_is_refused() -> None:
    for name in ["", "ALE/Nope-v5", "Nope-v0", "a b"]:
        with pytest.raises(UsageError, match="unknown task"):
            canonical(name)
    with pytest.raises(UsageError, match="'math' registers no environment 'Nope-v0'"):
        canonical("math:Nope-v0")


def test_an_ale_id_that_does_not_exist_is_refused() -> None:
    for name in ["ALE/RoadRunner-v4", "ALE/CartPole-v1"]:
        with pytest.raises(UsageError, match="unknown task"):
            canonical(name)


def test_a_relative_module_is_refused() -> None:
    with pytest.raises(UsageError, match=r"can't import '\.x'"):
        canonical(".x:Name-v0")


def test_a_name_that_does_not_fit_the_tables_is_refused() -> None:
    with pytest.raises(UsageError, match="over 64 bytes"):
        canonical("x" * 65)


def test_the_list_of_tasks_begins_with_the_games() -> None:
    known = envs.known()
    assert known[: len(atari_games())] == sorted(atari_games())
    assert "CartPole-v1" in known
    assert not any(name.startswith("ALE/") for name in known)


# Atari: what is seen and what counts


@atari
def test_each_of_the_ten_games_shows_its_ram_and_takes_18_actions() -> None:
    for task in TEN_GAMES:
        game = atari_game(task)
        obs = game.reset()
        assert obs.shape == (256,)
        assert obs.dtype == np.uint8
        assert game.spaces == Spaces((256,), "|u1", 18, stack=2)
        assert np.array_equal(obs[:128], obs[128:])  # the first frame fills the stack
        assert game.actions == list(range(18))
        turns = play(game, range(18))
        assert len({turn[0].tobytes() for turn in turns}) > 1


@atari
def test_a_game_with_fewer_actions_counts_them_again_from_the_first() -> None:
    for task in ["Skiing", "LostLuggage"]:
        games = [atari_game(task) for _ in range(2)]
        for game in games:
            game.reset()
        assert len(games[0].actions) == 9
        assert alike(play(games[0], range(9)), play(games[1], range(9, 18)))


@atari
def test_a_step_is_the_emulators_own_frames_added_up() -> None:
    for task, skip in [("RoadRunner", 4), ("Alien", 4), ("Krull", 1)]:
        game, ale = atari_game(task, TaskConfig(frame_skip=skip, noop_max=0)), emulator(task)
        before = game.reset()
        assert np.array_equal(before[128:], ale.getRAM())
        for action in some_actions(120):
            obs, reward, flags = game.step(action)
            assert np.array_equal(obs[:128], before[128:])  # oldest first
            expected = 0.0
            for _ in range(skip):
                expected += ale.act(action)
                if ale.game_over():
                    break
            assert reward == expected
            assert np.array_equal(obs[128:], ale.getRAM())
            assert bool(flags & TERMINATED) == ale.game_over()
            before = obs
            if ale.game_over():
                ale.reset_game()
                before = game.reset()


@atari
def test_episodes_start_after_at_most_noop_max_no_ops() -> None:
    game = atari_game("Krull", TaskConfig(noop_max=5))
    ale = game.ale
    used = set()
    for _ in range(40):
        game.reset()
        used.add(ale.getEpisodeFrameNumber())
    first = min(used)
    assert used == {first + k for k in range(6)}


@atari
def test_without_no_ops_every_episode_starts_alike() -> None:
    game = atari_game("Krull")
    frames = set()
    for _ in range(5):
        game.reset()
        frames.add(game.ale.getEpisodeFrameNumber())
    assert len(frames) == 1


@atari
def test_the_same_seed_plays_the_same_and_another_differs() -> None:
    config, actions = TaskConfig(repeat_action_probability=0.25), some_actions(60)
    games = [atari_game("Alien", config, number) for number in (1, 1, 2)]
    starts = [game.reset() for game in games]
    one, same, other = (play(game, actions) for game in games)
    assert np.array_equal(starts[0], starts[1])
    assert alike(one, same)
    assert not alike(one, other)


@atari
def test_a_lost_life_is_no_end() -> None:
    game = atari_game("Alien")
    game.reset()
    lives, seen = game.ale.lives(), []
    for action in some_actions(3000):
        _, _, flags = game.step(action)
        assert bool(flags & LIFE) == (game.ale.lives() < lives and not game.ale.game_over())
        lives = game.ale.lives()
        seen.append(flags)
        if flags & TERMINATED:
            break
    assert seen.count(LIFE) == 2  # of three lives, the last one ends the game
    assert seen[-1] == TERMINATED
    assert game.ale.game_over()


@atari
def test_the_step_limit_cuts_and_does_not_end() -> None:
    game = atari_game("Krull", TaskConfig(noop_max=0, max_steps=10))
    game.reset()
    flags = [game.step(0)[2] for _ in range(10)]
    assert flags == [0] * 9 + [TRUNCATED]
    game.reset()
    assert game.step(0)[2] == 0


@atari
def test_sticky_reaches_the_emulator() -> None:
    stuck, free = (
        atari_game("Alien", TaskConfig(noop_max=0, repeat_action_probability=p)) for p in (0.5, 0.0)
    )
    stuck.reset(), free.reset()
    assert not alike(play(stuck, some_actions(60)), play(free, some_actions(60)))


@atari
def test_random_action_replaces_what_was_asked_for() -> None:
    always = atari_game("Alien", TaskConfig(noop_max=0, random_action=1.0))
    never = atari_game("Alien")
    always.reset(), never.reset()
    played = []
    original = always.ale.act

    class Spy:
        def __getattr__(self, name: str) -> Any:
            return getattr(ale, name)

        def act(self, action: int) -> Any:
            played.append(action)
            return original(action)

    ale: Any = always.ale
    vars(always)["ale"] = Spy()
    turns = play(always, [0] * 100)
    assert len(set(played)) > 12
    assert played[0::4] == played[3::4]  # one draw a step, not one a frame
    assert not alike(turns, play(never, [0] * 100))


@atari
def test_filming_a_game_changes_nothing_and_shows_its_opening() -> None:
    for task in ["Krull", "Frostbite"]:  # they begin otherwise after the emulator's own reset
        plain, filmed = (atari_game(task, TaskConfig(noop_max=0, max_steps=9)) for _ in range(2))
        filmed.film()
        for _ in range(3):
            assert np.array_equal(plain.reset(), filmed.reset())
            assert np.array_equal(filmed.picture(), emulator(task).getScreenRGB())
            assert alike(play(plain, some_actions(8)), play(filmed, some_actions(8)))


# Atari: pixels


def averaged(screen: Array) -> Array:
    """84 x 84 by areas, by repeating pixels until they divide evenly."""
    wide = np.repeat(np.repeat(screen.astype(np.float64), 2, axis=0), 21, axis=1)
    result: Array = wide.reshape(84, 5, 84, 40).mean(axis=(1, 3))
    return result


@atari
def test_frames_are_area_averages_of_two_merged_screens() -> None:
    for task in ["RoadRunner", "Frostbite"]:
        game, ale = (
            atari_game(task, TaskConfig(noop_max=0, obs="pixels", frame_stack=4)),
            emulator(task),
        )
        obs = game.reset()
        assert obs.shape == (4, 84, 84)
        assert obs.dtype == np.uint8
        assert game.spaces == Spaces((4, 84, 84), "|u1", 18, stack=4)
        first = averaged(ale.getScreenGrayscale())
        assert all(np.abs(frame - first).max() <= 1 for frame in obs)
        before = obs
        for action in some_actions(15):
            obs, _, _ = game.step(action)
            screens = []
            for _ in range(4):
                ale.act(action)
                screens.append(ale.getScreenGrayscale())
            expected = averaged(np.maximum(screens[-1], screens[-2]))
            assert np.abs(obs[-1] - expected).max() <= 1
            assert np.array_equal(obs[:-1], before[1:])  # oldest first
            before = obs


@atari
def test_frames_look_like_those_of_ale_pys_own_vector_environment() -> None:
    game = atari_game("RoadRunner", TaskConfig(noop_max=0, obs="pixels"))
    vector = AtariVectorEnv(
        "road_runner",
        1,
        noop_max=0,
        use_fire_reset=False,
        full_action_space=True,
        reward_clipping=False,
        num_threads=1,
    )
    ours, (theirs, _) = game.reset(), vector.reset(seed=1)
    assert np.abs(ours[-1].astype(int) - theirs[0][-1]).max() <= 3
    for action in [2, 3, 4, 5, 1, 0, 3, 3, 11, 17] * 2:
        ours, reward, _ = game.step(action)
        theirs, rewards, *_ = vector.step(np.array([action]))
        assert reward == rewards[0]
        assert np.abs(ours[-1].astype(int) - theirs[0][-1]).max() <= 3
    vector.close()


# Atari: going on elsewhere


def goes_on(task: str, config: TaskConfig, cuts: int, between: int = 7, after: int = 12) -> bool:
    """Whether a new game continues bit by bit from each of several states of another."""
    game, other = (atari_game(task, config, number) for number in (1, 1000))
    bits = some_actions(cuts * (between + after))
    game.reset()
    for cut in range(cuts):
        actions = bits[cut * (between + after) : (cut + 1) * (between + after)]
        play(game, actions[:between])
        other.load_state_dict({name: column.copy() for name, column in game.state_dict().items()})
        if not alike(play(game, actions[between:]), play(other, actions[between:])):
            return False
    return True


@atari
def test_a_new_game_goes_on_bit_by_bit() -> None:
    for obs in ["ram", "pixels"]:
        for sticky in [0.0, 0.25]:
            assert goes_on("Alien", TaskConfig(obs=obs, repeat_action_probability=sticky), cuts=3)


@atari
def test_a_new_game_goes_on_into_the_next_episodes() -> None:
    config = TaskConfig(max_steps=9, random_action=0.2)
    assert goes_on("Krull", config, cuts=2, between=5, after=25)


@atari
def test_a_state_taken_before_the_first_step_goes_on() -> None:
    assert goes_on("RoadRunner", TaskConfig(repeat_action_probability=0.25), cuts=1, between=0)


@atari
def test_a_new_game_goes_on_with_the_action_that_sticks() -> None:
    config = TaskConfig(frame_skip=1, repeat_action_probability=0.5, noop_max=0)
    assert goes_on("Alien", config, cuts=25, between=4, after=4)


@atari
def test_a_new_game_goes_on_with_every_frame_seen() -> None:
    assert goes_on("Alien", TaskConfig(obs="pixels", variant="orig", frame_skip=1), cuts=2)


# Gymnasium


def test_termination_ends_and_truncation_cuts() -> None:
    pole = make_game("CartPole-v1", TaskConfig(), seed(1))
    pole.reset()
    flags = [pole.step(1)[2] for _ in range(1)]
    while not flags[-1]:
        flags.append(pole.step(1)[2])
    assert flags[-1] == TERMINATED
    car = make_game("MountainCar-v0", TaskConfig(), seed(1))
    car.reset()
    assert [car.step(1)[2] for _ in range(200)] == [0] * 199 + [TRUNCATED]


def test_the_step_limit_cuts_gymnasium_too() -> None:
    car = make_game("MountainCar-v0", TaskConfig(max_steps=5), seed(1))
    car.reset()
    assert [car.step(1)[2] for _ in range(5)] == [0, 0, 0, 0, TRUNCATED]


def test_gymnasium_plays_the_same_from_the_same_seed() -> None:
    games = [make_game("CartPole-v1", TaskConfig(random_action=0.3), seed(n)) for n in (1, 1, 2)]
    starts = [game.reset() for game in games]
    one, same, other = (play(game, some_actions(80, 2)) for game in games)
    assert np.array_equal(starts[0], starts[1])
    assert alike(one, same)
    assert not alike(one, other)


def test_actions_beyond_the_environments_own_count_again_from_the_first() -> None:
    games = [make_game("CartPole-v1", TaskConfig(), seed(1)) for _ in range(2)]
    for game in games:
        game.reset()
    assert alike(play(games[0], [0, 1, 0, 1]), play(games[1], [2, 3, 16, 17]))


def test_a_gymnasium_episode_goes_on_after_restore() -> None:
    for moves in [[], [1, 0, 1]]:
        config = TaskConfig(random_action=0.3)
        game = make_game("CartPole-v1", config, seed(1))
        game.reset()
        game.reset()
        play(game, moves)
        other = make_game("CartPole-v1", config, seed(9))
        other.load_state_dict(game.state_dict())
        assert alike(play(other, [1, 0, 1]), play(game, [1, 0, 1]))
        assert np.array_equal(other.reset(), game.reset())


class Mission(spaces.Space[str]):
    """A space that gymnasium does not know."""


def test_spaces_that_do_not_fit_are_refused() -> None:
    for task, message in [
        (shaped(spaces.Sequence(spaces.Discrete(2)), TWO), "observes Sequence.*has no fixed size"),
        (
            shaped(spaces.Dict(a=ROW, b=spaces.Graph(ROW, None)), TWO),
            r"observes \['b'\] Graph.*has no fixed size",
        ),
        (
            shaped(spaces.Dict(image=ROW, mission=spaces.Tuple([Mission()])), TWO),
            r"observes \['mission'\]\[0\] Mission, which has no fixed size.*in a wrapper",
        ),
        (shaped(ROW, spaces.MultiDiscrete([30, 30])), r"MultiDiscrete\(\[30 30\]\).*at most 256"),
        (shaped(ROW, spaces.MultiBinary(64)), "MultiBinary.*at most 256"),
        ("Pendulum-v1", r"'Pendulum-v1' has the actions Box.*MultiBinary with at most 256"),
    ]:
        with pytest.raises(UsageError, match=message):
            common_spaces([task], TaskConfig())


ROW, TWO = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2)


class Shaped(gymnasium.Env[Any, Any]):
    """Shows a sample of its observations; refuses actions that are none of its own."""

    def __init__(self, seen: spaces.Space[Any], actions: spaces.Space[Any]) -> None:
        self.observation_space, self.action_space = copy.deepcopy(seen), actions

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        self.observation_space.seed(options["seed"])
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        return self.observation_space.sample(), float(np.sum(action)), False, False, {}


def shaped(seen: spaces.Space[Any], actions: spaces.Space[Any]) -> str:
    """The id of such an environment."""
    name = f"Shaped{len(gymnasium.registry)}-v0"
    made: Any = lambda: Shaped(seen, actions)  # noqa: E731
    gymnasium.register(name, made)
    return name


def test_a_run_trains_on_a_dict_with_combined_actions(out: Path) -> None:
    options = (*LAZY, "--tasks", "plugins:Lock-v0", "--steps", "200", "--out", str(out))
    result = run(["canal-mpi", "train", *SMOKE, *options])
    assert result.code == 0, result.err
    found = canal_mpi.load(out)
    assert found.status == "finished"
    returns = found["episodes"]["return"]
    assert set(returns.tolist()) == {0.0, 1.0}, "random combinations opened it now and then"


def test_dict_tuple_and_discrete_observations_become_one_vector() -> None:
    for seen, size in [
        (spaces.Dict(a=ROW, b=spaces.Discrete(3)), 5),
        (spaces.Tuple((ROW, spaces.Dict(c=spaces.MultiBinary(4)))), 6),
        (spaces.Discrete(7), 7),
        (spaces.MultiDiscrete([2, 3]), 5),
    ]:
        game = make_game(shaped(seen, TWO), TaskConfig(), seed(1))
        assert game.spaces == Spaces((size,), "<f4", 2)
        found = game.reset()
        seen.seed(int(np.random.Generator(np.random.PCG64(seed(1))).integers(1 << 31)))
        vector: Any = spaces.flatten(seen, seen.sample())
        assert np.array_equal(found, vector)
        assert alike(*(play(one, [0, 1]) for one in (game, restored(game))))


def restored(game: Any) -> Any:
    other = make_game(game.task, TaskConfig(), seed(9))
    other.load_state_dict(game.state_dict())
    return other


def test_every_combination_of_several_actions_is_an_action() -> None:
    for actions, sums in [
        (spaces.MultiDiscrete([3, 2]), [0, 1, 1, 2, 2, 3]),
        (spaces.MultiDiscrete([2, 2], start=[5, 1]), [6, 7, 7, 8]),
        (spaces.MultiBinary(2), [0, 1, 1, 2]),
    ]:
        game = make_game(shaped(ROW, actions), TaskConfig(), seed(1))
        game.reset()
        assert game.spaces.actions == len(sums)
        assert [game.step(action)[1] for action in range(len(sums))] == sums


def test_an_environment_that_lacks_its_library_is_refused() -> None:
    with pytest.raises(UsageError, match="'GymV21Environment-v0' can't be made"):
        make_game("GymV21Environment-v0", TaskConfig(), seed(1))


class Odd(gymnasium.Env[Array, Any]):
    """Observes 64-bit numbers and counts its actions from 5."""

    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float64)
    action_space = gymnasium.spaces.Discrete(2, start=5)

    def reset(self, **options: Any) -> tuple[Array, dict[str, Any]]:
        return np.zeros(3), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        return np.full(3, 0.5), float(action), True, True, {}


@pytest.fixture
def odd() -> Any:
    gymnasium.register("Odd-v0", entry_point=lambda **_: Odd(), disable_env_checker=True)
    yield "Odd-v0"
    del gymnasium.registry["Odd-v0"]


def test_actions_that_start_elsewhere_and_wide_numbers_fit(odd: str) -> None:
    game = GymGame(odd, TaskConfig(), seed(1))
    assert game.spaces == Spaces((3,), "<f4", 2)
    assert game.reset().dtype == np.float32
    assert [game.step(a)[1] for a in (0, 1, 2)] == [5.0, 6.0, 5.0]


def test_terminated_wins_over_truncated(odd: str) -> None:
    game = GymGame(odd, TaskConfig(max_steps=1), seed(1))
    game.reset()
    assert game.step(0)[2] == TERMINATED


class Misbehaving(gymnasium.Env[Any, Any]):
    """Gives what it is told to give at its second step."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, dtype: Any, obs: Any, reward: Any) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (2,), dtype)
        self.good, self.bad = (np.zeros(2, dtype), 0.0), (obs, reward)

    def reset(self, **options: Any) -> tuple[Array, dict[str, Any]]:
        self.turn = 0
        return self.good[0], {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.turn += 1
        return *(self.bad if self.turn == 2 else self.good), False, False, {}


def second_step(dtype: Any, obs: Any, reward: Any = 0.0) -> Turn:
    gymnasium.register("Bad-v0", entry_point=lambda **_: Misbehaving(dtype, obs, reward))
    try:
        game = GymGame("Bad-v0", TaskConfig(), seed(1))
    finally:
        del gymnasium.registry["Bad-v0"]
    game.reset()
    game.step(0)
    return game.step(0)


def test_numbers_that_a_buffer_cannot_hold_end_the_rank_with_their_name() -> None:
    nan, inf = float("nan"), float("inf")
    floats: list[Any] = [
        [nan, 0],
        [0, inf],
        [1e300, 0],
        None,
        [None, 0],
        [1.0],
        [1, [2]],
        ["1"] * 2,
    ]
    bad: Any
    for bad in floats:
        with pytest.raises(RankFailed, match=r"'Bad-v0' gave the observation .* at step 2 of"):
            second_step(np.float32, bad)
    for bad in ([-1, 0], [256, 0], [0.5, 0], [nan, 0], np.zeros((1, 2), np.uint8)):
        with pytest.raises(RankFailed, match="expected numbers from 0 to 255, of the shape"):
            second_step(np.uint8, bad)
    for reward in (nan, inf, -inf, 1e300, None, "much", [1.0, 2.0]):
        with pytest.raises(RankFailed, match=r"'Bad-v0' gave the reward .* at step 2 of"):
            second_step(np.float32, [0.0, 0.0], reward)
    assert second_step(np.uint8, [255, 1.0], np.float32(3))[1] == 3.0
    assert second_step(np.float32, [1e38, -5])[0].tolist() == np.array([1e38, -5], "<f4").tolist()


# Spaces of a whole job


def test_vectors_of_one_job_are_filled_up_to_the_longest() -> None:
    names = ["CartPole-v1", "Acrobot-v1", "MountainCar-v0"]
    assert common_spaces(names, TaskConfig()) == Spaces((6,), "<f4", 3)
    assert common_spaces(["CartPole-v1"], TaskConfig()) == Spaces((4,), "<f4", 2)


def test_atari_spaces_need_no_emulator() -> None:
    assert common_spaces(TEN_GAMES, TaskConfig()) == Spaces((256,), "|u1", 18, stack=2)
    pixels = common_spaces(TEN_GAMES, TaskConfig(obs="pixels", frame_stack=4))
    assert pixels == Spaces((4, 84, 84), "|u1", 18, stack=4)


def test_bytes_and_numbers_in_one_job_are_refused() -> None:
    for obs in ["ram", "pixels"]:
        with pytest.raises(
            UsageError, match=r"must look alike: 'Krull' observes \|u1 .*'CartPole-v1'"
        ):
            common_spaces(["Krull", "CartPole-v1"], TaskConfig(obs=obs))


def test_a_short_observation_leaves_zeros_behind_it() -> None:
    spaces = common_spaces(["CartPole-v1", "Acrobot-v1"], TaskConfig())
    envs = LocalEnvs("CartPole-v1", [make_game("CartPole-v1", TaskConfig(), seed(1))], spaces)
    assert envs.reset().shape == (1, 6)
    for _ in range(30):
        envs.send(np.array([1]))
        step = envs.recv()
        assert (step.obs[:, 4:] == 0).all()
        assert (step.start[:, 4:] == 0).all()
    assert step.obs[:, :4].any()


# Batches


class Counter:
    """A game that counts its steps; every third one is over."""

    def __init__(self, rewards: Sequence[float] = (), over: int = TERMINATED) -> None:
        self.spaces = Spaces((1,), "<f4", 2)
        self.rewards, self.over = list(rewards), over
        self.steps = self.episodes = 0
        self.closed = False

    def reset(self) -> Array:
        self.episodes += 1
        self.steps = 0
        return np.array([100.0 * self.episodes], dtype=np.float32)

    def step(self, action: int) -> Turn:
        self.steps += 1
        reward = self.rewards.pop(0) if self.rewards else float(action)
        obs = np.array([100.0 * self.episodes + self.steps], dtype=np.float32)
        return obs, reward, self.over if self.steps == 3 else 0

    def state_dict(self) -> Columns:
        return {"steps": np.array([self.steps, self.episodes])}

    def load_state_dict(self, state: Columns) -> None:
        self.steps, self.episodes = (int(value) for value in state["steps"])

    def close(self) -> None:
        self.closed = True


def test_a_batch_shows_the_last_state_and_the_first_of_the_next_episode() -> None:
    for over in [TERMINATED, TRUNCATED]:
        games = [Counter(over=over), Counter(over=over)]
        envs = LocalEnvs("counter", games, games[0].spaces)
        assert envs.reset().tolist() == [[100], [100]]
        games[1].steps = 1  # one step ahead
        seen = []
        for actions in ([0, 1], [1, 0], [1, 1]):
            envs.send(np.array(actions))
            step = envs.recv()
            seen.append([part.copy().tolist() for part in step])
        assert seen[0] == [[[101], [102]], [0, 1], [0, 0], [[101], [102]]]
        assert seen[1] == [[[102], [103]], [1, 0], [0, over], [[102], [200]]]
        assert seen[2] == [[[103], [201]], [1, 1], [over, 0], [[200], [201]]]


def test_actions_are_played_in_receive_and_not_in_send() -> None:
    game = Counter()
    envs = LocalEnvs("counter", [game], game.spaces)
    envs.reset()
    envs.send(np.array([1]))
    assert game.steps == 0
    envs.recv()
    assert game.steps == 1


def test_a_batch_is_restored_game_by_game() -> None:
    games = [Counter(), Counter()]
    envs = LocalEnvs("counter", games, games[0].spaces)
    envs.reset()
    games[1].steps = 2
    fresh = [Counter(), Counter()]
    other = LocalEnvs("counter", fresh, fresh[0].spaces)
    other.load_state_dict(envs.state_dict())
    assert [game.steps for game in fresh] == [0, 2]


def test_a_saved_batch_that_lacks_a_game_is_refused() -> None:
    games = [Counter(), Counter()]
    one = LocalEnvs("counter", games[:1], games[0].spaces)
    two = LocalEnvs("counter", games, games[0].spaces)
    with pytest.raises(DamagedData, match="lack game 1"):
        two.load_state_dict(one.state_dict())


def test_closing_a_batch_closes_every_game() -> None:
    games = [Counter(), Counter()]
    LocalEnvs("counter", games, games[0].spaces).close()
    assert all(game.closed for game in games)


@pytest.mark.atari
def test_a_used_emulator_plays_like_a_new_one() -> None:
    def play(steps: int) -> list[bytes]:
        game = make_game("Krull", TaskConfig(), np.random.SeedSequence(5))
        rng, seen = np.random.default_rng(1), [game.reset().tobytes()]
        for _ in range(steps):
            obs, _, flags = game.step(int(rng.integers(18)))
            seen.append(obs.tobytes())
            if flags & (TERMINATED | TRUNCATED):
                seen.append(game.reset().tobytes())
        game.close()
        return seen

    Emulator.idle.clear()
    new = play(600)
    (held,) = Emulator.idle
    assert play(600) == new
    assert Emulator.idle == [held]
