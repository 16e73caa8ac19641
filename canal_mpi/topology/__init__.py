"""Who hears whom: graphs as pure functions, and links that carry offers and lessons over them."""
