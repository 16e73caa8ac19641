"""canal-mpi from Python, without its command line: alone, or several agents under mpirun.

python train_script.py · mpirun -np 3 python train_script.py
"""

import canal_mpi

run = canal_mpi.train("smoke", out="runs/script", force=True, seed=3, settings={"learn.lr": 1e-3})
if run is not None:  # the first rank; on the others there is nothing to read
    print(run)
    print(run.frame("tasks")[["agent", "task", "source", "env_steps", "score"]])
