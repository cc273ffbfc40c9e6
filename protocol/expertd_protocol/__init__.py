"""What daemon and clients agree on: messages, bytes of shared memory, errors, places.

Imports nothing else of this project, so that both sides can be upgraded against one text.
"""

from expertd_protocol.messages import PROTOCOL_VERSION

__all__ = ["PROTOCOL_VERSION", "__version__"]

__version__ = "0.1.0"
