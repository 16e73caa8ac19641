"""The program of a rank: it opens MPI, agrees with the others on a plan, and runs its part."""
