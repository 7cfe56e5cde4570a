"""Models of tiny sizes with random weights: from torch alone, and from the libraries that are there."""

from __future__ import annotations

from . import audio_text, libraries, tables_graphs, vision
from .base import NotInstalled, Spec

ZOO: dict[str, Spec] = {
    spec.name: spec for spec in (*vision.SPECS, *audio_text.SPECS, *tables_graphs.SPECS, *libraries.SPECS)
}

__all__ = ["ZOO", "NotInstalled", "Spec"]
