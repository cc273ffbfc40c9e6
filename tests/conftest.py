"""Settings of every test: property tests have no time limit of their own, machines under load are slow."""

from hypothesis import settings

settings.register_profile("expertd", deadline=None, max_examples=50)
settings.load_profile("expertd")
