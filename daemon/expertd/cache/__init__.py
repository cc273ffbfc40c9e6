"""The shared arena: slots, slabs, directory, pins, eviction and the budget.

Nothing here knows sockets, event loops or files of a model.
"""
