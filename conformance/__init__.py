"""Conformance of fxgraph at scale: every op that torch's own op database knows, and whole models, against eager.

``python -m conformance ops|models|tables|upstream`` (see ``--help``), or ``make conformance``. What can come of a case
is listed in :class:`conformance.outcomes.Outcome`.
"""
