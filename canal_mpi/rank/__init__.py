"""The hall: MPI opens here, every rank finds its role, and the parts are put together."""
