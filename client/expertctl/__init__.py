"""expertctl: the command people type.

Owns what is printed and how processes are started and ended for it. Modules at the top import
nothing slow: a command imports what it needs when it runs, so that `expertctl stats` starts fast.
"""

__all__: list[str] = []
