"""An app whose `alkstore` module imports another app's, and then fails."""
