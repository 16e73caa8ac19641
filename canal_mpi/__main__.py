"""`python -m canal_mpi` is the same program as `canal-mpi`."""

from canal_mpi.entry import main

if __name__ == "__main__":
    main()
