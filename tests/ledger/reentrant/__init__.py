"""An app whose `alkstore` module asks, while it is imported, what is registered."""
