"""Many runs of one kind: a grid of points, an engine that runs them, one report at the end."""
