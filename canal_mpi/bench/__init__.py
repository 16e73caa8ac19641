"""How fast the parts are, against the floor."""
