"""Many runs in one folder that resumes: `sweep` runs a grid, `study` compares arms."""
