"""Replay of routing traces: the textbook policies, the daemon's own, and the best possible one."""
