"""An app whose `alkstore` module cannot be imported."""
