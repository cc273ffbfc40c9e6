"""The bundled model: a real Mixture-of-Experts model of 5 MB, which is data of this package."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "demo_model"
