"""A Django project as users have one, with handlers that do nothing."""
