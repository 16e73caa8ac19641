"""From one machine to a cluster: hostfiles, launching, checking hosts. Uses no MPI itself."""
