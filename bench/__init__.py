"""What django-alkstore costs, measured against plain `sqlite3` in the same run: `make bench`.

`docs/performance.md` says how each case is measured and what its words mean. `runner.py` starts everything and
alternates; `program.py` is what each contender does when it is started; `floor.py`, `ours.py` and `peers/` are the
contenders; `cases/` has the goals.
"""
