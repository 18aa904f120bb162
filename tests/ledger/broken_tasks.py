"""A module of tasks that cannot be imported."""

raise RuntimeError("this module is broken")
