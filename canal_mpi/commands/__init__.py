"""Commands of the command line, a file a group; each loads what it needs when it is called."""
