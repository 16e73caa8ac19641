"""Experience: the replay of the current task, lessons made of it, and who takes which."""
