"""The daemon: owns every read of expert weights and the one shared-memory arena they live in."""

__version__ = "0.1.0"
