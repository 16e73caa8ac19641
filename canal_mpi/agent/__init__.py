"""An agent: its loop, its lessons, its state, and what it records."""
