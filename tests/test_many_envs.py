"""Several environments an agent: one forward pass, streams apart, ratios as the job says."""

import threading

import numpy as np
from small import RIGHT, Sink, small_agent, small_job
from thread_links import ThreadLink

from canal_mpi.interfaces import LAST, TERMINATED, TRUNCATED
from canal_mpi.topology.graphs import full


def test_the_updates_for_each_step_stay_what_the_job_says() -> None:
    for envs in [1, 3, 4]:
        for ratio in [1.0, 0.5, 2.0]:
            job = small_job(
                train__steps=48,
                train__num_envs=envs,
                learn__updates_per_step=ratio,
                learn__learning_starts=1,
                learn__batch_size=1,
            )
            sink = Sink()
            agent = small_agent(job, [RIGHT], sink=sink)
            agent.run()
            (row,) = sink.rows["tasks"]
            assert row["env_steps"] == 48
            first = envs  # nothing can be learnt in the first turn
            assert row["updates"] == int(48 * ratio) - int(first * ratio)
            assert sum(int(e["length"]) for e in sink.rows.get("episodes", [])) <= 48


def test_frames_that_are_no_multiple_end_with_a_whole_turn() -> None:
    sink = Sink()
    small_agent(small_job(train__steps=40, train__num_envs=3), [RIGHT], sink=sink).run()
    assert sink.rows["tasks"][0]["env_steps"] == 42


def test_evaluations_inside_a_task_happen_though_no_turn_ends_on_their_step() -> None:
    sink = Sink()
    job = small_job(train__steps=42, train__num_envs=3, evaluation__interval=10)
    small_agent(job, [RIGHT], sink=sink).run()
    assert [row["env_steps"] for row in sink.rows["curve"]] == [0, 12, 21, 30]


def test_rows_of_several_environments_stay_apart_and_whole() -> None:
    job = small_job(train__steps=60, train__num_envs=3)
    agent = small_agent(job, [RIGHT])
    agent.run()
    streams = agent.replay.own.export_streams()
    assert len(streams) == 3
    whole = agent.replay.own.export()
    assert np.concatenate([part["flags"] for part in streams]).tobytes() == whole["flags"].tobytes()
    for part in streams:
        moves = (part["flags"] & LAST) == 0
        assert moves.sum() == 20
        assert part["flags"][-1] == LAST
        over = np.flatnonzero(part["flags"] & TRUNCATED)
        assert (part["flags"][over + 1] & LAST).all()
        assert not (part["flags"][moves] & TERMINATED).all()


def test_one_pass_of_the_network_serves_all_environments() -> None:
    agent = small_agent(
        small_job(train__num_envs=4, explore__eps_start=0.0, explore__eps_end=0.0), [RIGHT]
    )
    sizes = []
    act = agent.learner.act

    def counted(obs):  # type: ignore[no-untyped-def]
        sizes.append(len(obs))
        return act(obs)

    agent.learner.act = counted  # type: ignore[method-assign]
    agent.run()
    assert sizes.count(4) == 40 // 4
    assert set(sizes) == {1, 4}  # evaluation plays one game


def test_rows_that_are_swapped_inside_a_task_come_from_every_environment_once() -> None:
    job = small_job(
        train__steps=60,
        train__num_envs=3,
        row_exchange__save_interval=6,
        row_exchange__load_interval=20,
    )
    sinks = [Sink(), Sink()]
    agents = [
        small_agent(job, [RIGHT], link, sink, k, lambda round_, task, k=k: [1 - k])  # type: ignore[misc]
        for k, (link, sink) in enumerate(zip(ThreadLink.mesh(2, full(2)), sinks, strict=True))
    ]
    threads = [threading.Thread(target=agent.run, daemon=True) for agent in agents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "the swaps wait for each other for ever"
    for k, agent in enumerate(agents):
        assert sinks[k].kinds().count("swap") == 3
        sent = agents[1 - k].replay.own.export_streams()
        got = np.concatenate([lesson.export()["flags"] for lesson in agent.replay.lessons])
        assert ((got & LAST) == 0).sum() == 60
        assert sum(((part["flags"] & LAST) == 0).sum() for part in sent) == 60
